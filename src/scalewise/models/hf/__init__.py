"""Causal language models of transformers: read off (skeleton), alive (module), to and from disk."""
