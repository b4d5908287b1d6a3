"""KV events in vLLM's form, over ZMQ: what an engine's caches hold, told to routers and indexers."""
