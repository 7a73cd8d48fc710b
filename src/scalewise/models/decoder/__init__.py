"""Decoder-only transformers: described (spec), alive (module), from and to disk (weights)."""
