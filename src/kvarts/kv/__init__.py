"""KV memory: the content of pages, the requests that reference them, and the order in which pages are evicted."""
