"""Other engines: their KV events and metrics, followed live and judged."""
