"""Page-by-page audit of an engine: a second, independent bookkeeping."""
