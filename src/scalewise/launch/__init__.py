"""Job execution: processes, limits, checkpoints to resume, executors of sweeps and outcomes."""
