"""Rules of batch-size and sequence-length warm-up: each rejection has a fix that works."""

import pytest
from fixtures.hf_checkpoints import RANDOM_T5
from fixtures.rejections import REJECTION_FIELDS, RejectionCase, assert_rejected, overrides_id

pytestmark = pytest.mark.usefixtures("cpu_machine", "example_files")

BATCHES = (
    "+trainer.batch_warmup={a:{until_step:3,global_batch:4},b:{until_step:5,global_batch:8}}",
)
LENGTHS = ("+trainer.sequence_warmup={a:{until_step:3,sequence:8},b:{until_step:5,sequence:16}}",)
RULES: list[RejectionCase] = [
    *(
        (["trainer.global_batch=16", "trainer.micro_batch=4", *BATCHES, *others], key, reason, fix)
        for others, key, reason, fix in (
            (
                ["trainer.batch_warmup.a.global_batch=6"],
                "trainer.batch_warmup.a.global_batch",
                "is not a multiple of 4: trainer.micro_batch=4 x 1 data-parallel rank",
                "a.global_batch=8",
            ),
            (
                [
                    "parallelism=ddp",
                    "trainer.micro_batch=auto",
                    "trainer.batch_warmup.b.global_batch=9",
                ],
                "trainer.batch_warmup.b.global_batch",
                "is not a multiple of 2: 2 data-parallel ranks",
                "b.global_batch=10",
            ),
            (
                ["trainer.global_batch=18"],
                "trainer.global_batch",
                "is not a multiple of 4",
                "trainer.global_batch=20",
            ),
            (
                ["trainer.max_steps=5"],
                "trainer.batch_warmup.b.until_step",
                "must be below the 5 steps of the run",
                "b.until_step=1, or train for longer",
            ),
            (
                ["trainer.batch_warmup.a.global_batch=8"],
                "trainer.batch_warmup.a.global_batch",
                "must be below that of the steps after it, trainer.batch_warmup.b.global_batch=8",
                "a.global_batch=4",
            ),
            (
                ["trainer.batch_warmup.b.until_step=3"],
                "trainer.batch_warmup.b.until_step",
                "is that of trainer.batch_warmup.a too",
                "b.until_step=4",
            ),
            (
                ["trainer.batch_warmup.a.until_step=0"],
                "trainer.batch_warmup.a.until_step",
                "must be positive",
                "a.until_step=8",
            ),
            (
                ["trainer.global_batch=null"],
                "trainer.batch_warmup",
                "requires trainer.global_batch",
                "trainer.global_batch=64",
            ),
        )
    ),
    *(
        ([*LENGTHS, *others], key, reason, fix)
        for others, key, reason, fix in (
            (
                ["data.sequence=16"],
                "trainer.sequence_warmup.b.sequence",
                "must be below that of the steps after it, data.sequence=16",
                "b.sequence=8",
            ),
            (
                ["trainer.sequence_warmup.a.sequence=16"],
                "trainer.sequence_warmup.a.sequence",
                "must be below that of the steps after it, trainer.sequence_warmup.b.sequence=16",
                "a.sequence=8",
            ),
            (
                ["trainer.sequence_warmup.a.sequence=0"],
                "trainer.sequence_warmup.a.sequence",
                "must be positive",
                "a.sequence=8",
            ),
            (
                ["trainer.sequence_warmup.b.until_step=3"],
                "trainer.sequence_warmup.b.until_step",
                "is that of trainer.sequence_warmup.a too",
                "b.until_step=4",
            ),
            (
                ["trainer.max_steps=5"],
                "trainer.sequence_warmup.b.until_step",
                "must be below the 5 steps of the run, so that its last steps have data.sequence",
                "b.until_step=1, or train for longer",
            ),
            (
                ["parallelism=context", "trainer.sequence_warmup.a.sequence=10"],
                "trainer.sequence_warmup.a.sequence",
                "is not a multiple of 4, the number of chunks for 2 context ranks",
                "a.sequence=8",
            ),
            (
                ["parallelism=tensor", "trainer.sequence_warmup.a.sequence=9"],
                "parallelism.tensor",
                "does not divide the 9 tokens of a sequence on a rank with "
                "trainer.sequence_warmup.a.sequence=9",
                "parallelism.sequence_parallel=false",
            ),
            (
                ["precision=fp8"],
                "trainer.sequence_warmup.a.sequence",
                "is not divisible by 16, which fp8 matmuls over tokens require",
                "a.sequence=16",
            ),
            (
                ["objective=dpo", "data=corpus_pairs"],
                "trainer.sequence_warmup",
                "truncates samples, which objective=dpo reads as a whole",
                "'trainer.sequence_warmup={}', or objective=causal_lm",
            ),
            (
                [
                    *("objective=classification", "data=corpus_classes"),
                    *("model.classes=2", "model.tied=false"),
                ],
                "trainer.sequence_warmup",
                "truncates samples, which objective=classification reads as a whole",
                "'trainer.sequence_warmup={}', or objective=causal_lm",
            ),
            (
                [*RANDOM_T5, "objective=seq2seq", "data=synthetic", "data.target_length=8"],
                "trainer.sequence_warmup",
                "truncates samples, which objective=seq2seq reads as a whole",
                "'trainer.sequence_warmup={}', or objective=causal_lm",
            ),
            (
                ["data=reversal", "data.sequence=32"],
                "trainer.sequence_warmup",
                "truncates samples, and the labels of data=reversal are at their end",
                "'trainer.sequence_warmup={}', or data=text",
            ),
        )
    ),
]


@pytest.mark.parametrize(REJECTION_FIELDS, RULES, ids=overrides_id)
def test_warmup_is_rejected_with_a_fix(
    overrides: list[str], key: str, reason: str, fix: str
) -> None:
    assert_rejected(overrides, key, reason, fix)
