"""Rules of models, data, objectives, adapters and quantization: key, reason and fix."""

import pytest
from fixtures.hf_checkpoints import RANDOM_LLAMA
from fixtures.rejections import REJECTION_FIELDS, RejectionCase, assert_rejected, overrides_id

pytestmark = pytest.mark.usefixtures("cpu_machine", "example_files")

CLASSIFICATION_HEAD = ("model.classes=2", "model.tied=false")

RULES: list[RejectionCase] = [
    (["adapter=lora", "adapter.rank=0"], "adapter.rank", "1 or more", "adapter.rank=8"),
    (["adapter=lora", "adapter.alpha=0"], "adapter.alpha", "must be positive", "alpha=16"),
    (["adapter=lora", "adapter.dropout=1"], "adapter.dropout", "must be in [0, 1)", ""),
    (["adapter=lora", "adapter.targets=[]"], "adapter.targets", "is empty", "[auto]"),
    (["adapter=prompt", "adapter.tokens=0"], "adapter.tokens", "1 or more", "adapter.tokens=16"),
    (
        ["adapter=prompt", "model.context=256", "data.sequence=256"],
        "adapter.tokens",
        "exceeds model.context=256",
        "set data.sequence=240",
    ),
    (
        ["adapter=prompt", "adapter.tokens=300", "model.context=256"],
        "adapter.tokens",
        "exceeds model.context=256",
        "set adapter.tokens=128 data.sequence=128",
    ),
    *(
        (
            [f"adapter={kind}", "parallelism=context", "model.context=1024"],
            "adapter",
            "not supported with parallelism.context",
            "set parallelism=fsdp",
        )
        for kind in ("prompt", "prefix")
    ),
    (
        ["adapter=prompt", "parallelism=pipeline", "model.context=1024"],
        "adapter",
        "trains prompt tokens of the first stage only",
        "set parallelism=fsdp",
    ),
    (
        ["adapter=prefix", "objective=dpo", "data=corpus_pairs", "model.context=1024"],
        "adapter",
        "which objective=dpo requires",
        "set adapter=lora",
    ),
    (
        ["adapter=prompt", "data=synthetic", "data.packing=true", "model.context=1024"],
        "adapter",
        "joins several texts in one sequence",
        "set data.packing=false",
    ),
    (
        ["adapter=prompt", "objective=dpo", "data=corpus_pairs", "model.context=1024"],
        "adapter",
        "which objective=dpo requires",
        "set adapter=lora",
    ),
    (["adapter=dora", "adapter.rank=0"], "adapter.rank", "1 or more", "adapter.rank=8"),
    (["adapter=ia3", "adapter.targets=[]"], "adapter.targets", "is empty", "[auto]"),
    (["adapter=ia3", "adapter.targets=['(']"], "adapter.targets", "is not a valid regular", ""),
    (
        ["adapter=ia3", "adapter.targets=[down]"],
        "adapter.targets",
        "no linear layer",
        "available: ",
    ),
    (
        ["adapter=lora", "adapter.targets=[attention.quer]"],
        "adapter.targets",
        "matches no linear layer of the model's blocks",
        "did you mean attention.query?",
    ),
    (["adapter=ia3", "adapter.trained=['(']"], "adapter.trained", "is not a valid regular", ""),
    (["adapter=lora", "adapter.trained=[nrom]"], "adapter.trained", "no module", "mean norm?"),
    (["adapter=lora", "adapter.trained=[head]"], "adapter.trained", "no module", ""),
    (
        ["adapter=lora", "adapter.trained=[attention.*]"],
        "adapter.trained",
        "matches attention.query, which adapter.targets matches too",
        "remove it",
    ),
    (
        ["adapter=lora", "adapter.trained=[.*down]", "quantization=nf4"],
        "adapter.trained",
        "matches feedforward.down, which quantization=nf4 packs",
        "quantization=none",
    ),
    (["precision=fp8", "adapter=lora"], "adapter", "freezes matrices", "precision=bf16_mixed"),
    (["precision=fp8", "data.sequence=100"], "data.sequence", "divisible by 16", "sequence=96"),
    (["quantization=nf4"], "quantization", "cannot be trained", "add adapter=lora"),
    (
        ["quantization=qat_int4", "quantization.group=12"],
        "quantization.group",
        "must be a multiple of 8",
        "set quantization.group=32",
    ),
    (
        ["quantization=qat_int4", "model.feedforward=176"],
        "quantization.group",
        "does not divide 176, the number of input features",
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
        "differs from Llama, whose format quantization=qat_8da4w is exported in",
        "set model.norm=rmsnorm",
    ),
    (
        ["quantization=qat_8da4w", "adapter=lora"],
        "adapter",
        "freezes the matrices that quantization=qat_8da4w trains",
        "set adapter=none",
    ),
    (
        ["quantization=int8", "adapter=pissa"],
        "adapter",
        "is initialized from matrices that quantization=int8 packs",
        "set adapter=lora",
    ),
    (
        ["quantization=int8", "quantization.threshold=-1", "adapter=lora"],
        "quantization.threshold",
        "must be 0 or more",
        "threshold=6.0",
    ),
    (["objective.loss_chunk=0"], "objective.loss_chunk", "1 or more, or null", ""),
    (["objective.label_smoothing=1"], "objective.label_smoothing", "fraction", ""),
    (["objective=dpo", "objective.beta=0"], "objective.beta", "must be positive", "beta=0.1"),
    (["objective=grpo"], "data", "does not define a reward of answers", "data=reversal"),
    (["objective=grpo", "objective.answers=1"], "objective.answers", "2 or more", "answers=8"),
    (["objective=grpo", "objective.beta=-1"], "objective.beta", "0 or more", "beta=0"),
    (["objective=grpo", "objective.loss_chunk=8"], "objective.loss_chunk", "weighs each", ""),
    (
        ["objective=grpo", "data=reversal", "objective.beta=0.1"],
        "objective.beta",
        "an adapter that can be disabled",
        "adapter=lora",
    ),
    (["data=reversal", "model.vocabulary=9"], "model.vocabulary", "too small", "vocabulary=11"),
    (["data=reversal", "data.sequence=9"], "data.sequence", "must be twice", "sequence=10"),
    *(
        (
            ["objective=grpo", "data=reversal", f"parallelism={strategy}", "data.sequence=32"],
            "objective",
            reason,
            "parallelism=fsdp",
        )
        for strategy, reason in (
            ("tensor", "samples from complete logits"),
            ("pipeline", "generates token by token"),
            ("context", "generates from complete sequences"),
        )
    ),
    (["objective=dpo"], "data", "contains no preference pairs", "data=preference"),
    (["objective=classification"], "data", "contains no class labels", "data=corpus_classes"),
    (["data=corpus_classes"], "data", "contains class labels", "objective=classification"),
    (
        ["objective=classification", "data=corpus_classes"],
        "model.classes",
        "2 classes of data.classes: backwards, forwards",
        "model.classes=2 model.tied=false",
    ),
    (
        [*RANDOM_LLAMA, "objective=classification", "data=corpus_classes", "data.vocabulary=257"],
        "model.classes",
        "2 classes of data.classes: backwards, forwards",
        "set model=decoder_nano model.classes=2 model.tied=false",
    ),
    (
        [*CLASSIFICATION_HEAD],
        "model.classes",
        "replaces the token logits",
        "model.classes=null",
    ),
    (
        [
            "parallelism=tensor",
            "objective=classification",
            "data=corpus_classes",
            *CLASSIFICATION_HEAD,
        ],
        "model.classes",
        "which tensor parallelism cannot shard",
        "parallelism=fsdp",
    ),
    (
        ["model.classes=2"],
        "model.tied",
        "a tied head has one output per token id",
        "model.tied=false",
    ),
    (["data=corpus_pairs"], "data", "contains preference pairs", "objective=dpo"),
    (
        ["objective=dpo", "data=synthetic", "data.pairs=true", "data.packing=true"],
        "data.packing",
        "compared one by one",
        "data.packing=false",
    ),
    (["model.heads=3"], "model.width", "not divisible by model.heads=3", "model.width=129"),
    (["data=text"], "data.paths", "is empty", "data.paths="),
    (["data=tokens", "data.paths=[/none/*]"], "data.paths", "no such file", "data.paths="),
    (["data.sequence=999"], "data.sequence", "exceeds the context of the model", "sequence=256"),
    (
        ["data.vocabulary=9999"],
        "data.vocabulary",
        "exceeds the vocabulary of the model",
        "data.vocabulary=4096",
    ),
    (
        ["model.vocabulary=24"],
        "data.vocabulary",
        "exceeds the vocabulary of the model",
        "set model.vocabulary=",
    ),
    (["data=text", "data.paths=[/]"], "data.paths", "is a folder", "set 'data.paths=[/"),
    (
        ["data.tokenizer=/"],
        "data.tokenizer",
        "is a folder",
        "to the path of a tokenizer.json",
    ),
    (["data.sequence=-99999999999999999999999"], "data.sequence", "exceeds the 64-bit maximum", ""),
]


@pytest.mark.parametrize(REJECTION_FIELDS, RULES, ids=overrides_id)
def test_model_rule_names_key_reason_and_fix(
    overrides: list[str], key: str, reason: str, fix: str
) -> None:
    assert_rejected(overrides, key, reason, fix)
