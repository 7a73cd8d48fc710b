"""Reports of runs and sweeps: a self-contained ``report.html`` and a W&B report."""
