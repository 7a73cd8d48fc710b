"""What bounds a step with a low MFU, and what to change."""

from __future__ import annotations

from scalewise.hardware import DeviceKind
from scalewise.planner.plan import Plan
from scalewise.planner.step_parts import step_part_title

LOW_MFU = 0.2
"""MFU below which a plan names the bottleneck."""
PADDED_SHARE = 0.25
"""Share of padded samples in a step from which the hint names them instead of the largest part."""
ADVICE = {
    "products": "use larger matrices: a larger trainer.micro_batch or less parallelism.tensor",
    "attention": "use shorter sequences (data.sequence)",
    "pointwise": "set compile=block, or a larger trainer.micro_batch",
    "recompute": "store more: memory=checkpoint_selective or memory=none",
    "optimizer": "use a larger trainer.global_batch",
    "bubble": "use more parallelism.pipeline_micro_batches",
    "loading rows": "store the prepared data on a faster disk",
    "copies off the device and back": "offload less, or use a larger trainer.micro_batch",
}
"""Change of the run by the key of the largest part of the step in ``plan.json``."""
COMMUNICATION_ADVICE = "use fewer ranks on this axis, or a larger trainer.micro_batch"


def bottleneck_hint(plan: Plan) -> str | None:
    """Return what bounds a GPU step with a low MFU, and a change; None: MFU is not low.

    It is the padding of the batch, or the largest part of the step.
    """
    step, run = plan.step_time, plan.run
    if step is None or plan.mfu is None or plan.mfu >= LOW_MFU:
        return None
    if run.hardware.device is not DeviceKind.cuda:
        return None
    name, seconds = next(iter(step.parts().items()))
    advice = ADVICE.get(name, COMMUNICATION_ADVICE)
    bf16, peak = (run.hardware.peak_flops(kind) for kind in ("bf16", run.precision.peak_kind))
    if name == "pointwise" and not run.objective.supports_compile:
        advice = "set a larger trainer.micro_batch"
    if name == "products" and bf16 and peak and bf16 > peak:
        advice = f"set precision=bf16_mixed, whose peak rate is {bf16 / peak:.1f} times as high"
    padded = 1 - run.global_batch / (run.accumulation * run.samples_per_forward)
    if padded >= PADDED_SHARE:
        size = max(1, run.global_batch // run.parallelism.data_parallel_size)
        return (
            f"MFU is below {LOW_MFU:.0%}: {padded:.0%} of the samples of a step are padding; "
            f"set trainer.micro_batch={size} or a larger trainer.global_batch"
        )
    share = seconds / step.seconds
    return f"MFU is below {LOW_MFU:.0%}: {step_part_title(name)} takes {share:.0%} of it; {advice}"
