"""The frozen interface: names and formats that users depend on. A change requires a new version."""

import tomllib
from pathlib import Path

import scalewise
from scalewise import cli, errors, registry
from scalewise.config import paths
from scalewise.launch.outcomes import Outcome
from scalewise.metric_names import METRICS, STEP_PHASES

ROOT = Path(__file__).parents[2]


def test_commands_are_frozen() -> None:
    assert list(cli.COMMANDS) == [
        "train",
        "plan",
        "verify",
        "lab",
        "explain",
        "status",
        "report",
        "evaluate",
        "export",
        "import",
        "publish",
        "dashboard",
        "bench",
        "calibrate",
        "wandb-sweep",
        "doctor",
    ]


def test_groups_and_options_are_frozen() -> None:
    assert {group: paths.option_names(group) for group in paths.GROUPS} == {
        "model": [
            "blip2_flan_t5_xxl",
            "blip2_opt_2_7b",
            "blip2_opt_6_7b",
            "decoder_10m",
            "decoder_nano",
            "deepseek_v2_lite",
            "gemma2_2b",
            "gemma3_1b",
            "gemma3_4b",
            "gpt2_124m",
            "hf",
            "llama3_1b",
            "llama3_70b",
            "llama3_8b",
            "llama_160m",
            "mistral_7b",
            "mixtral_8x7b",
            "module",
            "moe_nano",
            "olmo2_7b",
            "openllama_13b",
            "openllama_3b",
            "openllama_7b",
            "phi_2",
            "pythia_160m",
            "pythia_1b",
            "qwen3_0_6b",
            "qwen3_1_7b",
            "qwen3_30b_a3b",
            "qwen3_32b",
            "qwen3_8b",
            "smollm3_3b",
            "tinyllama_1b",
        ],
        "data": [
            "captions",
            "chat",
            "corpus",
            "corpus_classes",
            "corpus_pairs",
            "hf",
            "labelled",
            "mixture",
            "module",
            "preference",
            "reversal",
            "seq2seq",
            "shapes",
            "synthetic",
            "text",
            "tokens",
        ],
        "objective": [
            "captioning",
            "causal_lm",
            "classification",
            "dpo",
            "grpo",
            "module",
            "seq2seq",
        ],
        "parallelism": [
            "context",
            "ddp",
            "deepspeed_zero1",
            "deepspeed_zero2",
            "deepspeed_zero2_offload",
            "deepspeed_zero3",
            "deepspeed_zero3_nvme",
            "deepspeed_zero3_offload",
            "fsdp",
            "hsdp",
            "mesh",
            "pipeline",
            "single",
            "tensor",
        ],
        "precision": ["bf16_mixed", "bf16_true", "fp16_mixed", "fp32", "fp8"],
        "optimizer": [
            "adafactor",
            "adamw",
            "adamw_4bit",
            "adamw_8bit",
            "adamw_paged",
            "lion",
            "module",
            "muon",
            "schedule_free",
            "sgd",
        ],
        "schedule": ["constant", "cosine", "linear", "module", "wsd"],
        "adapter": ["dora", "ia3", "lora", "none", "pissa", "prefix", "prompt", "rslora"],
        "quantization": ["fp4", "int8", "nf4", "none", "qat_8da4w", "qat_int4"],
        "memory": [
            "auto",
            "checkpoint_every_n",
            "checkpoint_full",
            "checkpoint_selective",
            "none",
            "offload_activations",
        ],
        "compile": ["auto", "block", "none", "whole"],
        "trainer": ["default"],
        "checkpoint": ["default", "none"],
        "tracking": ["none", "wandb"],
        "launch": ["local"],
        "hardware": [
            "a10",
            "a100_40g",
            "a100_80g",
            "a100_80g_8",
            "a100_pcie_40g",
            "a100_pcie_80g",
            "a10g",
            "a6000",
            "auto",
            "b200",
            "b200_8",
            "cpu",
            "gb200",
            "gh200",
            "h100",
            "h100_8",
            "h100_8x4",
            "h100_nvl",
            "h100_pcie",
            "h200",
            "h200_8",
            "h200_nvl",
            "l4",
            "l40s",
            "mi300x",
            "mi300x_8",
            "rtx3090",
            "rtx4090",
            "rtx5090",
            "t4",
            "v100",
        ],
        "plan": ["default"],
        "verify": ["default"],
        "callbacks": ["early_stopping", "ema", "guard", "none", "profiler"],
    }


def test_groups_all_have_frozen_fields() -> None:
    registry.import_options()
    assert set(registry.OPTIONS) == set(paths.CLOSED_GROUPS)


def test_metric_keys_are_frozen() -> None:
    assert list(METRICS) == [
        "step",
        "train/loss",
        "val/loss",
        "train/reward_margin",
        "val/reward_margin",
        "train/reward_accuracy",
        "val/reward_accuracy",
        "train/reward",
        "val/reward",
        "train/kl",
        "val/kl",
        "train/accuracy",
        "val/accuracy",
        "train/tokens",
        "train/global_batch",
        "train/sequence",
        "train/grad_norm",
        "train/skipped_steps",
        "train/lr",
        "experts/max_load",
        "experts/min_load",
        "experts/router_entropy",
        "experts/dropped",
        "throughput/tokens_per_s",
        "throughput/tokens_per_s_per_device",
        "throughput/unpadded_tokens_per_s",
        "throughput/tflops_per_s_per_device",
        "throughput/mfu",
        "throughput/mfu_palm",
        "time/step_s",
        "time/data_s",
        "time/forward_s",
        "time/backward_s",
        "time/forward_backward_s",
        "time/optimizer_s",
        "memory/parameters_bytes",
        "memory/gradients_bytes",
        "memory/optimizer_bytes",
        "memory/activations_bytes",
        "memory/peak_bytes",
        "memory/host_peak_bytes",
    ]
    assert {f"time/{name}_s" for name in STEP_PHASES} < set(METRICS)


def test_metrics_name_their_unit() -> None:
    for metric in METRICS.values():
        assert metric.meaning, metric
        suffixed = {"_s": "s", "_bytes": "B"}
        for suffix, unit in suffixed.items():
            if metric.key.endswith(suffix) and "_per_s" not in metric.key:
                assert metric.unit == unit, suffix


def test_exit_codes_are_frozen() -> None:
    assert errors.EXIT_CODES == {
        "ok": 0,
        "pruned": 0,
        "failed": 1,
        "refused": 2,
        "out_of_memory": 3,
        "timeout": 4,
    }
    assert errors.DIFFERENT == 5
    assert Outcome("interrupted", signal_number=15).exit_code == 143
    assert errors.Interrupted(2, "").exit_code == 130
    assert errors.ConfigError([]).exit_code == 2


def test_api_is_frozen() -> None:
    errors = ["CheckpointError", "ConfigError", "DataError"]
    assert scalewise.__all__ == [*errors, "Result", "Run", "compose", "train"]
    for name in scalewise.__all__:
        assert getattr(scalewise, name).__doc__, name


def test_entry_point_and_extras_are_frozen() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"scalewise": "scalewise.cli:command"}
    extras = {"deepspeed", "quant", "optimizers", "slurm", "optuna", "hf", "images"}
    assert set(project["optional-dependencies"]) == extras | {"dev", "docs", "jax", "all"}
