"""What a step costs: memory by phase, time by phase."""
