"""Data sources, shuffle order, and batches of token sequences."""
