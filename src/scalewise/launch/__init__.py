"""How a job runs: its processes, its limits, its ending."""
