"""Every metric the suite measures: its key, its unit and what it means. A part of the surface.

A new metric is one row here; the files of a run, W&B and the report take it from this table.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MetricInfo:
    """One measured number."""

    key: str
    unit: str
    meaning: str


_ROWS = (
    MetricInfo("step", "", "Optimizer steps done"),
    MetricInfo(
        "train/loss",
        "nats/token",
        "Mean loss of the global batch; of preferences, a pair; of classes, a row",
    ),
    MetricInfo(
        "val/loss",
        "nats/token",
        "Mean loss of the held-out rows; of preferences, a pair; of classes, a row",
    ),
    MetricInfo(
        "train/reward_margin", "nats", "Reward of the chosen answer over the rejected one's"
    ),
    MetricInfo("val/reward_margin", "nats", "The same, of the held-out pairs"),
    MetricInfo("train/reward_accuracy", "", "Share of pairs whose chosen answer has more reward"),
    MetricInfo("val/reward_accuracy", "", "The same, of the held-out pairs; by chance 0.5"),
    MetricInfo("train/reward", "", "Mean reward of the answers drawn for a step's prompts"),
    MetricInfo("val/reward", "", "Mean reward of the likeliest answers to the held-out prompts"),
    MetricInfo("train/kl", "nats/token", "Divergence of the drawn answers from the reference"),
    MetricInfo("val/kl", "nats/token", "The same, of the answers to the held-out prompts"),
    MetricInfo("train/accuracy", "", "Share of the step's rows whose class is told rightly"),
    MetricInfo("val/accuracy", "", "The same, of the held-out rows"),
    MetricInfo("train/tokens", "tokens", "Tokens trained on so far, padding included, all ranks"),
    MetricInfo("train/grad_norm", "", "Norm of the whole gradient before clipping"),
    MetricInfo("train/lr", "", "Learning rate of the first parameter group"),
    MetricInfo(
        "throughput/tokens_per_s",
        "tokens/s",
        "Tokens of a step over its time, all ranks; padding is counted",
    ),
    MetricInfo("throughput/tokens_per_s_per_device", "tokens/s", "The same, for one device"),
    MetricInfo(
        "throughput/unpadded_tokens_per_s",
        "tokens/s",
        "The same of all ranks without padding, by the mean length of the training rows",
    ),
    MetricInfo(
        "throughput/tflops_per_s_per_device",
        "TFLOP/s",
        "Model flops of a step over its time, for one device; recomputation is not counted",
    ),
    MetricInfo("throughput/mfu", "", "Model flops over the peak of the hardware profile"),
    MetricInfo("time/step_s", "s", "One whole step of the rank that was slowest over its window"),
    MetricInfo("time/data_s", "s", "Waiting for rows and moving them to the device, on that rank"),
    MetricInfo("time/forward_s", "s", "Forward pass and loss"),
    MetricInfo("time/backward_s", "s", "Backward pass with the gradient reduction it hides"),
    MetricInfo(
        "time/forward_backward_s", "s", "The two together, of a pipeline: it runs them at once"
    ),
    MetricInfo("time/optimizer_s", "s", "Clipping, optimizer, schedule and callbacks after a step"),
    MetricInfo("memory/parameters_bytes", "B", "Parameters and buffers, on the rank of the peak"),
    MetricInfo("memory/gradients_bytes", "B", "Gradients after backward, on that rank"),
    MetricInfo("memory/optimizer_bytes", "B", "Optimizer state held by that rank"),
    MetricInfo("memory/activations_bytes", "B", "What forward keeps there for backward, at most"),
    MetricInfo("memory/peak_bytes", "B", "Most device memory that tensors held, of all ranks"),
    MetricInfo("memory/host_peak_bytes", "B", "Largest resident set of that rank's process"),
)

METRICS: dict[str, MetricInfo] = {metric.key: metric for metric in _ROWS}
"""The table by key, in the order of the columns of metrics.csv."""

TIMES = {
    "data": "d",
    "forward": "f",
    "backward": "b",
    "forward_backward": "f+b",
    "optimizer": "o",
}
"""The parts of a step that are timed, and their letters in a line; ``time/NAME_s`` each.

A step has those that its layout can tell apart.
"""
