"""Garbage collection and timeouts of a rank during training."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scalewise.run_config import RunConfig
from scalewise.training.callbacks.rank_process import RankProcess


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the functions of ``gc`` that were called."""
    calls: list[str] = []
    for name in ("collect", "freeze", "unfreeze", "enable", "disable"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    yield calls
    monkeypatch.undo()
    assert gc.isenabled()


def run_callback(run: RunConfig, steps: int) -> None:
    """Call the hooks of ``steps`` optimizer steps with two micro-batches each."""
    callback, trainer = RankProcess(run), SimpleNamespace(global_step=0, sanity_checking=False)
    hooks: Any = callback
    hooks.on_train_start(trainer, None)
    for index in range(2 * steps):
        trainer.global_step = (index + 1) // 2
        hooks.on_train_batch_end(trainer, None, None, None, index)
    hooks.on_validation_start(trainer, None)
    hooks.on_validation_end(trainer, None)
    hooks.on_exception(trainer, None, RuntimeError())


def with_accumulation(run: RunConfig, gc_every: int | None) -> RunConfig:
    return replace(
        run,
        trainer=replace(run.trainer, micro_batch=2, global_batch=4),
        launch=replace(run.launch, gc_every=gc_every),
    )


def test_garbage_is_collected_every_few_optimizer_steps(
    collections: list[str], compose: Callable[..., RunConfig]
) -> None:
    run_callback(with_accumulation(compose("experiment=smoke"), 3), 7)
    first_step, steps_3_and_6 = ["collect", "freeze"], ["collect", "collect"]
    validation, end = ["enable", "disable"], ["unfreeze", "enable"]
    assert collections == ["disable", *first_step, *steps_3_and_6, *validation, *end]


def test_garbage_collection_stays_automatic(
    collections: list[str], compose: Callable[..., RunConfig]
) -> None:
    run_callback(with_accumulation(compose("experiment=smoke"), None), 7)
    assert collections == []


def test_all_process_groups_get_the_timeout(compose: Callable[..., RunConfig]) -> None:
    run = compose("experiment=smoke", "launch.collective_timeout=7")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups: list[Any] = [dist.group.WORLD, dist.new_group([0])]
        trainer: Any = SimpleNamespace(global_step=0)
        RankProcess(replace(run, launch=replace(run.launch, gc_every=None))).on_train_start(
            trainer, trainer
        )
        for group in groups:
            backend: Any = group._get_backend(torch.device("cpu"))
            assert backend.options._timeout == timedelta(seconds=7)
    finally:
        dist.destroy_process_group()
