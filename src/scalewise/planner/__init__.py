"""What a run will need and take, worked out from its specs alone: no torch."""
