"""What a run trained, in the formats of Hugging Face: models, adapters, and a card that tells."""

from enum import StrEnum


class AdapterExport(StrEnum):
    """What becomes of an adapter."""

    merged = "merged"
    alone = "alone"
