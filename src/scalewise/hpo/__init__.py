"""A search over axes: which trials to run next, how they ended, and which were best."""
