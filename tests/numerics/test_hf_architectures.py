"""Architectures of transformers: loss, one step and export compared with transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.hf_architectures import TRAINED, ArchitectureFolders
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from scalewise.hardware import DeviceKind
from scalewise.memory_config import FixedCheckpointing
from scalewise.models.base import StageSlice
from scalewise.models.build import build_model, export_model
from scalewise.models.hf.config import HuggingFaceConfig
from scalewise.models.op_graph import Recompute
from scalewise.objectives import IGNORED, CausalLM
from scalewise.strategies.activation_checkpointing import apply_checkpointing
from scalewise.strategies.base import ScaledLoss

LEARNING_RATE = 0.1
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


def random_tokens() -> Tensor:
    return torch.randint(2, 256, (2, 33), generator=torch.Generator().manual_seed(2))


def load_transformers(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("family", TRAINED)
def test_hf_architecture_trains_and_exports_as_in_transformers(
    family: str, hf_architecture: ArchitectureFolders, tmp_path: Path
) -> None:
    folder, tokens = hf_architecture(family), random_tokens()
    spec = HuggingFaceConfig(path=str(folder))
    assert [*spec.validate()] == []
    expected = load_transformers(folder).train()
    torch.manual_seed(5)  # routers of PhiMoE draw numbers
    expected_loss = expected(input_ids=tokens, labels=tokens, use_cache=False).loss
    expected_loss.backward()

    module = build_model(spec, 1).train()
    stage = StageSlice(range(spec.layers))
    apply_checkpointing(FixedCheckpointing(Recompute.full), module, stage, DeviceKind.cpu)
    batch = {"inputs": tokens, "labels": F.pad(tokens[:, 1:], (0, 1), value=IGNORED)}
    torch.manual_seed(5)
    loss = ScaledLoss(CausalLM()).compute(module, batch)
    loss.backward()
    targets = tokens[:, 1:].numel()
    torch.testing.assert_close(loss / targets, expected_loss, **CLOSE)

    for parameters, scale in ((module.parameters(), targets), (expected.parameters(), 1)):
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE / scale * parameter.grad
    export_model(spec, module.state_dict(), tmp_path)
    exported, weights = load_transformers(tmp_path), dict(expected.named_parameters())
    assert [name for name, _ in exported.named_parameters()] == [*weights]
    for name, weight in exported.named_parameters():
        torch.testing.assert_close(
            weight, weights[name], **CLOSE, msg=lambda m, n=name: f"{n}: {m}"
        )
    with torch.no_grad():
        logits, module_logits = exported.eval()(tokens).logits, module.eval()(tokens)
    torch.testing.assert_close(module_logits, logits, rtol=1e-5, atol=1e-5)
