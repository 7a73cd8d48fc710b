"""All metrics: key, unit and meaning. The keys are part of the public interface.

Run files, W&B and reports take the metrics from this table.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MetricInfo:
    """A metric."""

    key: str
    """Key in run files and W&B."""
    unit: str
    """Unit; empty if dimensionless."""
    meaning: str
    """Description."""


_METRICS = (
    MetricInfo("step", "", "Optimizer steps done"),
    MetricInfo(
        "train/loss",
        "nats/token",
        "Mean loss of the global batch; per pair for preferences, per sample for classification",
    ),
    MetricInfo(
        "val/loss",
        "nats/token",
        "Mean validation loss; per pair for preferences, per sample for classification",
    ),
    MetricInfo("train/reward_margin", "nats", "Reward of the chosen minus the rejected completion"),
    MetricInfo("val/reward_margin", "nats", "Reward margin of the validation pairs"),
    MetricInfo(
        "train/reward_accuracy", "", "Fraction of pairs whose chosen completion has more reward"
    ),
    MetricInfo("val/reward_accuracy", "", "Reward accuracy of the validation pairs; 0.5 by chance"),
    MetricInfo("train/reward", "", "Mean reward of the completions sampled for a step's prompts"),
    MetricInfo("val/reward", "", "Mean reward of greedy completions of the validation prompts"),
    MetricInfo(
        "train/kl",
        "nats/token",
        "KL divergence of the sampled completions from the reference model",
    ),
    MetricInfo("val/kl", "nats/token", "KL divergence of the validation completions"),
    MetricInfo("train/accuracy", "", "Fraction of the step's samples classified correctly"),
    MetricInfo("val/accuracy", "", "Fraction of the validation samples classified correctly"),
    MetricInfo("train/tokens", "tokens", "Tokens trained on so far, all ranks, including padding"),
    MetricInfo(
        "train/global_batch", "samples", "Global batch of the step, in a batch-size warm-up"
    ),
    MetricInfo(
        "train/sequence", "tokens", "Sequence length of the step, in a sequence-length warm-up"
    ),
    MetricInfo("train/grad_norm", "", "Global gradient norm before clipping"),
    MetricInfo("train/skipped_steps", "", "Optimizer steps skipped so far, as loss spikes"),
    MetricInfo("train/lr", "", "Learning rate of the first parameter group"),
    MetricInfo(
        "experts/max_load", "", "Load of the busiest expert of any layer, relative to its mean load"
    ),
    MetricInfo(
        "experts/min_load", "", "Load of the idlest expert of any layer, relative to its mean load"
    ),
    MetricInfo(
        "experts/router_entropy", "nats", "Mean entropy of router scores; ln of experts if uniform"
    ),
    MetricInfo(
        "experts/dropped",
        "",
        "Pairs of a token and an expert beyond its capacity, in the step, all layers",
    ),
    MetricInfo(
        "throughput/tokens_per_s",
        "tokens/s",
        "Tokens per second of a step, all ranks, including padding",
    ),
    MetricInfo("throughput/tokens_per_s_per_device", "tokens/s", "Tokens per second per device"),
    MetricInfo(
        "throughput/unpadded_tokens_per_s",
        "tokens/s",
        "Tokens per second without padding, from the mean length of the training samples",
    ),
    MetricInfo(
        "throughput/tflops_per_s_per_device",
        "TFLOP/s",
        "Model FLOPs per second per device: 6 per weight and causal attention",
    ),
    MetricInfo(
        "throughput/mfu",
        "",
        "Model FLOPs utilization of the profile's peak: 6 FLOPs per weight and causal attention",
    ),
    MetricInfo(
        "throughput/mfu_palm",
        "",
        "Model FLOPs utilization by PaLM's convention, where attention is not causal",
    ),
    MetricInfo("time/step_s", "s", "Step time of the slowest rank of the window"),
    MetricInfo("time/data_s", "s", "Waiting for data and its transfer to the device, on that rank"),
    MetricInfo("time/forward_s", "s", "Forward pass and loss"),
    MetricInfo("time/backward_s", "s", "Backward pass with the overlapping gradient reduction"),
    MetricInfo(
        "time/forward_backward_s", "s", "Forward and backward passes of a pipeline, which overlap"
    ),
    MetricInfo("time/optimizer_s", "s", "Clipping, optimizer, schedule and callbacks after a step"),
    MetricInfo(
        "memory/parameters_bytes", "B", "Parameters and buffers, on the rank with the highest peak"
    ),
    MetricInfo("memory/gradients_bytes", "B", "Gradients after the backward pass, on that rank"),
    MetricInfo("memory/optimizer_bytes", "B", "Optimizer state of that rank"),
    MetricInfo(
        "memory/activations_bytes", "B", "Peak of activations saved for backward, on that rank"
    ),
    MetricInfo("memory/peak_bytes", "B", "Peak device memory of tensors, over all ranks"),
    MetricInfo("memory/host_peak_bytes", "B", "Peak resident set size of that rank's process"),
)

METRICS: dict[str, MetricInfo] = {metric.key: metric for metric in _METRICS}
"""Metrics by key, in the order of the columns of ``metrics.csv``."""

SOURCE_LOSS = "val/loss/"
"""Prefix of the validation loss of each source of a mixture: ``val/loss/NAME``."""


def is_metric(key: str) -> bool:
    """Whether a key is that of a metric, or of the validation loss of a source."""
    return key in METRICS or key.startswith(SOURCE_LOSS)


STEP_PHASES = {
    "data": "d",
    "forward": "f",
    "backward": "b",
    "forward_backward": "f+b",
    "optimizer": "o",
}
"""Timed phases of a step with their letters in the progress line; the metric is ``time/NAME_s``.

A run measures the phases that its parallelism strategy can separate.
"""
