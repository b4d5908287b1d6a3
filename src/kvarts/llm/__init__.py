"""Real models on the wall clock."""
