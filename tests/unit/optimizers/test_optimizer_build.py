"""Built optimizers: state, weight decay groups and fields."""

import pytest
import torch

from scalewise.models.base import Weight
from scalewise.optimizers import AdamWConfig, OptimizerConfig, SGDConfig
from scalewise.optimizers.base import FixedStateOptimizerConfig
from scalewise.optimizers.build import build_optimizer

OPTIMIZERS: list[FixedStateOptimizerConfig] = [
    AdamWConfig(),
    AdamWConfig(fused=False),
    SGDConfig(),
    SGDConfig(momentum=0.0),
]


def weights_with_parameters(module: torch.nn.Module) -> list[tuple[Weight, torch.nn.Parameter]]:
    named_parameters = module.named_parameters()
    return [(Weight(name, tuple(p.shape), "attention"), p) for name, p in named_parameters]


class TestOptimizers:
    @pytest.mark.parametrize("spec", OPTIMIZERS, ids=repr)
    def test_optimizer_slots_equal_torch_state(self, spec: FixedStateOptimizerConfig) -> None:
        layer = torch.nn.Linear(5, 7)
        optimizer = build_optimizer(spec, weights_with_parameters(layer))
        layer(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        for parameter in layer.parameters():
            state = optimizer.state[parameter].values()
            state_tensors = [
                t for t in state if isinstance(t, torch.Tensor) and t.shape == parameter.shape
            ]
            assert len(state_tensors) == spec.state_slots

    @pytest.mark.parametrize(
        "spec", [AdamWConfig(weight_decay=0.3), SGDConfig(weight_decay=0.3)], ids=repr
    )
    def test_optimizer_decays_matrices_only(self, spec: OptimizerConfig) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
        module[0].weight.requires_grad_(True)
        groups = build_optimizer(spec, weights_with_parameters(module)).param_groups
        dims_by_decay = {
            group["weight_decay"]: [p.ndim for p in group["params"]] for group in groups
        }
        assert dims_by_decay == {0.3: [2], 0.0: [1, 1, 1]}
        assert all(group["lr"] == spec.lr for group in groups)

    def test_optimizer_omits_frozen_parameters(self) -> None:
        layer = torch.nn.Linear(3, 4)
        layer.weight.requires_grad_(False)
        (group,) = build_optimizer(AdamWConfig(), weights_with_parameters(layer)).param_groups
        assert group["params"] == [layer.bias]

    def test_optimizer_fields_reach_torch(self) -> None:
        layer = torch.nn.Linear(3, 4)
        adamw = AdamWConfig(lr=1.0, beta1=0.1, beta2=0.2, epsilon=0.3, fused=False)
        defaults = build_optimizer(adamw, weights_with_parameters(layer)).defaults
        assert (defaults["lr"], defaults["betas"], defaults["eps"]) == (1.0, (0.1, 0.2), 0.3)
        sgd = build_optimizer(
            SGDConfig(lr=2.0, momentum=0.5, nesterov=True), weights_with_parameters(layer)
        ).defaults
        assert (sgd["lr"], sgd["momentum"], sgd["nesterov"]) == (2.0, 0.5, True)
        assert (
            build_optimizer(AdamWConfig(), weights_with_parameters(layer)).defaults["fused"] is True
        )
