"""Model configurations and torch modules."""
