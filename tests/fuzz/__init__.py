"""A fuzzer of command lines: random valid combinations of options over small random traces, judged by their outputs."""
