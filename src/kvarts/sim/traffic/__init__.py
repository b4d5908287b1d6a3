"""Traffic: traces, workloads and arrival processes. Independent of the engine."""
