"""Training proper: the Lightning module, the loop and its callbacks."""
