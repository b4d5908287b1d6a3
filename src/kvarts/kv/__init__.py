"""KV memory: what a page holds, which requests reference it, and which page goes first."""
