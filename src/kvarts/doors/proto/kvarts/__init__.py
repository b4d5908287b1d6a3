"""What kvarts adds to the contract, package `kvarts.v1`."""
