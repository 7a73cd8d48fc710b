"""Few new weights in place of the many that a model has."""

from scalewise.adapters.spec import Adapter, Lora, NoAdapter

__all__ = ["Adapter", "Lora", "NoAdapter"]
