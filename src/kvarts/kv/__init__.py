"""KV memory: what a page holds, who holds it, and which page goes first."""
