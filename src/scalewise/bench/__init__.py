"""Benchmarks: collectives, overhead of the trainer and of sweeps, and accuracy of the planner."""
