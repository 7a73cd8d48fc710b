"""Every metric the suite measures: its key, its unit and what it means. A part of the surface.

A new metric is one row here; the files of a run, W&B and the report take it from this table.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One measured number."""

    key: str
    unit: str
    meaning: str


_ROWS = (
    Metric("step", "", "Optimizer steps done"),
    Metric("train/loss", "nats/token", "Mean loss of the global batch"),
    Metric("val/loss", "nats/token", "Mean loss of the held-out rows"),
    Metric("train/tokens", "tokens", "Tokens trained on so far, over all ranks"),
    Metric("train/grad_norm", "", "Norm of the whole gradient before clipping"),
    Metric("train/lr", "", "Learning rate of the first parameter group"),
    Metric("throughput/tokens_per_s", "tokens/s", "Tokens of a step over its time, all ranks"),
    Metric("throughput/tokens_per_s_per_device", "tokens/s", "The same, for one device"),
    Metric(
        "throughput/tflops_per_s_per_device",
        "TFLOP/s",
        "Model flops of a step over its time, for one device; recomputation is not counted",
    ),
    Metric("throughput/mfu", "", "Model flops over the peak of the hardware profile"),
    Metric("time/step_s", "s", "Data, forward, backward and optimizer of a step, slowest rank"),
    Metric("time/data_s", "s", "Waiting for rows and moving them to the device"),
    Metric("time/forward_s", "s", "Forward pass and loss"),
    Metric("time/backward_s", "s", "Backward pass with the gradient reduction it hides"),
    Metric("time/optimizer_s", "s", "Clipping, optimizer and schedule"),
    Metric("memory/parameters_bytes", "B", "Parameters and buffers held by a rank"),
    Metric("memory/gradients_bytes", "B", "Gradients held by a rank after backward"),
    Metric("memory/optimizer_bytes", "B", "Optimizer state held by a rank"),
    Metric("memory/activations_bytes", "B", "What forward keeps for backward, at its largest"),
    Metric("memory/peak_bytes", "B", "Most device memory that tensors held in a step"),
    Metric("memory/host_peak_bytes", "B", "Largest resident set of a rank's process"),
)

METRICS: dict[str, Metric] = {metric.key: metric for metric in _ROWS}
"""The table by key, in the order of the columns of metrics.csv."""

TIMES = ("data", "forward", "backward", "optimizer")
"""The parts of a step that are timed; ``time/NAME_s`` each."""
