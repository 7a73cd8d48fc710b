"""Transfer of batches to the device of the model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from scalewise.run_config import RunConfig
from scalewise.training.lightning_module import TrainingModule


def test_positions_of_packed_sequences_stay_on_the_host(
    compose: Callable[..., RunConfig],
) -> None:
    module = TrainingModule(compose("data=synthetic", "data.packing=true"), steps=1)
    batch = {name: torch.zeros(1, 4) for name in ("inputs", "labels", "positions")}
    for names in (("inputs", "labels", "positions"), ("inputs", "labels")):
        moved = module.transfer_batch_to_device(
            {name: batch[name] for name in names}, torch.device("meta"), 0
        )
        assert {name: x.device.type for name, x in moved.items()} == {
            name: "cpu" if name == "positions" else "meta" for name in names
        }
