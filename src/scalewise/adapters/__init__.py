"""Few new weights in place of the many that a model has."""

import logging

from scalewise.adapters.low_rank import Lora
from scalewise.adapters.scales import IA3
from scalewise.adapters.spec import Adapter, NoAdapter

__all__ = ["IA3", "Adapter", "Lora", "NoAdapter"]

# PEFT imports torchao, which tells of kernels for other machines, and of torch's of itself, and
# bitsandbytes, which on CPUs with bf16 tells of a faster kernel that it does without.
for name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
    logging.getLogger(name).setLevel(logging.ERROR)
