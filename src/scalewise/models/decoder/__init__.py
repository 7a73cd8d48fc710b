"""Decoder-only transformers: configuration, torch module and Hugging Face weights."""
