"""Explanations from a journal: the story of a request or block, and the hit ledger of prompt tokens."""
