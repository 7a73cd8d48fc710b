"""Language models of Hugging Face transformers: configuration, torch modules and weights."""
