"""Import paths of config classes in version 0.1.0, as run folders and user files name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_RENAMED = {
    "adapters.low_rank.Dora": "adapters.lora_config.DoRAAdapterConfig",
    "adapters.low_rank.Lora": "adapters.lora_config.LoRAAdapterConfig",
    "adapters.low_rank.Pissa": "adapters.lora_config.PiSSAAdapterConfig",
    "adapters.low_rank.RankStabilizedLora": "adapters.lora_config.RSLoRAAdapterConfig",
    "adapters.prompts.Prefix": "adapters.prompt_config.PrefixAdapterConfig",
    "adapters.prompts.Prompt": "adapters.prompt_config.PromptAdapterConfig",
    "adapters.scales.IA3": "adapters.ia3_config.IA3AdapterConfig",
    "adapters.spec.NoAdapter": "adapters.config.NoAdapterConfig",
    "checkpoints.spec.Checkpoint": "checkpoint_config.CheckpointConfig",
    "compilation.Compile": "torch_compile.Compile",
    "data.captions.Captions": "data.chat.CaptionData",
    "data.chat.Chat": "data.chat.ChatData",
    "data.corpus.Corpus": "data.stdlib_corpus.StdlibCorpus",
    "data.corpus_classes.CorpusClasses": "data.stdlib_corpus.StdlibCorpusClasses",
    "data.corpus_pairs.CorpusPairs": "data.stdlib_corpus.StdlibCorpusPairs",
    "data.hf.HuggingFace": "data.text.HFDatasetData",
    "data.labelled.Labelled": "data.chat.LabeledText",
    "data.module.UserData": "data.user_datamodule.UserDataModule",
    "data.preference.Preference": "data.chat.PreferenceData",
    "data.seq2seq.Seq2SeqData": "data.chat.Seq2SeqData",
    "data.reversal.Reversal": "data.synthetic.DigitReversal",
    "data.shapes.Shapes": "data.synthetic.SyntheticShapes",
    "data.synthetic.Synthetic": "data.synthetic.RandomTokens",
    "data.text.Text": "data.text.TextData",
    "data.tokens.Tokens": "data.text.PretokenizedData",
    "launch.spec.Launch": "launch_config.Launch",
    "memory.Auto": "memory_config.AutoCheckpointing",
    "memory.Checkpointing": "memory_config.FixedCheckpointing",
    "models.decoder.spec.Decoder": "models.decoder.config.DecoderConfig",
    "models.hf.spec.HuggingFace": "models.hf.config.HuggingFaceConfig",
    "objectives.captioning.Captioning": "objectives.config.Captioning",
    "objectives.causal_lm.CausalLM": "objectives.config.CausalLM",
    "objectives.classification.Classification": "objectives.config.Classification",
    "objectives.dpo.DPO": "objectives.config.DPO",
    "objectives.grpo.GRPO": "objectives.config.GRPO",
    "objectives.module.OfModule": "objectives.config.SetByModule",
    "objectives.module.UserModule": "objectives.config.UserModule",
    "objectives.seq2seq.Seq2Seq": "objectives.config.Seq2Seq",
    "optimizers.adam.AdamW": "optimizers.config.AdamWConfig",
    "optimizers.adam.AdamW4bit": "optimizers.config.AdamW4bitConfig",
    "optimizers.adam.AdamW8bit": "optimizers.config.AdamW8bitConfig",
    "optimizers.adam.PagedAdamW": "optimizers.config.PagedAdamWConfig",
    "optimizers.matrix.Adafactor": "optimizers.config.AdafactorConfig",
    "optimizers.matrix.Muon": "optimizers.config.MuonConfig",
    "optimizers.schedule_free.ScheduleFree": "optimizers.config.ScheduleFreeConfig",
    "optimizers.sgd.Lion": "optimizers.config.LionConfig",
    "optimizers.sgd.SGD": "optimizers.config.SGDConfig",
    "parallelism.ddp.DDP": "parallelism.ddp.DDPConfig",
    "parallelism.deepspeed.DeepSpeed": "parallelism.deepspeed.DeepSpeedConfig",
    "parallelism.mesh.Mesh": "parallelism.mesh.MeshConfig",
    "parallelism.single.Single": "parallelism.single.SingleConfig",
    "plan.spec.Planning": "plan_config.PlanConfig",
    "precision.Precision": "precision.config.Precision",
    "precision.fp8.Float8": "precision.config.Float8",
    "quantization.aware.QAT8da4w": "quantization.config.QAT8da4wConfig",
    "quantization.aware.QATInt4": "quantization.config.QATInt4Config",
    "quantization.packing.FP4": "quantization.config.FP4Config",
    "quantization.packing.Int8": "quantization.config.Int8Config",
    "quantization.packing.NF4": "quantization.config.NF4Config",
    "quantization.spec.NoQuantization": "quantization.config.NoQuantizationConfig",
    "schedules.Constant": "lr_schedules.ConstantConfig",
    "schedules.Cosine": "lr_schedules.CosineConfig",
    "schedules.Linear": "lr_schedules.LinearConfig",
    "schedules.WarmupStableDecay": "lr_schedules.WarmupStableDecayConfig",
    "tracking.spec.Wandb": "tracking_config.WandbConfig",
    "trainer.Trainer": "trainer_config.TrainerConfig",
    "training.callbacks.guard.LossGuard": "training.callbacks.loss_guard.LossGuard",
    "training.callbacks.inject.Hang": "training.callbacks.fault_injection.InjectHang",
    "training.callbacks.inject.Kill": "training.callbacks.fault_injection.InjectKill",
    "training.callbacks.inject.OutOfMemory": "training.callbacks.fault_injection.InjectOutOfMemory",
    "training.callbacks.inject.Raise": "training.callbacks.fault_injection.InjectException",
}

RENAMED_TARGETS = {f"scalewise.{old}": f"scalewise.{new}" for old, new in _RENAMED.items()}
"""Current path of each class by its path in version 0.1.0."""
FORMER_TARGETS = {new: old for old, new in RENAMED_TARGETS.items()}
"""Path in version 0.1.0 of each class by its current path."""


def rename_targets(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Copy a resolved config, with ``_target_`` entries replaced as in ``names``."""
    return {
        key: rename_targets(value, names)
        if isinstance(value, Mapping)
        else names.get(value, value)
        if key == "_target_" and isinstance(value, str)
        else value
        for key, value in values.items()
    }
