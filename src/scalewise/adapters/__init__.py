"""Parameter-efficient fine-tuning (PEFT): LoRA and its variants, (IA)^3, prompts."""

import logging

from scalewise.adapters.config import AdapterConfig, NoAdapterConfig
from scalewise.adapters.ia3_config import IA3AdapterConfig
from scalewise.adapters.lora_config import LoRAAdapterConfig
from scalewise.compat.hugging_face import PEFT_LOGGERS

__all__ = ["AdapterConfig", "IA3AdapterConfig", "LoRAAdapterConfig", "NoAdapterConfig"]

# PEFT imports torchao and bitsandbytes, which log warnings about kernels that they do not use.
for name in PEFT_LOGGERS:
    logging.getLogger(name).setLevel(logging.ERROR)
