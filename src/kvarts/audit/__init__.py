"""Is it true page by page? A second bookkeeping beside the engine's."""
