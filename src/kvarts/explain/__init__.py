"""Why: the story of a request or a block, and the account of prompt tokens."""
