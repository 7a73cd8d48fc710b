"""The dataloader under Lightning's loop, and its speed compared with a map-style DataLoader."""

import statistics
import time

import lightning
import numpy as np
import pytest
import torch
from fixtures.quiet_trainer import QUIET_TRAINER
from torch.utils.data import DataLoader, Dataset

from scalewise.data.dataloader import BatchShare, TrainLoader, ValidationLoader
from scalewise.data.datasets import PackedDataset
from scalewise.training.trainer import silence_lightning


class RecordBatches(lightning.LightningModule):
    """Records the training batches."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = []

    def training_step(self, batch, index):
        self.seen.append(batch["inputs"][:, 0].tolist())
        return self.weight.sum() * 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAfter(lightning.Callback):
    """Saves a checkpoint after a micro-batch, in the hook that ModelCheckpoint uses."""

    def __init__(self, path, micro_steps):
        self.path, self.micro_steps = path, micro_steps

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx + 1 == self.micro_steps:
            trainer.save_checkpoint(self.path)


def fit(folder, callbacks=(), checkpoint=None):
    dataset = PackedDataset([np.arange(401, dtype=np.uint16)], 4)
    loader, module = TrainLoader(dataset, BatchShare(8, 4), seed=0, steps=6), RecordBatches()
    with silence_lightning():
        trainer = lightning.Trainer(
            **QUIET_TRAINER,
            max_epochs=1,
            max_steps=6,
            callbacks=list(callbacks),
            accumulate_grad_batches=2,
            use_distributed_sampler=False,
            default_root_dir=folder,
        )
        trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=False)
    return module.seen


def test_dataloader_state_resumes_under_lightning(tmp_path):
    path = tmp_path / "stopped.ckpt"
    uninterrupted_batches = fit(tmp_path, [SaveAfter(path, 4)])
    state = torch.load(path, weights_only=False)
    assert state["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [{"micro_steps": 4}]
    assert len(uninterrupted_batches) == 12
    assert fit(tmp_path, checkpoint=path) == uninterrupted_batches[4:]


class MapDataset(Dataset):
    """Map-style dataset over a memory-mapped file."""

    def __init__(self, tokens, sequence):
        self.tokens, self.sequence = tokens, sequence

    def __len__(self):
        return (len(self.tokens) - 1) // self.sequence

    def __getitem__(self, index):
        start = index * self.sequence
        window = torch.from_numpy(self.tokens[start : start + self.sequence + 1].astype(np.int64))
        return {"inputs": window[:-1], "labels": window[1:]}


def seconds(batches, count):
    start_time = time.process_time()
    for _ in range(count):
        next(batches)
    return time.process_time() - start_time


def test_dataloader_is_three_times_as_fast_as_map_style(tmp_path):
    sequence, micro_batch, count, pairs = 1024, 8, 40, 15
    path = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(0, 4096, 2**23, dtype=np.uint16).tofile(path)
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steps = count * (pairs + 1)
        actual = iter(
            TrainLoader(PackedDataset([tokens], sequence), BatchShare(8, 8), seed=0, steps=steps)
        )
        map_loader = DataLoader(MapDataset(tokens, sequence), batch_size=micro_batch, shuffle=True)
        ratios = []
        for _ in range(pairs + 1):
            map_seconds = seconds(iter(map_loader), count)
            ratios.append(map_seconds / seconds(actual, count))
    finally:
        torch.set_num_threads(threads)
    # The first pair includes page faults.
    ratio = statistics.median(ratios[1:])
    print(f"loader: {ratio:.1f} times a map-style DataLoader")
    assert ratio >= 3


def test_validation_dataloader_has_no_state():
    loader = ValidationLoader(PackedDataset([np.arange(41, dtype=np.uint16)], 4), BatchShare(2, 2))
    assert not hasattr(loader, "state_dict")


@pytest.mark.gpu
def test_dataloader_pins_complete_batches():
    dataset = PackedDataset([np.arange(41, dtype=np.uint16)], 4)
    for batch in ValidationLoader(dataset, BatchShare(2, 2), pin_memory=True):
        assert all(x_BT.is_pinned() and x_BT.is_contiguous() for x_BT in batch.values())
