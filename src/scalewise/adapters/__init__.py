"""Few new weights in place of the many that a model has."""

import logging

from scalewise.adapters.config import AdapterConfig, NoAdapterConfig
from scalewise.adapters.ia3_config import IA3AdapterConfig
from scalewise.adapters.lora_config import LoRAAdapterConfig

__all__ = ["AdapterConfig", "IA3AdapterConfig", "LoRAAdapterConfig", "NoAdapterConfig"]

# PEFT imports torchao, which tells of kernels for other machines, and of torch's of itself, and
# bitsandbytes, which on CPUs with bf16 tells of a faster kernel that it does without.
for name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
    logging.getLogger(name).setLevel(logging.ERROR)
