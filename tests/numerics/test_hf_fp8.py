"""FP8 in models of transformers: torchao as the reference, operator graph."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.cli_runner import RunDir
from fixtures.hf_checkpoints import DECODER_MODELS, HFCheckpoints
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import (
    TOLERANCE,
    assert_same_training,
    assert_tensors_close,
    load_gradients,
    transformers_overrides,
)
from fixtures.strategies import STRATEGIES
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from scalewise import cli, compose
from scalewise.hardware import DeviceKind
from scalewise.models.hf.causal_lm import CausalLMModule
from scalewise.models.op_graph import OpWork
from scalewise.planner.activation_liveness import model_op_graphs
from scalewise.planner.rank_memory import build_rank_memory
from scalewise.precision.config import ScalingRecipe
from scalewise.strategies.single import SingleDevice

EXHAUSTIVE = pytest.mark.exhaustive
FP8 = ("precision=fp8", "precision.compute=fp32")
ROWWISE = (*FP8, "precision.recipe=rowwise")


@pytest.fixture(scope="module")
def run_job(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> JobRunner:
    return JobRunner(tmp_path_factory.mktemp("hf_fp8"), shared_cache)


def model_of_transformers(folder: Path) -> PreTrainedModel:
    """Model with linear layers in place of ``Conv1D``, which torchao does not convert."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, Conv1D):
            linear = nn.Linear(*layer.weight.shape)
            linear.weight = nn.Parameter(layer.weight.detach().T.contiguous())
            linear.bias = layer.bias
            model.set_submodule(name, linear)
    return model


@pytest.mark.parametrize("recipe", ScalingRecipe)
@pytest.mark.parametrize("family", DECODER_MODELS)
def test_hf_fp8_gradients_equal_torchao(
    family: str, recipe: ScalingRecipe, hf_checkpoint: HFCheckpoints
) -> None:
    run = compose(
        [*transformers_overrides(hf_checkpoint(family), *FP8, f"precision.recipe={recipe}")]
    )
    actual, expected = (
        SingleDevice(DeviceKind.cpu).build(run),
        model_of_transformers(hf_checkpoint(family)),
    )
    assert isinstance(actual, CausalLMModule)
    config = replace(Float8LinearConfig.from_recipe_name(recipe.value), emulate=True)
    head = expected.get_output_embeddings()
    convert_to_float8_training(
        expected, config=config, module_filter_fn=lambda layer, _: layer is not head
    )
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(5))
    logits, expected_logits = actual(tokens), expected(tokens).logits
    assert torch.equal(logits, expected_logits)
    for item in (logits, expected_logits):
        item.logsumexp(-1).sum().backward()
    for name, parameter in actual.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected.get_parameter(actual.hf_name(name)).grad), name
    converted = [item for item in actual.modules() if isinstance(item, Float8Linear)]
    assert len(converted) == len(run.precision.fp8_layers(run.model)) * run.model.layers


@pytest.mark.parametrize(
    ("family", "strategy", "recipe"),
    [
        pytest.param(*case, marks=() if case == ("qwen2", "fsdp", ROWWISE) else EXHAUSTIVE)
        for family in DECODER_MODELS
        for strategy in ("ddp", "fsdp", "fsdp_offload", "hsdp")
        for recipe in (FP8, ROWWISE)
        for case in [(family, strategy, recipe)]
    ],
)
def test_hf_fp8_under_each_strategy_equals_one_device(
    family: str,
    strategy: str,
    recipe: tuple[str, ...],
    hf_checkpoint: HFCheckpoints,
    run_job: JobRunner,
) -> None:
    """Rounding differences accumulate, so that only the first step is compared."""
    overrides = transformers_overrides(hf_checkpoint(family), *recipe)
    ranks = compose([*overrides, *STRATEGIES[strategy]]).parallelism.data_parallel_size
    micro_batch = f"trainer.micro_batch={12 // ranks // 3}"
    run, single_run = (
        run_job.without_defaults(*overrides, *STRATEGIES[strategy], micro_batch),
        run_job.without_defaults(*overrides, micro_batch),
    )
    assert_tensors_close(
        load_gradients(run, 0), load_gradients(single_run, 0), "gradients of step 0"
    )
    losses = run.column("train/loss"), single_run.column("train/loss")
    assert losses[0][0] == pytest.approx(losses[1][0], rel=TOLERANCE)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@EXHAUSTIVE
@pytest.mark.parametrize("more", ["compile=block", "memory=checkpoint_full"])
@pytest.mark.parametrize("family", DECODER_MODELS)
def test_hf_fp8_memory_options_change_no_step(
    family: str, more: str, hf_checkpoint: HFCheckpoints, run_job: JobRunner
) -> None:
    overrides = transformers_overrides(hf_checkpoint(family), *ROWWISE, "trainer.micro_batch=12")
    backend = ["compile.backend=aot_eager"] * ("compile" in more)
    assert_same_training(
        run_job.without_defaults(*overrides, more, *backend), run_job.without_defaults(*overrides)
    )


@pytest.fixture(scope="module")
def trained(hf_checkpoint: HFCheckpoints, run_job: JobRunner) -> RunDir:
    return run_job.without_defaults(
        *transformers_overrides(hf_checkpoint("llama"), *ROWWISE, "trainer.micro_batch=4")
    )


def test_hf_fp8_evaluation_reports_the_fp32_loss(
    trained: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", str(trained.path)]) == 0
    record = json.loads((trained.path / "evaluation.json").read_text("utf-8"))["3"]
    assert "fp8 matmuls: the loss is " in capsys.readouterr().out
    assert record["loss"] == pytest.approx(trained.column("val/loss")[-1], rel=1e-5)
    assert record["loss_in_fp32"] != record["loss"]
    assert record["loss_in_fp32"] == pytest.approx(record["loss"], rel=0.01)


@pytest.mark.parametrize("hardware", ["cpu", "h100"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_hf_fp8_operator_graph_separates_8_bit_matmuls(
    family: str, hardware: str, hf_checkpoint: HFCheckpoints
) -> None:
    """Other operators and FLOPs are unchanged; casts add memory traffic."""
    default_run, fp8 = (
        compose(
            [*transformers_overrides(hf_checkpoint(family)), precision, f"hardware={hardware}"],
            check_machine=False,
        )
        for precision in ("precision=bf16_mixed", "precision=fp8")
    )
    default_operators, fp8_operators = (
        model_op_graphs(
            run.model, build_rank_memory(run.parallelism, run).forward_spec
        ).block.operators
        for run in (default_run, fp8)
    )
    products = [operator for operator in fp8_operators if operator.work is OpWork.matmul_fp8]
    before = [operator for operator in default_operators if operator.work is OpWork.matmul]
    assert not [operator for operator in fp8_operators if operator.work is OpWork.matmul]
    assert [operator.flops for operator in products] == [operator.flops for operator in before]
    assert [operator.backward_flops for operator in products] == [
        2 * operator.flops for operator in products
    ]
    assert all(min(operator.cast_bytes) > 0 for operator in products)
