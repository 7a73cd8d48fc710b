"""Figures and parts that can be read and make no run: which key is named, why, what mends it."""

import pytest
from fixtures.checkpoints import RANDOM_LLAMA
from fixtures.refusals import REFUSAL, Row, assert_refused, in_ascii

pytestmark = pytest.mark.usefixtures("workstation")

HEAD = ("model.classes=2", "model.tied=false")

RULES: list[Row] = [
    (["memory.every=0.5"], "memory.every", "is one block in so many", "memory.every=2"),
    (
        ["optimizer.in_backward=true"],
        "optimizer.in_backward",
        "before the norm of the whole gradient",
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
        "count the steps",
        "optimizer=adamw",
    ),
    (
        ["optimizer.in_backward=true", "trainer.clip_norm=null", "parallelism=ddp"],
        "optimizer.in_backward",
        "before the gradient is whole",
        "parallelism=fsdp",
    ),
    (
        ["memory=offload_activations", "compile=block"],
        "memory.offload",
        "does not reach into compiled blocks",
        "compile=none",
    ),
    (["memory=auto", "memory.budget_gib=0"], "memory.budget_gib", "must be positive", ""),
    (["memory=auto", "plan.search=all"], "memory", "chosen by plan.search", "leave out memory"),
    (["trainer.micro_batch=some"], "trainer.micro_batch", "must be positive, or auto", ""),
    (
        ["trainer.micro_batch=auto"],
        "trainer.micro_batch",
        "would depend on the device",
        "set trainer.global_batch=",
    ),
    (
        ["trainer.micro_batch=auto", "trainer.global_batch=7", "parallelism=ddp"],
        "trainer.global_batch",
        "does not go evenly into the 2 ranks",
        "set trainer.global_batch=8",
    ),
    (
        ["trainer.micro_batch=auto", "trainer.global_batch=8", "plan.search=layout"],
        "trainer.micro_batch",
        "is chosen by plan.search itself",
        "leave it out",
    ),
    (
        ["trainer.micro_batch=auto", "trainer.global_batch=8", "memory=auto"],
        "trainer.micro_batch",
        "memory=auto goes by",
        "set trainer.micro_batch=8",
    ),
    (["callbacks.guard.factor=abc"], "callbacks.guard.factor", "is not a number", "3.0 by def"),
    (["callbacks.guard.factor=-1"], "callbacks.guard.factor", "must be above 1", "3.0 by default"),
    (["callbacks.guard.factor=inf"], "callbacks.guard.factor", "finite", "it is 3.0 by default"),
    (["callbacks.guard.patience=1.5"], "callbacks.guard.patience", "not a whole number", "5"),
    (["callbacks.guard.patience=true"], "callbacks.guard.patience", "not a whole number", "5"),
    (["+callbacks.guard.fator=3"], "callbacks.guard.fator", "has no such", "guard.factor?"),
    (["callbacks.guard.fator=3"], "callbacks.guard.fator", "no such key", "guard.factor?"),
    (["callbacks.guard.every=3"], "callbacks.guard.every", "no such key", "+callbacks.guard.every"),
    (
        ["callbacks=profiler", "callbacks.profiler.active=0"],
        "callbacks.profiler.active",
        "must be 1 or more",
        "it is 3 by default",
    ),
    (
        ["+inject=kill", "+callbacks.inject.once=maybe"],
        "callbacks.inject.once",
        "nor false",
        "false",
    ),
    (
        ["+callbacks.x._target_=scalewise.training.callbacks.guard.LossGard"],
        "callbacks.x._target_",
        "is no callback of the suite",
        "LossGuard?",
    ),
    (
        ["callbacks=[early_stopping]", "trainer.validate_every=null"],
        "trainer.validate_every",
        "callbacks.early_stopping could never act",
        "trainer.validate_every=100",
    ),
    (["optimizer.lr=nan"], "optimizer.lr", "must be a positive number", ""),
    (["optimizer.beta1=1"], "optimizer.beta1", "in [0, 1)", ""),
    (
        ["optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=true"],
        "optimizer.nesterov",
        "needs momentum",
        "optimizer.momentum=0.9",
    ),
    (["seed=-1"], "seed", "[0, 2**32)", ""),
    (["name="], "name", "names a folder", "name=my-run"),
    (["name=../up"], "name", "names a folder", "name=my-run"),
    (["trainer.max_steps=null"], "trainer.max_steps", "exactly one of", "max_steps=1000"),
    (["trainer.max_tokens=9"], "trainer.max_steps", "exactly one", "trainer.max_steps=null"),
    (["trainer.max_steps=null", "trainer.max_epochs=inf"], "trainer.max_epochs", "finite", ""),
    (
        ["trainer.validate_first=true", "trainer.validate_every=null"],
        "trainer.validate_first",
        "nothing is validated",
        "trainer.validate_every=100",
    ),
    (["trainer.validate_every=0"], "trainer.validate_every", "must be positive", ""),
    (["trainer.clip_norm=nan"], "trainer.clip_norm", "must be positive", ""),
    (["launch.memory_limit_gib=inf"], "launch.memory_limit_gib", "finite", ""),
    (["launch.isolation=none", "launch.timeout=1"], "launch.isolation", "process", "auto"),
    (["checkpoint.every=0"], "checkpoint.every", "1 or more", ""),
    (["schedule.final=2"], "schedule.final", "fraction", ""),
    (["adapter=lora", "adapter.rank=0"], "adapter.rank", "1 or more", "adapter.rank=8"),
    (["adapter=lora", "adapter.alpha=0"], "adapter.alpha", "must be positive", "alpha=16"),
    (["adapter=lora", "adapter.dropout=1"], "adapter.dropout", "not in [0, 1)", ""),
    (["adapter=lora", "adapter.targets=[]"], "adapter.targets", "names no layer", "[auto]"),
    (["adapter=prompt", "adapter.tokens=0"], "adapter.tokens", "1 or more", "set 16"),
    (
        ["adapter=prompt", "model.context=256", "data.sequence=256"],
        "adapter.tokens",
        "are more than model.context=256",
        "set data.sequence=240",
    ),
    *(
        (
            ["adapter=prompt", f"parallelism={layout}", "model.context=1024"],
            "adapter",
            f"parallelism.{layout} shares rows out without",
            "set parallelism=fsdp",
        )
        for layout in ("tensor", "context", "pipeline")
    ),
    *(
        (
            ["adapter=prefix", f"parallelism={layout}", "model.context=1024"],
            "adapter",
            f"parallelism.{layout} shares rows out without",
            "set parallelism=fsdp",
        )
        for layout in ("tensor", "context")
    ),
    (
        ["adapter=prefix", "objective=dpo", "data=corpus_pairs", "model.context=1024"],
        "adapter",
        "objective=dpo asks the model without it",
        "set adapter=lora",
    ),
    (
        ["adapter=prompt", "data=synthetic", "data.packing=true", "model.context=1024"],
        "adapter",
        "lays several texts into one",
        "set data.packing=false",
    ),
    (
        ["adapter=prompt", "objective=dpo", "data=corpus_pairs", "model.context=1024"],
        "adapter",
        "objective=dpo asks the model without it",
        "set adapter=lora",
    ),
    (["adapter=dora", "adapter.rank=0"], "adapter.rank", "1 or more", "adapter.rank=8"),
    (["adapter=ia3", "adapter.targets=[]"], "adapter.targets", "names no layer", "[auto]"),
    (["adapter=ia3", "adapter.targets=['(']"], "adapter.targets", "is no pattern", ""),
    (["adapter=ia3", "adapter.targets=[down]"], "adapter.targets", "no linear layer", "there is"),
    (
        ["adapter=lora", "adapter.targets=[attention.quer]"],
        "adapter.targets",
        "is no linear layer of the model's blocks",
        "did you mean attention.query?",
    ),
    (["adapter=ia3", "adapter.trained=['(']"], "adapter.trained", "is no pattern", ""),
    (["adapter=lora", "adapter.trained=[nrom]"], "adapter.trained", "no module", "mean norm?"),
    (["adapter=lora", "adapter.trained=[head]"], "adapter.trained", "no module", ""),
    (
        ["adapter=lora", "adapter.trained=[attention.*]"],
        "adapter.trained",
        "describes attention.query, which adapter.targets describes as well",
        "leave it out",
    ),
    (
        ["adapter=lora", "adapter.trained=[.*down]", "quantization=nf4"],
        "adapter.trained",
        "describes feedforward.down, which quantization=nf4 packs",
        "quantization=none",
    ),
    (["precision=fp8", "adapter=lora"], "adapter", "freezes matrices", "precision=bf16_mixed"),
    (["precision=fp8", "data.sequence=100"], "data.sequence", "divisible by 16", "sequence=96"),
    (
        ["precision=fp8", "model.width=40", "model.heads=4", "model.feedforward=40"],
        "precision",
        "no linear layer",
        "precision=bf16_mixed",
    ),
    (["quantization=nf4"], "quantization", "cannot be trained", "add adapter=lora"),
    (
        ["quantization=qat_int4", "quantization.group=12"],
        "quantization.group",
        "is no multiple of 8",
        "set quantization.group=32",
    ),
    (
        ["quantization=qat_int4", "model.feedforward=176"],
        "quantization.group",
        "does not divide 176, the features that a linear layer reads",
        "set quantization.group=16",
    ),
    (
        ["quantization=qat_int4", "model.feedforward=100"],
        "quantization.group",
        "does not divide 100",
        "set quantization=none",
    ),
    (
        ["quantization=qat_8da4w", "model.norm=layernorm"],
        "model.norm",
        "is not Llama's, whose form quantization=qat_8da4w is exported in",
        "set model.norm=rmsnorm",
    ),
    (
        ["quantization=qat_8da4w", "adapter=lora"],
        "adapter",
        "freezes the matrices that quantization=qat_8da4w is to train",
        "set adapter=none",
    ),
    (
        ["quantization=qat_8da4w", "precision=fp8"],
        "precision",
        "rounds to floating-point numbers",
        "set precision=bf16_mixed",
    ),
    (
        ["quantization=int8", "adapter=pissa"],
        "adapter",
        "is made of whole matrices, which quantization=int8 packs",
        "set adapter=lora",
    ),
    (
        ["quantization=int8", "quantization.threshold=-1", "adapter=lora"],
        "quantization.threshold",
        "is below zero",
        "threshold=6.0",
    ),
    (
        ["quantization=fp4", "adapter=lora", "compile=block"],
        "compile",
        "bitsandbytes, which unpacks for quantization=fp4, is not compiled",
        "set compile=none",
    ),
    (["objective.loss_chunk=0"], "objective.loss_chunk", "1 or more, or null", ""),
    (["objective.label_smoothing=1"], "objective.label_smoothing", "share", ""),
    (["objective=dpo", "objective.beta=0"], "objective.beta", "must be positive", "beta=0.1"),
    (["objective=grpo"], "data", "no answers that can be checked", "data=reversal"),
    (["objective=grpo", "objective.answers=1"], "objective.answers", "2 or more", "answers=8"),
    (["objective=grpo", "objective.beta=-1"], "objective.beta", "0 or more", "beta=0"),
    (["objective=grpo", "objective.loss_chunk=8"], "objective.loss_chunk", "weighs each", ""),
    (
        ["objective=grpo", "data=reversal", "objective.beta=0.1"],
        "objective.beta",
        "no adapter can be turned off",
        "adapter=lora",
    ),
    (["data=reversal", "model.vocabulary=9"], "model.vocabulary", "too small", "vocabulary=11"),
    (["data=reversal", "data.sequence=9"], "data.sequence", "twice the digits", "sequence=10"),
    *(
        (
            ["objective=grpo", "data=reversal", f"parallelism={layout}", "data.sequence=32"],
            "objective",
            reason,
            "parallelism=fsdp",
        )
        for layout, reason in (
            ("tensor", "draws the next token from all its logits"),
            ("pipeline", "writes answers token by token"),
            ("context", "reads all of an answer so far"),
        )
    ),
    (["objective=dpo"], "data", "has no pairs of answers to compare", "data=preference"),
    (["objective=classification"], "data", "has no classes", "data=corpus_classes"),
    (["data=corpus_classes"], "data", "of a class each", "objective=classification"),
    (
        ["objective=classification", "data=corpus_classes"],
        "model.classes",
        "data.classes are 2: backwards, forwards",
        "model.classes=2 model.tied=false",
    ),
    (
        [*RANDOM_LLAMA, "objective=classification", "data=corpus_classes", "data.vocabulary=257"],
        "model.classes",
        "data.classes are 2: backwards, forwards",
        "set model=decoder_nano, or another of the suite's own, model.classes=2 model.tied=false",
    ),
    (
        [*HEAD],
        "model.classes",
        "no logits of tokens",
        "model.classes=null",
    ),
    (
        ["parallelism=tensor", "objective=classification", "data=corpus_classes", *HEAD],
        "model.classes",
        "which tensor ranks cannot share",
        "parallelism=fsdp",
    ),
    (["model.classes=2"], "model.tied", "has the head tell tokens apart", "model.tied=false"),
    (["data=corpus_pairs"], "data", "rows of two answers each", "objective=dpo"),
    (
        ["objective=dpo", "data=synthetic", "data.pairs=true", "data.packing=true"],
        "data.packing",
        "compared row by row",
        "data.packing=false",
    ),
    (["tracking.project=a/b"], "tracking.project", "without /", ""),
    (["model.heads=3"], "model.width", "not divisible by model.heads=3", "model.width=129"),
    (["data=text"], "data.paths", "is empty", "data.paths="),
    (["data=tokens", "data.paths=[/none/*]"], "data.paths", "no such file", "data.paths="),
    (["data.sequence=999"], "data.sequence", "longer than the model's context", "sequence=256"),
    (["data.vocabulary=9999"], "data.vocabulary", "beyond the model's", "data.vocabulary=4096"),
    (
        ["schedule.warmup_steps=10", "trainer.max_steps=10"],
        "schedule.warmup_steps",
        "not below trainer.max_steps=10",
        "warmup_steps=1",
    ),
    (
        ["schedule.warmup_steps=4", "trainer.max_steps=null", "trainer.max_tokens=8000"],
        "schedule.warmup_steps",
        "not below the 4 steps of trainer.max_tokens=8000",
        "warmup_steps=0",
    ),
    (["trainer.max_steps=99999999999999999999999"], "trainer.max_steps", "beyond what 64 bits", ""),
    (["data.sequence=-99999999999999999999999"], "data.sequence", "beyond what 64 bits", ""),
    (
        ["precision.parameters=bf16", "precision.compute=fp32"],
        "precision.parameters",
        "cannot be held while computing in fp32",
        "bf16/bf16",
    ),
    (["hardware.memory_gib=-1"], "hardware.memory_gib", "must be positive", ""),
    (["parallelism=ddp", "parallelism.replicas=0"], "parallelism.replicas", "1 or more", ""),
]


@pytest.mark.parametrize(REFUSAL, RULES, ids=in_ascii)
def test_a_rule_names_key_reason_and_cure(
    overrides: list[str], key: str, reason: str, cure: str
) -> None:
    assert_refused(overrides, key, reason, cure)
