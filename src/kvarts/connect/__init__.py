"""Other engines: what their KV events and metrics say, followed live and judged."""
