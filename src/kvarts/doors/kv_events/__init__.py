"""KV events in vLLM's format over ZMQ: the contents of an engine's caches, for routers and indexers."""
