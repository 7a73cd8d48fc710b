"""Benchmarks: what this machine's links carry, and what the suite costs beside a hand-made loop."""
