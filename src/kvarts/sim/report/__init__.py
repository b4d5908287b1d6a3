"""Results of a run: numbers, tables, pages."""
