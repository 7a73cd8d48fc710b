"""LoRA of routed experts: a product of two low-rank factors for each expert.

Shape suffixes: R rows, sorted by expert; E experts; I input features; O output features.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from scalewise.adapters.target_modules import DEFAULT
from scalewise.models.base_module import ModelModule
from scalewise.models.decoder.moe import ExpertMatrices


class ExpertLoRA(nn.Module):
    """Frozen matrices of experts, plus ``scale * B_e A_e`` for each expert e.

    Submodules have the names of PEFT's layers. The factors of all experts are stacked as the
    matrices, so that FSDP and expert parallelism shard them by experts too.
    """

    def __init__(self, base_layer: ExpertMatrices, rank: int, scale: float) -> None:
        super().__init__()
        experts, out_features = base_layer.num_experts, base_layer.out_features
        in_features = base_layer.weight.shape[1]
        self.base_layer, self.scale, self.is_disabled = base_layer, scale, False
        self.lora_A = nn.ModuleDict({DEFAULT: ExpertMatrices(experts, rank, in_features)})
        self.lora_B = nn.ModuleDict({DEFAULT: ExpertMatrices(experts, out_features, rank)})

    def forward(self, x_RI: Tensor, ends_E: Tensor) -> Tensor:
        """Return the product of each row with the adapted matrix of its expert: ``y_RO``."""
        y_RO: Tensor = self.base_layer(x_RI, ends_E)
        if self.is_disabled:
            return y_RO
        # The narrow factor is scaled: it has fewer features than the output.
        narrow = self.lora_A[DEFAULT](x_RI, ends_E) * self.scale
        update_RO: Tensor = self.lora_B[DEFAULT](narrow, ends_E)
        return y_RO + update_RO


def adapt_experts(module: ModelModule, names: Sequence[str], rank: int, scale: float) -> None:
    """Replace matrices of experts, by name within a block, in blocks with experts, in place."""
    for block in module.layers():
        for name, matrices in [*block.named_modules()]:
            if name in names:
                assert isinstance(matrices, ExpertMatrices)
                block.set_submodule(name, ExpertLoRA(matrices, rank, scale))
