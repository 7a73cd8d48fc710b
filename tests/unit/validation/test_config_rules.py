"""Rules between valid options: key, reason and fix."""

import pytest
from fixtures.rejections import REJECTION_FIELDS, RejectionCase, assert_rejected, overrides_id

pytestmark = pytest.mark.usefixtures("cpu_machine", "example_files")

IN_BACKWARD = ["optimizer.in_backward=true", "trainer.clip_norm=null"]
LOCAL_SGD = ["parallelism=ddp", "parallelism.comm_hook=post_local_sgd"]
ROUNDING = ["precision=bf16_true", "precision.stochastic_rounding=true"]
RULES: list[RejectionCase] = [
    *(
        (
            [f"precision={precision}", ROUNDING[1]],
            "precision.stochastic_rounding",
            "requires bf16 parameters",
            "set precision=bf16_true",
        )
        for precision in ("fp32", "bf16_mixed", "fp8")
    ),
    *(
        ([*ROUNDING, *overrides], key, reason, fix)
        for overrides, key, reason, fix in (
            (["optimizer.offload=true"], "optimizer.offload", "=true", "optimizer.offload=false"),
            (["optimizer=muon"], "optimizer", "is not supported with precision", "=adamw"),
            (["optimizer=adamw_8bit"], "optimizer", "is not supported with precision", "=adamw"),
            (["optimizer=adamw_paged"], "optimizer", "is not supported with precision", "=adamw"),
            (
                ["optimizer=schedule_free", "schedule=constant"],
                "optimizer",
                "is not supported with precision",
                "precision.stochastic_rounding=false",
            ),
            (
                ["optimizer.in_backward=true", "trainer.clip_norm=null"],
                "optimizer.in_backward",
                "is not supported with precision",
                "optimizer.in_backward=false",
            ),
            (
                ["parallelism=ddp", "optimizer.shard=true"],
                "optimizer.shard",
                "is not supported with precision",
                "parallelism=fsdp parallelism.shard=optimizer",
            ),
            (
                ["parallelism=deepspeed_zero2"],
                "parallelism",
                "updates the parameters itself",
                "parallelism=fsdp",
            ),
            (
                ["parallelism=ddp", "parallelism.comm_hook=post_local_sgd"],
                "parallelism.comm_hook",
                "averages bf16 parameters",
                "parallelism.comm_hook=none",
            ),
            *(
                (
                    [f"parallelism={axis}"],
                    f"parallelism.{axis}",
                    "is not supported with precision",
                    f"parallelism=fsdp parallelism.{axis}=1",
                )
                for axis in ("pipeline", "context", "tensor")
            ),
            (
                ["parallelism=fsdp", "parallelism.cpu_offload=true"],
                "parallelism.cpu_offload",
                "is not supported with precision",
                "parallelism.cpu_offload=false",
            ),
        )
    ),
    (["memory.every=0.5"], "memory.every", "must be 1 or more", "memory.every=2"),
    (
        ["optimizer.in_backward=true"],
        "optimizer.in_backward",
        "before the gradient norm is known",
        "trainer.clip_norm=null",
    ),
    (
        ["optimizer.in_backward=true", "trainer.clip_norm=null", "trainer.global_batch=64"],
        "optimizer.in_backward",
        "before the gradients of",
        "trainer.global_batch=",
    ),
    (
        [
            "optimizer=schedule_free",
            "optimizer.in_backward=true",
            "trainer.clip_norm=null",
            "schedule=constant",
        ],
        "optimizer.in_backward",
        "optimizers that average weights",
        "optimizer=adamw",
    ),
    (
        ["optimizer.in_backward=true", "trainer.clip_norm=null", "parallelism=ddp"],
        "optimizer.in_backward",
        "requires complete gradients",
        "parallelism=fsdp",
    ),
    (
        ["memory=offload_activations", "compile=block"],
        "memory.offload",
        "is not supported with compiled blocks",
        "compile=none",
    ),
    *(
        ([f"trainer.{option}", *others], key or f"trainer.{option[:-3]}", reason, fix)
        for option in ("skip_sigma=10", "clip_percentile=90")
        for others, key, reason, fix in (
            (["parallelism=deepspeed_zero2"], "", "measures the gradient", "parallelism=fsdp"),
            (LOCAL_SGD, "", "equal on every rank", "parallelism.comm_hook=none"),
            (IN_BACKWARD, "optimizer.in_backward", "is known, which trainer.", "=null"),
        )
    ),
    (["trainer.skip_sigma=0"], "trainer.skip_sigma", "must be positive", ""),
    (["trainer.max_skipped_steps=0"], "trainer.max_skipped_steps", "must be positive", ""),
    (["trainer.rolling_window=1"], "trainer.rolling_window", "must be 2 or more", "=128"),
    (["trainer.clip_percentile=0"], "trainer.clip_percentile", "must be in (0, 100]", "=90"),
    (["trainer.clip_percentile=101"], "trainer.clip_percentile", "must be in (0, 100]", "=90"),
    (["schedule.rewarmup_steps=-1"], "schedule.rewarmup_steps", "must be 0 or more", ""),
    (["objective.z_loss=-1"], "objective.z_loss", "must be a number of 0 or more", "=1e-4"),
    (["memory=auto", "memory.budget_gib=0"], "memory.budget_gib", "must be positive", ""),
    (["memory=auto", "plan.search=all"], "memory", "conflicts with plan.search", "leave it out"),
    (["trainer.micro_batch=some"], "trainer.micro_batch", "must be positive, or auto", ""),
    (
        ["trainer.micro_batch=auto"],
        "trainer.micro_batch",
        "training depends on the device",
        "set trainer.global_batch=",
    ),
    (
        ["trainer.micro_batch=auto", "trainer.global_batch=7", "parallelism=ddp"],
        "trainer.global_batch",
        "is not divisible by 2 data-parallel ranks",
        "set trainer.global_batch=8",
    ),
    (
        ["trainer.micro_batch=auto", "trainer.global_batch=8", "plan.search=layout"],
        "trainer.micro_batch",
        "not supported with plan.search",
        "remove it",
    ),
    (
        ["trainer.micro_batch=auto", "trainer.global_batch=8", "memory=auto"],
        "trainer.micro_batch",
        "not supported with memory=auto",
        "set trainer.micro_batch=8",
    ),
    (
        ["callbacks.guard.factor=abc"],
        "callbacks.guard.factor",
        "is not a number",
        "guard.factor=3.0",
    ),
    (
        ["callbacks.guard.factor=-1"],
        "callbacks.guard.factor",
        "must be above 1",
        "callbacks.guard.factor=3.0",
    ),
    (["callbacks.guard.factor=inf"], "callbacks.guard.factor", "finite", "guard.factor=3.0"),
    *(
        (
            ["callbacks=[ema]", f"callbacks.ema.decay={decay}"],
            "callbacks.ema.decay",
            "must be in [0, 1)",
            "the default is callbacks.ema.decay=0.999",
        )
        for decay in ("2", "1", "-0.1", "1e400")
    ),
    (
        ["callbacks=[ema]", "callbacks.ema.decay=high"],
        "callbacks.ema.decay",
        "is not a number",
        "callbacks.ema.decay=0.999",
    ),
    (
        ["callbacks=[ema]", "+callbacks.ema.update_every_n_steps=0"],
        "callbacks.ema.update_every_n_steps",
        "must be 1 or more",
        "callbacks.ema.update_every_n_steps=1",
    ),
    (
        ["callbacks=[ema]", "optimizer=schedule_free", "schedule=constant"],
        "callbacks.ema",
        "averages the weights itself",
        "set optimizer=adamw, or remove it",
    ),
    (
        ["callbacks=[ema]", "parallelism=ddp", "parallelism.comm_hook=post_local_sgd"],
        "callbacks.ema",
        "averages the weights of one rank",
        "set parallelism.comm_hook=none",
    ),
    (["callbacks.guard.patience=1.5"], "callbacks.guard.patience", "not an integer", "5"),
    (["callbacks.guard.patience=true"], "callbacks.guard.patience", "not an integer", "5"),
    (
        ["+callbacks.guard.fator=3"],
        "callbacks.guard.fator",
        "is not an argument of",
        "guard.factor?",
    ),
    (["callbacks.guard.fator=3"], "callbacks.guard.fator", "no such key", "guard.factor?"),
    (["callbacks.guard.every=3"], "callbacks.guard.every", "no such key", "+callbacks.guard.every"),
    (
        ["callbacks=profiler", "callbacks.profiler.active=0"],
        "callbacks.profiler.active",
        "must be 1 or more",
        "callbacks.profiler.active=3",
    ),
    (
        ["+inject=kill", "+callbacks.inject.once=maybe"],
        "callbacks.inject.once",
        "true or false",
        "false",
    ),
    (
        ["+callbacks.x._target_=scalewise.training.callbacks.loss_guard.LossGard"],
        "callbacks.x._target_",
        "is not a scalewise callback",
        "LossGuard?",
    ),
    (
        ["callbacks=[early_stopping]", "trainer.validate_every=null"],
        "trainer.validate_every",
        "callbacks.early_stopping requires validation",
        "trainer.validate_every=100",
    ),
    (["optimizer.lr=nan"], "optimizer.lr", "must be a positive number", ""),
    (["optimizer.beta1=1"], "optimizer.beta1", "in [0, 1)", ""),
    (
        ["optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=true"],
        "optimizer.nesterov",
        "requires momentum",
        "optimizer.momentum=0.9",
    ),
    (["seed=-1"], "seed", "[0, 2**32)", ""),
    (["name="], "name", "1 to 128 printable", "name=my-run"),
    (["name=../up"], "name", "1 to 128 printable", "name=my-run"),
    (["trainer.max_steps=null"], "trainer.max_steps", "exactly one of", "max_steps=1000"),
    (["trainer.max_tokens=9"], "trainer.max_steps", "exactly one", "trainer.max_steps=null"),
    (["trainer.max_steps=null", "trainer.max_epochs=inf"], "trainer.max_epochs", "finite", ""),
    (
        ["trainer.validate_first=true", "trainer.validate_every=null"],
        "trainer.validate_first",
        "requires validation",
        "trainer.validate_every=100",
    ),
    (["trainer.validate_every=0"], "trainer.validate_every", "must be positive", ""),
    (["trainer.clip_norm=nan"], "trainer.clip_norm", "must be positive", ""),
    (["launch.memory_limit_gib=inf"], "launch.memory_limit_gib", "finite", ""),
    (["launch.isolation=none", "launch.timeout=1"], "launch.isolation", "process", "auto"),
    (["checkpoint.every=0"], "checkpoint.every", "1 or more", ""),
    (["schedule.final=2"], "schedule.final", "fraction", ""),
    (
        ["adapter=prompt", "adapter.tokens=5", "parallelism=tensor", "model.context=1024"],
        "parallelism.tensor",
        "tokens, with adapter.tokens, of a sequence on a rank",
        "set parallelism.sequence_parallel=false",
    ),
    (
        ["precision=fp8", "model.width=40", "model.heads=4", "model.feedforward=40"],
        "precision",
        "no linear layer",
        "precision=bf16_mixed",
    ),
    (
        ["quantization=qat_8da4w", "precision=fp8"],
        "precision",
        "casts to fp8 the operands",
        "set precision=bf16_mixed",
    ),
    (
        ["quantization=fp4", "adapter=lora", "compile=block"],
        "compile",
        "is not supported with bitsandbytes, which unpacks for quantization=fp4",
        "set compile=none",
    ),
    (["tracking.project=a/b"], "tracking.project", "contain /", ""),
    (
        ["schedule.warmup_steps=10", "trainer.max_steps=10"],
        "schedule.warmup_steps",
        "must be below trainer.max_steps=10",
        "warmup_steps=1",
    ),
    (
        ["schedule.warmup_steps=4", "trainer.max_steps=null", "trainer.max_tokens=8000"],
        "schedule.warmup_steps",
        "must be below the 4 steps of trainer.max_tokens=8000",
        "warmup_steps=0",
    ),
    (
        ["trainer.max_steps=99999999999999999999999"],
        "trainer.max_steps",
        "exceeds the 64-bit maximum",
        "",
    ),
    (
        ["precision.parameters=bf16", "precision.compute=fp32"],
        "precision.parameters",
        "is not supported with precision.compute=fp32",
        "bf16/bf16",
    ),
    (["hardware.memory_gib=-1"], "hardware.memory_gib", "must be positive", ""),
    (["parallelism=ddp", "parallelism.replicas=0"], "parallelism.replicas", "1 or more", ""),
]


@pytest.mark.parametrize(REJECTION_FIELDS, RULES, ids=overrides_id)
def test_config_rule_names_key_reason_and_fix(
    overrides: list[str], key: str, reason: str, fix: str
) -> None:
    assert_rejected(overrides, key, reason, fix)
