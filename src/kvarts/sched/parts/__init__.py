"""Parts: what only some schedulers do, each in one file, and their catalogue."""
