"""What a run trained, in the formats of Hugging Face: models, adapters, and a card that tells."""
