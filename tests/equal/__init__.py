"""Law L15: kvarts next to what it is equal to, vLLM's own scheduler and NVIDIA Dynamo's replay, on random workloads."""
