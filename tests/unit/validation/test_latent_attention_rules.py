"""Rules between latent attention, dense blocks and the other parts of a run."""

from __future__ import annotations

import pytest

from scalewise import compose
from scalewise.errors import ConfigError

LATENT = (
    *("model=decoder_nano", "data=synthetic", "model.kv_heads=null", "model.head_width=24"),
    *("model.kv_latent_dim=32", "model.rope_head_dim=8"),
)
DENSE_FIRST = ("model=moe_nano", "data=synthetic", "model.dense_layers=1")


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (("parallelism=tensor",), "parallelism.tensor", "parallelism=fsdp"),
        (("adapter=prefix",), "adapter", "set adapter=lora"),
        (("model.rope_head_dim=7",), "model.rope_head_dim", "set model.rope_head_dim=8"),
        (("model.rope_head_dim=null",), "model.rope_head_dim", "set model.rope_head_dim=8"),
        (("model.value_head_dim=25",), "model.value_head_dim", "set model.value_head_dim=null"),
        (("model.kv_heads=1",), "model.kv_heads", "set model.kv_heads=null"),
        (("model.qk_norm=head",), "model.qk_norm", "set model.qk_norm=none"),
        (("model.kv_latent_dim=null",), "model.rope_head_dim", "set model.rope_head_dim=null"),
        (("model.dense_layers=1",), "model.dense_layers", "set model.dense_layers=0"),
    ],
)
def test_latent_attention_is_rejected_with_a_fix(
    overrides: tuple[str, ...], key: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as excinfo:
        compose((*LATENT, *overrides), check_machine=False)
    issues = {issue.key: issue.fix for issue in excinfo.value.issues}
    assert fix in issues[key], issues


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("compile=block", "compile"),
        ("memory=offload_activations", "memory.offload"),
        ("optimizer.in_backward=true", "optimizer.in_backward"),
        ("model.dense_layers=100", "model.dense_layers"),
    ],
)
def test_dense_blocks_before_experts_are_rejected_with_a_fix(override: str, key: str) -> None:
    compose(DENSE_FIRST, check_machine=False)
    with pytest.raises(ConfigError) as excinfo:
        compose((*DENSE_FIRST, override), check_machine=False)
    assert key in {issue.key for issue in excinfo.value.issues}, excinfo.value.issues
