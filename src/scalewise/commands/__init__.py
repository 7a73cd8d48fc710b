"""One door per verb."""
