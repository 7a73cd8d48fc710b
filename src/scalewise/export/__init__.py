"""Export of trained models and adapters in the formats of Hugging Face."""

from enum import StrEnum


class AdapterExport(StrEnum):
    """Export of an adapter."""

    merged = "merged"
    """Merged into the weights of the model."""
    alone = "alone"
    """Separately, as a PEFT folder."""
