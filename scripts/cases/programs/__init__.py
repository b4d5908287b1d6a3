"""Programs that run in either checkout, as files of their own."""
