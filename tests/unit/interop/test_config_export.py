"""Configs that are exported: Accelerate and DeepSpeed read them, and they are imported again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from scalewise.commands import export
from scalewise.config.compose import compose
from scalewise.errors import ConfigError
from scalewise.interop import accelerate_import, deepspeed_import
from scalewise.interop.accelerate_export import accelerate_config
from scalewise.interop.deepspeed_export import deepspeed_config

pytestmark = pytest.mark.usefixtures("cpu_machine")

RUNS = [
    "parallelism=single hardware=cpu",
    "parallelism=ddp parallelism.replicas=2 hardware=cpu",
    "parallelism=ddp parallelism.replicas=8 hardware=h100 precision=fp16_mixed",
    "parallelism=fsdp parallelism.shards=8 hardware=h100 precision=bf16_mixed",
    "parallelism=fsdp parallelism.shards=4 parallelism.reshard_after_forward=false hardware=h100 "
    "precision=bf16_mixed compile=none memory=checkpoint_full",
    "parallelism=hsdp parallelism.replicate=2 parallelism.shards=4 hardware=h100",
    "parallelism=mesh parallelism.shards=2 parallelism.context=2 parallelism.tensor=2 "
    "hardware=h100 precision=bf16_mixed",
    "parallelism=context parallelism.context=2 parallelism.attention=gather hardware=h100",
    "parallelism=deepspeed_zero3_offload parallelism.replicas=4 hardware=h100 "
    "precision=bf16_mixed trainer.clip_norm=0.5",
]
SAME_KEYS = ("world_size", "precision", "memory", "applied_compile", "parallelism")


@pytest.mark.parametrize("line", RUNS)
def test_accelerate_reads_the_config_and_it_is_imported_again(line: str, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    run = compose(line.split(), check_machine=False)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(accelerate_config(run).values))
    config = load_config_from_file(str(path))
    assert config.num_processes == run.world_size

    translation = accelerate_import.translate(yaml.safe_load(path.read_text()), tmp_path)
    overrides = [word for word in translation.command().split()[2:] if "hardware" not in word]
    overrides += [word for word in line.split() if "hardware" in word]
    same = compose(overrides, check_machine=False)
    assert {key: getattr(same, key) for key in SAME_KEYS} == {
        key: getattr(run, key) for key in SAME_KEYS
    }


def test_deepspeed_reads_the_config_and_it_is_imported_again() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    line = (
        "model=llama_160m parallelism=deepspeed_zero3_offload parallelism.replicas=1 "
        "precision=bf16_mixed trainer.micro_batch=2 trainer.global_batch=4 schedule=cosine "
        "schedule.warmup_steps=10 trainer.max_steps=50 optimizer.lr=1e-4 hardware=h100"
    )
    run = compose(line.split(), check_machine=False)
    values = deepspeed_config(run).values
    config = DeepSpeedConfig(json.loads(json.dumps(values)))  # one rank, without a process group
    assert config.zero_optimization_stage == 3
    assert config.gradient_accumulation_steps == 2
    assert config.optimizer_name == "adamw"
    assert config.scheduler_name == "WarmupCosineLR"

    overrides = deepspeed_import.translate(values).command().split()[2:]
    same = compose([*overrides, "hardware=h100"], check_machine=False)
    for group in ("parallelism", "precision", "optimizer", "schedule", "trainer"):
        assert getattr(same, group) == getattr(run, group), group


def test_settings_without_a_counterpart_are_named() -> None:
    line = "parallelism=fsdp parallelism.shards=2 parallelism.shard=optimizer precision=bf16_true "
    run = compose([*line.split(), "memory=checkpoint_selective"], check_machine=False)
    notes = "\n".join(accelerate_config(run).notes)
    assert "precision=bf16_true: load the model with dtype=torch.bfloat16" in notes
    assert "memory=checkpoint_selective: Accelerate recomputes all blocks or none" in notes
    assert "parallelism.shard=optimizer: FSDP2 partitions parameters too" in notes
    line = "parallelism=deepspeed_zero2 schedule.rewarmup_steps=5"
    run = compose([*line.split(), "hardware=h100"], check_machine=False)
    expected = "schedule.rewarmup_steps=5: has no counterpart in DeepSpeed"
    assert expected in deepspeed_config(run).notes
    stage = "+trainer.sequence_warmup={a:{until_step:10,sequence:64}}"
    notes = deepspeed_config(compose([*line.split(), stage], check_machine=False)).notes
    assert "trainer.sequence_warmup: the script has to truncate sequences" in notes
    mup = ("optimizer.lr_transfer=mup", "model.base_width=64", "model.base_heads=4")
    groups = ("+optimizer.lr_factors.embedding=0.5", "optimizer.no_decay=[embedding]")
    overrides = (*line.split(), "model=decoder_nano", *mup, *groups, "hardware=h100")
    notes = deepspeed_config(compose(overrides, check_machine=False)).notes
    for key in (mup[0], "optimizer.lr_factors", "optimizer.no_decay"):
        assert f"{key}: pass the parameter groups to deepspeed.initialize" in notes


def test_export_prints_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main(["accelerate", "parallelism=ddp", "parallelism.replicas=2"]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["num_processes"] == 2
    assert "belong to the script" in printed.err
    assert export.main(["deepspeed", "parallelism=deepspeed_zero1"]) == 0
    assert json.loads(capsys.readouterr().out)["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("deepspeed parallelism=fsdp", "parallelism=fsdp: is not DeepSpeed's"),
        ("accelerate parallelism=pipeline", "parallelism.pipeline=2: Accelerate has no pipeline"),
        ("accelerate -m seed=1,2", "export accelerate writes the config of one run"),
    ],
)
def test_runs_without_such_a_config_are_rejected(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        export.main(arguments.split())
    assert message in str(error.value)
