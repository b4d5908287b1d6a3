"""An engine core behind `vllm serve`: vLLM's own HTTP server, with the engine of a mock in place of vLLM's."""
