"""Compare the predicted memory and step time of three strategies, without torch or a GPU."""

import scalewise
from scalewise.planner.plan import build_plan
from scalewise.units import format_bytes

COMMON = ["model=llama3_8b", "precision=bf16_mixed", "hardware=h100", "data.sequence=2048"]
STRATEGIES = {
    "DDP": ["parallelism=ddp", "parallelism.replicas=8"],
    "FSDP": ["parallelism=fsdp", "parallelism.shards=8"],
    "TP": ["parallelism=tensor", "parallelism.tensor=8"],
}

if __name__ == "__main__":
    for name, strategy in STRATEGIES.items():
        overrides = [*COMMON, *strategy, "data=synthetic", "trainer.global_batch=64"]
        plan = build_plan(scalewise.compose(overrides, check_machine=False))
        step = f"{plan.step_time.seconds:.2f} s" if plan.step_time else "unknown"
        print(f"{name}: {plan.fit.status}, peak {format_bytes(plan.fit.peak)}, step {step}")
