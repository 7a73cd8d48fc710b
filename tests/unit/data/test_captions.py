"""Image-caption data: image files, synthetic shapes and rejections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.hf_checkpoints import NO_SEQUENCE_PARALLEL, RANDOM_BLIP2, RANDOM_LLAMA, RANDOM_T5
from fixtures.images import random_pixels
from fixtures.rejections import REJECTION_FIELDS, RejectionCase, assert_rejected, overrides_id
from numpy.typing import NDArray
from tokenizers import Tokenizer

from scalewise.data.chat import CaptionData
from scalewise.data.dataloader import BatchShare, TrainLoader
from scalewise.data.prepare import CaptionedTokenDataset, DataSplits, prepare_splits
from scalewise.data.synthetic import (
    CAPTION_TOKENS,
    CAPTIONS,
    COLUMNS,
    ROWS,
    WORDS,
    SyntheticShapes,
)
from scalewise.data.tokenizer import END_OF_TEXT as END
from scalewise.errors import DataError

DATA_OPTIONS: dict[str, Any] = {
    "vocabulary": 300,
    "sequence": 24,
    "image_size": 4,
    "validation_fraction": 0.0,
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))


def caption_data(folder: Path, *records: object, **more: Any) -> CaptionData:
    path = folder / "captions.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), "utf-8")
    return CaptionData(paths=(str(path),), **{**DATA_OPTIONS, **more})


def caption(splits: DataSplits, index: int) -> str:
    tokenizer = Tokenizer.from_file(str(splits.tokenizer))
    (ids_T,) = splits.train.gather([index])
    return str(tokenizer.decode(ids_T[ids_T >= 0].tolist(), skip_special_tokens=False))


def gather_samples(splits: DataSplits, *indices: int) -> NDArray[np.uint8]:
    assert isinstance(splits.train, CaptionedTokenDataset)
    return splits.train.gather_pixels(indices)


def test_caption_sample_has_tokens_and_image(pictures: Path) -> None:
    records = [{"image": name, "caption": f"it is {name}"} for name in ("a.ppm", "wide.npy")]
    splits = prepare_splits(caption_data(pictures, *records), 300, 0)
    assert [caption(splits, 0), caption(splits, 1)] == [f"it is {r['image']}{END}" for r in records]
    first_CHW, second_CHW = gather_samples(splits, 0, 1)
    assert np.array_equal(first_CHW, random_pixels().transpose(2, 0, 1))
    assert second_CHW.shape == (3, 4, 4)
    assert splits.note == ""


def test_caption_longer_than_the_sequence_is_truncated_with_a_note(pictures: Path) -> None:
    splits = prepare_splits(
        caption_data(pictures, {"image": "a.npy", "caption": "so " * 40}), 300, 0
    )
    (ids_T,) = splits.train.gather([0])
    assert (ids_T >= 0).all()
    assert "of 1 captions, data.sequence=24: 1 truncated" in splits.note


def test_caption_cache_detects_a_changed_image(pictures: Path) -> None:
    spec = caption_data(pictures, {"image": "a.npy", "caption": "it"})
    before_BCHW = gather_samples(prepare_splits(spec, 300, 0), 0).copy()
    np.save(pictures / "a.npy", random_pixels(5, 2))
    assert not np.array_equal(gather_samples(prepare_splits(spec, 300, 0), 0), before_BCHW)


def test_caption_bad_records_are_counted_and_named(
    pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = (
        {"image": "a.npy", "caption": "it"},
        {"image": "b.npy", "caption": "it"},
        {"image": "a.npy"},
        {"caption": "it"},
        ["a.npy"],
    )
    with pytest.raises(DataError) as excinfo:
        prepare_splits(caption_data(pictures, *records, max_bad_rows=3), 300, 0)
    message = str(excinfo.value)
    assert (
        "4 records that are not a valid image with a caption: captions.jsonl:2 has an image"
        in message
    )
    assert "captions.jsonl:3 has no text in 'caption'; its keys: image" in message
    assert "data.max_bad_rows=4" in message
    splits = prepare_splits(caption_data(pictures, *records, max_bad_rows=4), 300, 0)
    assert len(splits.train) == 1
    assert "skipped 4 records" in capsys.readouterr().err


def test_caption_validation_split_is_by_image(pictures: Path) -> None:
    for index in range(8):
        np.save(pictures / f"{index}.npy", np.full((4, 4), index, np.uint8))
    records = [{"image": f"{n}.npy", "caption": str(n)} for n in range(8)]
    splits = prepare_splits(caption_data(pictures, *records, validation_fraction=0.25), 300, 0)
    assert isinstance(splits.validation, CaptionedTokenDataset)
    assert splits.validation.gather_pixels([0, 1])[:, 0, 0, 0].tolist() == [3, 7]
    assert gather_samples(splits, 3)[0, 0, 0, 0] == 4
    assert caption(splits, 3) == f"4{END}"


def test_caption_batches_have_images_and_labels() -> None:
    splits = prepare_splits(SyntheticShapes(rows=20, sequence=9), len(WORDS), 1)
    first, second = TrainLoader(splits.train, BatchShare(5, 2, 0, 2), seed=1, steps=1)
    for batch in (first, second):
        assert batch["inputs"].shape == (2, 3, 32, 32)
        assert batch["inputs"].dtype == torch.uint8
        assert batch["labels"].shape == (2, 9)
    labels = sum((batch["labels"] != -100).sum() for batch in (first, second))
    assert first["labels_of_step"] == labels == 3 * CAPTION_TOKENS
    assert (second["labels"][1] == -100).all()  # a padding sample
    assert (second["inputs"][1] == 0).all()


def test_synthetic_shapes_depend_on_the_seed() -> None:
    spec = SyntheticShapes(rows=300)
    first_splits, repeated_splits, other_seed_splits = (
        prepare_splits(spec, len(WORDS), seed) for seed in (1, 1, 2)
    )
    indices = range(5)
    assert np.array_equal(
        gather_samples(first_splits, *indices), gather_samples(repeated_splits, *indices)
    )
    assert not np.array_equal(
        gather_samples(first_splits, *indices), gather_samples(other_seed_splits, *indices)
    )
    words = caption(first_splits, 0).split()
    assert (words[0], words[-1], len(words)) == ("a", END, CAPTION_TOKENS)
    assert first_splits.validation is not None
    train_samples, validation_samples = (
        {*map(tuple, s.gather(range(len(s))))}
        for s in (first_splits.train, first_splits.validation)
    )
    assert not train_samples & validation_samples
    assert len(validation_samples) <= len(CAPTIONS) // 10


def test_synthetic_shapes_match_their_captions() -> None:
    splits = prepare_splits(SyntheticShapes(rows=200), len(WORDS), 1)
    for index in range(20):
        *_, vertical, horizontal, _ = caption(splits, index).split()
        bright_HW = gather_samples(splits, index)[0].max(0) >= 160
        cell_sums = bright_HW[:30, :30].reshape(3, 10, 3, 10).sum((1, 3))
        row_of, column_of = np.unravel_index(cell_sums.argmax(), (3, 3))
        assert (ROWS[row_of], COLUMNS[column_of]) == (vertical, horizontal), index


def test_caption_data_rejects_invalid_settings(pictures: Path) -> None:
    spec = caption_data(pictures, image_size=0, packing=True)
    first, second = map(str, spec.validate())
    assert first == "data.image_size=0: must be positive; set data.image_size=224"
    assert second.startswith(
        "data.packing=true: is not supported with images: each caption has its own"
    )


SHAPES = ("data=shapes", "data.rows=100", "data.sequence=8")
TOKEN_DATA = ("data=synthetic", "data.sequence=32")
BLIP2 = (*RANDOM_BLIP2, "objective=captioning")
IN_BACKWARD = ("trainer.clip_norm=null", "trainer.global_batch=null")
REJECTED_CAPTION_OPTIONS: list[RejectionCase] = [
    ([*BLIP2, *TOKEN_DATA], "data", "contains no images", "data=captions"),
    ([*RANDOM_BLIP2, *TOKEN_DATA], "model.path", "reads images (blip-2)", "captioning"),
    ([*SHAPES], "data", "contains images", "objective=captioning"),
    (["objective=captioning", *SHAPES], "model", "does not accept images", "BLIP-2"),
    ([*RANDOM_LLAMA, "objective=captioning", *SHAPES], "model", "does not accept images", "BLIP-2"),
    ([*RANDOM_T5, "objective=captioning", *SHAPES], "model", "does not accept images", "BLIP-2"),
    (
        [*BLIP2, *SHAPES, "data.image_size=64"],
        "data.image_size",
        "differs from the image size",
        "data.image_size=32",
    ),
    ([*BLIP2, *SHAPES, "data.image_size=8"], "data.image_size", "below 24", "image_size=24"),
    ([*BLIP2, *SHAPES, "data.sequence=5"], "data.sequence", "below 7", "data.sequence=7"),
    ([*BLIP2, *SHAPES, "data.sequence=57"], "data.sequence", "exceeds the context", "sequence=56"),
    (
        [*BLIP2, *SHAPES, "parallelism=tensor", NO_SEQUENCE_PARALLEL],
        "parallelism.tensor",
        "transformers does not have for blip-2",
        "parallelism=fsdp",
    ),
    (
        [*BLIP2, *SHAPES, "quantization=qat_int4", "quantization.group=16"],
        "quantization",
        "is not supported for vision-language models",
        "quantization=none",
    ),
    (
        [*BLIP2, *SHAPES, "precision=fp8", "data.sequence=16"],
        "precision",
        "is not supported for vision-language models",
        "precision=bf16_mixed",
    ),
    (
        [*BLIP2, *SHAPES, "optimizer.in_backward=true", *IN_BACKWARD],
        "optimizer.in_backward",
        "is not supported for vision-language models",
        "set optimizer.in_backward=false",
    ),
    *(
        ([*BLIP2, *SHAPES, override], key, reason, fix)
        for override, key, reason, fix in (
            (
                "parallelism=context",
                "parallelism.context",
                "is not supported for Hugging Face models",
                "fsdp",
            ),
            (
                "parallelism=pipeline",
                "parallelism.pipeline",
                "is not supported for Hugging Face models",
                "fsdp",
            ),
            (
                "compile=block",
                "compile",
                "is not supported for vision-language models",
                "compile=none",
            ),
            (
                "memory=offload_activations",
                "memory.offload",
                "is not supported for vision-language models",
                "checkpoint_full",
            ),
            ("objective.loss_chunk=8", "objective.loss_chunk", "vision-language models", "null"),
            (
                "adapter=prompt",
                "adapter",
                "is not supported for Hugging Face models",
                "adapter=lora",
            ),
        )
    ),
]


@pytest.mark.parametrize(REJECTION_FIELDS, REJECTED_CAPTION_OPTIONS, ids=overrides_id)
def test_caption_data_rejects_incompatible_options(
    overrides: list[str], key: str, reason: str, fix: str
) -> None:
    assert_rejected(overrides, key, reason, fix)
