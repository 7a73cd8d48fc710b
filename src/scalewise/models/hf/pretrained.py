"""Tensors of a checkpoint under the parameter names of a Hugging Face model.

Renamings, conversions, tied weights and ignored tensors are those that
``PreTrainedModel.from_pretrained`` applies (transformers 5, ``core_model_loading``).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from scalewise.compat.hugging_face import unexpected_key_patterns
from scalewise.models.safetensors_files import SafetensorsFiles

OLD_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Suffixes of buffers in old checkpoints, which transformers ignores with a warning."""
OLD_PARAMETERS = (".EncDecAttention.relative_attention_bias.weight",)
"""Suffixes of parameters in the first T5 checkpoints, which no layer reads."""
COMPARE_CHUNK = 4096
"""Slices along dim 0 that are compared at a time."""


class PretrainedTensors:
    """Tensors of a checkpoint by the names in ``model.state_dict()``.

    Args:
        files: Tensors under the names in the checkpoint.
        model: Model on the meta device, as transformers builds it.
    """

    def __init__(self, files: SafetensorsFiles, model: PreTrainedModel) -> None:
        self.files, self.model = files, model
        self.unexpected: list[str] = []
        """Names in the checkpoint that the model does not have, except ignored ones."""
        self.renamed: dict[str, str] = {}
        """Name in the checkpoint of each tensor that is only renamed, by name in the model."""
        self._conversions: dict[str, tuple[WeightConverter, list[tuple[str, str]]]] = {}
        self._converted: dict[str, Tensor] = {}
        self._conversion_keys: dict[str, str] = {}
        self._assign(dict(model.state_dict()))
        tied = model.get_expanded_tied_weights_keys(all_submodels=True)
        self.tied_groups: list[set[str]] = []
        """Sets of names that the configuration ties to one parameter."""
        for target, source in tied.items():
            group = next((each for each in self.tied_groups if source in each), None)
            if group is None:
                self.tied_groups.append({source, target})
            else:
                group.add(target)

    def _assign(self, expected: Mapping[str, Tensor]) -> None:
        """Assign each tensor of the checkpoint to the tensors of the model."""
        mapping = get_model_conversion_mapping(self.model)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        prefix, ignored = self.model.base_model_prefix, _ignored_patterns(self.model)
        for stored in sorted(self.files.names, key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters, prefix, dict(expected))
            if name not in expected and stored in expected:
                name, pattern = stored, None
            if name not in expected:
                if not ignored(name) and not name.endswith(OLD_BUFFERS + OLD_PARAMETERS):
                    self.unexpected.append(stored)
            elif pattern is None:
                self.renamed.setdefault(name, stored)
            else:
                self._conversions.setdefault(name, (by_pattern[pattern], []))[1].append(
                    (stored, pattern)
                )
        for first in self._conversions:
            converted = self._convert(first, self._meta_tensor)
            self._conversion_keys |= dict.fromkeys(converted, first)

    def _meta_tensor(self, stored_name: str) -> Tensor:
        return torch.empty(self.files.shape(stored_name), device="meta")

    def _convert(self, first: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the tensors that transformers converts together with ``first``."""
        converter, sources = self._conversions[first]
        converter = copy.deepcopy(converter)
        for stored, pattern in sources:
            converter.add_tensor(first, stored, pattern, read(stored))  # type: ignore[arg-type]
        converted: Mapping[str, Any] = converter.convert(
            first, model=self.model, config=self.model.config
        )
        return {
            name: each[0] if isinstance(each, list) else each for name, each in converted.items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self.renamed or name in self._conversion_keys

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        if name in self.renamed:
            return self.files.shape(self.renamed[name])
        return tuple(self._convert(self._conversion_keys[name], self._meta_tensor)[name].shape)

    def read(self, name: str) -> Tensor:
        """Return a tensor; others from the same conversion are cached until they are read."""
        if name in self.renamed:
            return self.files.read(self.renamed[name])
        if name not in self._converted:
            self._converted = self._convert(self._conversion_keys[name], self.files.read)
        return self._converted.pop(name)

    def find_tied_names(self, name: str) -> list[str]:
        """Return those of a name and the names tied to it that the checkpoint has."""
        group = next((each for each in self.tied_groups if name in each), {name})
        return [each for each in (name, *sorted(group - {name})) if each in self]

    def is_equal(self, one: str, other: str) -> bool:
        """Return whether two tensors have equal values."""
        if self.shape(one) != self.shape(other):
            return False
        first, second = self.read(one), self.read(other)
        return all(
            torch.equal(first[start : start + COMPARE_CHUNK], second[start : start + COMPARE_CHUNK])
            for start in range(0, len(first), COMPARE_CHUNK)
        )


def _ignored_patterns(model: PreTrainedModel) -> Callable[[str], bool]:
    """Return a predicate of names that ``_adjust_missing_and_unexpected_keys`` ignores."""
    patterns = unexpected_key_patterns(model)
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    regex = re.compile("|".join(f"({each})" for each in patterns)) if patterns else None
    return lambda name: regex is not None and regex.search(name) is not None
