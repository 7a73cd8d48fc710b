"""Private names of transformers, PEFT and datasets: presence and relied-on behaviour."""

from collections.abc import Callable
from importlib import import_module
from inspect import getsource, signature
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from jinja2 import TemplateError
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    T5Config,
    masking_utils,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from scalewise.compat import hugging_face

TINY = LlamaConfig(
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=16,
)


@pytest.mark.parametrize("name", hugging_face.PEFT_LOGGERS)
def test_peft_loggers_exist(name: str) -> None:
    module = import_module(name)
    file = Path(str(module.__file__))
    files = file.parent.rglob("*.py") if file.name == "__init__.py" else [file]
    assert any("getLogger(__name__)" in file.read_text("utf-8") for file in files)


def test_compile_template_renders_and_rejects_syntax_errors() -> None:
    template = hugging_face.compile_template("{% for m in messages %}{{ m }};{% endfor %}")
    assert template.render(messages=["a", "b"]) == "a;b;"
    with pytest.raises(TemplateError):
        hugging_face.compile_template("{% for %}")


def test_has_model_class_of_an_auto_class() -> None:
    assert hugging_face.has_model_class(AutoModelForCausalLM, TINY)
    assert not hugging_face.has_model_class(AutoModelForCausalLM, T5Config())


def test_block_class_names_are_those_of_the_layers() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(TINY)
    assert hugging_face.block_class_names(model) == {type(model.model.layers[0]).__name__}
    model._no_split_modules = None
    assert hugging_face.block_class_names(model) == set()


def test_expert_gate_is_that_of_the_experts() -> None:
    """Mixtral's is SwiGLU; those of GPT-OSS are clamped."""
    hidden = 100 * torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    mixtral = MixtralExperts(MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=2))
    gate, up = hidden.chunk(2, dim=-1)
    torch.testing.assert_close(
        hugging_face.apply_expert_gate(mixtral, hidden), functional.silu(gate) * up
    )
    gpt_oss = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=2))
    clamped = hugging_face.apply_expert_gate(gpt_oss, hidden)
    assert clamped.abs().max() <= 7 * 8 < (gate * up).abs().max()


def test_unexpected_key_patterns_are_those_that_loading_ignores() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(TINY)
    assert hugging_face.unexpected_key_patterns(model) == set()
    model._keys_to_ignore_on_load_unexpected = ["a"]
    assert hugging_face.unexpected_key_patterns(model) == {"a"}
    source = getsource(PreTrainedModel._adjust_missing_and_unexpected_keys)
    assert "self._keys_to_ignore_on_load_unexpected" in source
    assert "rotary_emb" in source
    assert "position_ids" in source


def test_causal_mask_check_depends_on_the_padding_mask() -> None:
    check = hugging_face.causal_mask_check()
    assert next(iter(signature(check).parameters)) == "padding_mask"
    assert check(None, 4, 4, 0, 0)
    assert not check(torch.tensor([[False, True, True, True]]), 4, 4, 0, 0)


def test_replaced_mask_checks_are_called_by_a_model() -> None:
    calls: set[str] = set()

    def record(name: str, result: Any) -> Callable[..., Any]:
        def record_call(*args: Any, **kwargs: Any) -> Any:
            calls.add(name)
            return result

        return record_call

    original = masking_utils._ignore_causal_mask_sdpa
    model = LlamaForCausalLM(TINY).eval()
    tokens = torch.tensor([[1, 2, 3]])
    with (
        torch.no_grad(),
        hugging_face.replaced_mask_checks(
            ignore_causal=record("causal", True), find_packed=record("packed", None)
        ),
    ):
        expected = model(input_ids=tokens, use_cache=False).logits
    assert calls == {"causal", "packed"}
    assert masking_utils._ignore_causal_mask_sdpa is original
    assert torch.equal(model(input_ids=tokens, use_cache=False).logits, expected)
    with hugging_face.replaced_mask_checks(ignore_bidirectional=record("bidirectional", True)):
        masking_utils.create_bidirectional_mask(TINY, torch.ones(1, 3, 8), None)
    assert "bidirectional" in calls


def test_disabled_lora_layer_is_its_base_layer() -> None:
    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    (layer,) = inject_adapter_in_model(config, nn.Sequential(nn.Linear(4, 4)))
    assert isinstance(layer, LoraLayer)
    x = torch.ones(1, 4)
    assert not torch.equal(layer(x), layer.base_layer(x))
    requires_grad = [parameter.requires_grad for parameter in layer.parameters()]
    hugging_face.disable_lora(layer, True)
    assert torch.equal(layer(x), layer.base_layer(x))
    assert [parameter.requires_grad for parameter in layer.parameters()] == requires_grad
    hugging_face.disable_lora(layer, False)
    assert not torch.equal(layer(x), layer.base_layer(x))


def test_iterable_dataset_split_by_node_is_recognized() -> None:
    dataset = Dataset.from_dict({"a": [1, 2]}).to_iterable_dataset()
    assert isinstance(dataset, IterableDataset)
    assert not hugging_face.is_split_by_node(dataset)
    assert hugging_face.is_split_by_node(split_dataset_by_node(dataset, rank=0, world_size=2))
    assert not hugging_face.is_split_by_node(object())
