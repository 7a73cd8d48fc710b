"""Training of transformers models compared with one device and a plain loop."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from fixtures.cli_runner import RunDir
from fixtures.hf_checkpoints import (
    DECODER_MODELS,
    NO_SEQUENCE_PARALLEL,
    TENSOR_PARALLEL_MODELS,
    HFCheckpoints,
)
from fixtures.job_runner import JobRunner
from fixtures.reference_runs import (
    BATCHES,
    SGD,
    TOLERANCE,
    assert_same_training,
    assert_tensors_close,
)
from fixtures.strategies import STRATEGIES, TINY_DECODER, marks
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from scalewise import compose
from scalewise.checkpoints.trained_run import load_model
from scalewise.commands.run_arguments import load_trained
from scalewise.data.dataloader import BatchShare, TrainLoader
from scalewise.data.prepare import prepare_splits
from scalewise.export import AdapterExport
from scalewise.export import hf_export as exports
from scalewise.hardware import DeviceKind
from scalewise.strategies.single import SingleDevice

BATCH = "combined"
EXHAUSTIVE = pytest.mark.exhaustive
CI_CASES = (("llama", "tensor"),)
TESTED_STRATEGIES = ("ddp", "fsdp", "fsdp_offload", "hsdp")
TENSOR_STRATEGIES = ("tensor", "tensor_no_sequence_parallel", "shard_tensor", "replicate_tensor")
ZERO_STRATEGIES = ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")


@pytest.fixture(scope="module")
def run_job(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> JobRunner:
    return JobRunner(tmp_path_factory.mktemp("hf"), shared_cache)


def training_overrides(folder: Path, *extra_overrides: str) -> tuple[str, ...]:
    """Overrides of a run of a transformers model, without those of the decoder."""
    decoder_overrides = (*TINY_DECODER, *SGD, *BATCHES[BATCH], *extra_overrides)
    other_overrides = (it for it in decoder_overrides if not it.startswith("model"))
    return ("model=hf", f"model.path={folder}", *other_overrides)


def train_on_one_device(run_job: JobRunner, folder: Path, *extra_overrides: str) -> RunDir:
    return run_job.without_defaults(
        *training_overrides(folder, *extra_overrides, "trainer.micro_batch=12")
    )


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        pytest.param(
            family, strategy, marks=(*marks(strategy), *(() if runs_in_ci else (EXHAUSTIVE,)))
        )
        for strategies, families in (
            ((*TESTED_STRATEGIES, *ZERO_STRATEGIES), DECODER_MODELS),
            (TENSOR_STRATEGIES, TENSOR_PARALLEL_MODELS),
        )
        for family in families
        for strategy in strategies
        for runs_in_ci in [(family, strategy) in CI_CASES]
    ],
)
def test_hf_training_under_each_strategy_equals_one_device(
    family: str, strategy: str, hf_checkpoint: HFCheckpoints, run_job: JobRunner
) -> None:
    folder = hf_checkpoint(family)
    strategy_overrides = (
        *STRATEGIES[strategy],
        *([NO_SEQUENCE_PARALLEL] if "tensor" in strategy else []),
    )
    ranks = compose(
        [*training_overrides(folder, *strategy_overrides)]
    ).parallelism.data_parallel_size
    micro_batch = f"trainer.micro_batch={12 // ranks // 3}"
    assert_same_training(
        run_job.without_defaults(*training_overrides(folder, *strategy_overrides, micro_batch)),
        train_on_one_device(run_job, folder),
    )


MEMORY_OPTIONS = {
    "offload": ("memory=offload_activations",),
    "offload_all": ("memory=offload_activations", "memory.recompute=nothing"),
    "loss_chunk": ("objective.loss_chunk=40",),
}


@pytest.mark.parametrize(
    ("family", "strategy", "mode"),
    [
        pytest.param(
            family,
            strategy,
            option,
            marks=(*marks(strategy), *(() if runs_in_ci else (EXHAUSTIVE,))),
        )
        for strategies, families in (
            ((*TESTED_STRATEGIES, *ZERO_STRATEGIES), DECODER_MODELS),
            (TENSOR_STRATEGIES, TENSOR_PARALLEL_MODELS),
        )
        for family in families
        for strategy in strategies
        for option in MEMORY_OPTIONS
        for runs_in_ci in [(family, strategy, option) == ("llama", "fsdp", "offload_all")]
    ],
)
def test_hf_memory_options_under_strategies_change_no_step(
    family: str, strategy: str, mode: str, hf_checkpoint: HFCheckpoints, run_job: JobRunner
) -> None:
    folder = hf_checkpoint(family)
    strategy_overrides = (
        *STRATEGIES[strategy],
        *([NO_SEQUENCE_PARALLEL] if "tensor" in strategy else []),
        *MEMORY_OPTIONS[mode],
    )
    ranks = compose(
        [*training_overrides(folder, *strategy_overrides)]
    ).parallelism.data_parallel_size
    micro_batch = f"trainer.micro_batch={12 // ranks // 3}"
    assert_same_training(
        run_job.without_defaults(*training_overrides(folder, *strategy_overrides, micro_batch)),
        train_on_one_device(run_job, folder),
    )


ONE_STEP = ("trainer.global_batch=12", "trainer.clip_norm=null")


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        pytest.param(
            family, strategy, marks=() if (family, strategy) == ("gpt2", "hsdp") else EXHAUSTIVE
        )
        for strategies, families in (
            (("single", "fsdp", "hsdp"), DECODER_MODELS),
            (TENSOR_STRATEGIES, TENSOR_PARALLEL_MODELS),
        )
        for family in families
        for strategy in strategies
    ],
)
def test_hf_optimizer_in_backward_under_each_strategy(
    family: str, strategy: str, hf_checkpoint: HFCheckpoints, run_job: JobRunner
) -> None:
    folder = hf_checkpoint(family)
    strategy_overrides = (
        *STRATEGIES.get(strategy, ()),
        *([NO_SEQUENCE_PARALLEL] if "tensor" in strategy else []),
        *ONE_STEP,
    )
    ranks = compose(
        [*training_overrides(folder, *strategy_overrides)]
    ).parallelism.data_parallel_size
    micro_batch = f"trainer.micro_batch={12 // ranks}"
    actual_run = run_job.without_defaults(
        *training_overrides(folder, *strategy_overrides, micro_batch, "optimizer.in_backward=true")
    )
    expected = train_on_one_device(run_job, folder, *ONE_STEP)
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert actual_run.column(key) == pytest.approx(expected.column(key), rel=TOLERANCE), key
    assert_tensors_close(actual_run.weights(), expected.weights(), "weights")
    assert actual_run.summary["metrics"]["memory/gradients_bytes"] == 0


SINGLE_DEVICE_OPTIONS = {
    "checkpoint_full": ("memory=checkpoint_full",),
    "checkpoint_selective": ("memory=checkpoint_selective",),
    "checkpoint_every_n": ("memory=checkpoint_every_n", "memory.every=2"),
    **MEMORY_OPTIONS,
    "compile_block": ("compile=block", "compile.backend=aot_eager"),
    "compile_whole": ("compile=whole", "compile.backend=aot_eager"),
}


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        pytest.param(family, option, marks=() if runs_in_ci else EXHAUSTIVE)
        for family in DECODER_MODELS
        for option in SINGLE_DEVICE_OPTIONS
        for runs_in_ci in [
            (family, option) == ("gpt2", "loss_chunk")
        ]  # tied: the head has no matrix of its own
    ],
)
def test_hf_memory_options_change_no_step(
    family: str, mode: str, hf_checkpoint: HFCheckpoints, run_job: JobRunner
) -> None:
    folder = hf_checkpoint(family)
    assert_same_training(
        train_on_one_device(run_job, folder, *SINGLE_DEVICE_OPTIONS[mode]),
        train_on_one_device(run_job, folder),
    )


@pytest.mark.parametrize(
    "family", ["opt", *(pytest.param(f, marks=EXHAUSTIVE) for f in DECODER_MODELS[:3])]
)
def test_hf_training_equals_a_plain_transformers_loop(
    family: str, hf_checkpoint: HFCheckpoints, run_job: JobRunner
) -> None:
    folder = hf_checkpoint(family)
    actual_run = train_on_one_device(run_job, folder, "optimizer.weight_decay=0")
    run = compose(
        [*training_overrides(folder, "optimizer.weight_decay=0", "trainer.micro_batch=11")]
    )
    dataset = prepare_splits(run.data, 256, run.seed).train
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for batch in TrainLoader(dataset, BatchShare(11, 11, 0, 1), seed=run.seed, steps=3):
        logits = model(batch["inputs"]).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    assert actual_run.column("train/loss") == pytest.approx(losses, rel=1e-5)
    to = actual_run.path / "exported"
    exports.write_export(load_trained(actual_run.path), to, AdapterExport.merged)
    actual, expected = load_file(to / "model.safetensors"), model.state_dict()
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


SMALL_LORA = ("adapter=lora", "adapter.rank=4", "adapter.targets=[.*]")


@pytest.mark.parametrize(
    "strategy", ["fsdp", *(pytest.param(e, marks=EXHAUSTIVE) for e in ("ddp", "hsdp"))]
)
@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("llama", "nf4"),
        *(
            pytest.param(family, quantization, marks=EXHAUSTIVE)
            for family in DECODER_MODELS
            for quantization in ("nf4", "fp4", "int8")
            if (family, quantization) != ("llama", "nf4")
        ),
    ],
)
def test_hf_quantized_training_equals_one_device(
    family: str, quantization: str, strategy: str, hf_checkpoint: HFCheckpoints, run_job: JobRunner
) -> None:
    folder, more = hf_checkpoint(family), (*SMALL_LORA, f"quantization={quantization}")
    actual_run = run_job.without_defaults(
        *training_overrides(folder, *STRATEGIES[strategy], *more, "trainer.micro_batch=2")
    )
    assert_same_training(actual_run, train_on_one_device(run_job, folder, *more))


def quantize_with_transformers(folder: Path) -> PreTrainedModel:
    """Model with NF4 linear layers, packed as by ``quantization=nf4``."""
    nf4_options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    kind = BitsAndBytesConfig(load_in_4bit=True, **nf4_options)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, quantization_config=kind)
    return (
        model.train()
    )  # otherwise bitsandbytes uses another packing, which fails for narrow matrices


@pytest.mark.parametrize("family", DECODER_MODELS)
def test_hf_quantized_weights_equal_transformers(family: str, hf_checkpoint: HFCheckpoints) -> None:
    folder = hf_checkpoint(family)
    reference = quantize_with_transformers(folder)
    run = compose([*training_overrides(folder, *SMALL_LORA, "quantization=nf4")])
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        actual = SingleDevice(DeviceKind.cpu).build(run)(tokens)
        torch.testing.assert_close(actual, reference(tokens).logits, rtol=1e-5, atol=1e-6)
        unquantized_logits = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    assert not torch.allclose(actual, unquantized_logits, rtol=1e-3, atol=1e-3)


SMALL_PISSA = ("adapter=pissa", *SMALL_LORA[1:])
ADAPTER_CASES = ((), SMALL_LORA, ("adapter=ia3",), SMALL_PISSA, (*SMALL_LORA, "quantization=nf4"))


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # from PEFT internals
@pytest.mark.parametrize(
    "more",
    [
        ADAPTER_CASES[1],
        *(pytest.param(more, marks=EXHAUSTIVE) for more in (ADAPTER_CASES[0], *ADAPTER_CASES[2:])),
    ],
)
@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(f, marks=EXHAUSTIVE) for f in ("llama", "opt"))]
)
def test_hf_run_evaluates_exports_and_resumes(
    family: str, more: tuple[str, ...], hf_checkpoint: HFCheckpoints, run_job: JobRunner
) -> None:
    folder = hf_checkpoint(family)
    sharded = (*STRATEGIES["fsdp"], *more, "trainer.micro_batch=6", "checkpoint.every=2")
    actual_run = run_job.without_defaults(*training_overrides(folder, *sharded))
    trained_run = load_trained(actual_run.path)
    exports.write_export(trained_run, actual_run.path / "exported", AdapterExport.merged)
    tokens = torch.randint(256, (2, 32))
    reference = AutoModelForCausalLM.from_pretrained(actual_run.path / "exported")
    with torch.no_grad():
        logits = load_model(trained_run, torch.device("cpu"))(tokens)
        torch.testing.assert_close(reference(tokens).logits, logits, rtol=1e-5, atol=1e-5)
        is_quantized = "quantization=nf4" in more
        base = (
            quantize_with_transformers if is_quantized else AutoModelForCausalLM.from_pretrained
        )(folder)
        base_logits = base(tokens).logits
        if more:
            exports.write_export(trained_run, actual_run.path / "adapter", AdapterExport.alone)
            adapted = PeftModel.from_pretrained(base, actual_run.path / "adapter").train()
            torch.testing.assert_close(adapted(tokens).logits, logits, rtol=1e-5, atol=1e-5)
    assert not torch.equal(logits, base_logits)
    resumed_run = run_job.without_defaults(
        *training_overrides(folder, *more, "trainer.micro_batch=12"),
        resume=actual_run.checkpoint(2),
    )
    assert_tensors_close(resumed_run.weights(), actual_run.weights(), "weights after step 2")


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # from PEFT internals
@pytest.mark.parametrize("family", DECODER_MODELS)
def test_hf_lora_modules_equal_peft(family: str, hf_checkpoint: HFCheckpoints) -> None:
    run = compose([*training_overrides(hf_checkpoint(family), "adapter=lora")])
    base = AutoModelForCausalLM.from_pretrained(hf_checkpoint(family))
    reference = get_peft_model(base, LoraConfig(r=8, fan_in_fan_out=family == "gpt2"))
    expected = {
        ".".join(name.split(".")[-6:])
        for name, parameter in reference.named_parameters()
        if parameter.requires_grad
    }
    actual = [weight.name for weight in run.weight_census() if weight.trainable]
    assert {".".join(name.split(".")[-6:]) for name in actual} == expected
    assert len(actual) == len(expected)


@pytest.mark.parametrize("launched", ["none", "process"])
def test_hf_unreadable_weights_are_reported(
    launched: str, hf_checkpoint: HFCheckpoints, run_job: JobRunner, tmp_path: Path
) -> None:
    folder = shutil.copytree(hf_checkpoint("apertus"), tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.act_fn.beta"
    save_file({**tensors, name: tensors[name] + 1}, folder / "model.safetensors")
    isolation = f"launch.isolation={launched}"
    reason = run_job.without_defaults(
        *training_overrides(folder, isolation), status="refused"
    ).status["reason"]
    assert f"has a buffer {name} with other values than config.json gives" in reason
