"""vLLM's start-up: the specs of layers, the memory that is left for KV, and the blocks that it is divided into."""
