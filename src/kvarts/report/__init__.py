"""What a run says: numbers, tables, pages."""
