"""What kvarts adds to the contract, version 1."""
