"""The command line: parse, call the library, render. Decides nothing."""
