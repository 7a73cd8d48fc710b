"""Pretrained tensors under the parameter names of a model of transformers.

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

from scalewise.models.safetensors_files import SafetensorsFiles

OLD_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Endings of buffers that old checkpoints carry; transformers ignores them with a warning."""
OLD_PARAMETERS = (".EncDecAttention.relative_attention_bias.weight",)
"""Endings of parameters that the first T5 checkpoints carry; no layer reads them."""
ROWS = 4096
"""Rows that are compared at a time."""


class PretrainedTensors:
    """Tensors of a checkpoint by the names in ``model.state_dict()``.

    Args:
        files: Tensors under the names of the checkpoint.
        model: Model on the meta device, as transformers builds it.
    """

    def __init__(self, files: SafetensorsFiles, model: PreTrainedModel) -> None:
        self.files, self.model = files, model
        self.unexpected: list[str] = []
        """Names that the model lacks, without those that transformers ignores."""
        self.renamed: dict[str, str] = {}
        """Name in the checkpoint of each tensor that is renamed alone, by name in the model."""
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
        """Assigns each tensor of the checkpoint to the tensors of the model."""
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
            made = self._convert(first, lambda stored: self._meta_tensor(stored))
            self._conversion_keys |= dict.fromkeys(made, first)

    def _meta_tensor(self, stored_name: str) -> Tensor:
        return torch.empty(self.files.shape(stored_name), device="meta")

    def _convert(self, first: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Returns the tensors that transformers makes of several, or several of one."""
        converter, sources = self._conversions[first]
        converter = copy.deepcopy(converter)
        for stored, pattern in sources:
            converter.add_tensor(first, stored, pattern, read(stored))  # type: ignore[arg-type]
        made: Mapping[str, Any] = converter.convert(
            first, model=self.model, config=self.model.config
        )
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.renamed or name in self._conversion_keys

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor without reading it."""
        if name in self.renamed:
            return self.files.shape(self.renamed[name])
        return tuple(self._convert(self._conversion_keys[name], self._meta_tensor)[name].shape)

    def read(self, name: str) -> Tensor:
        """Returns a tensor; of one that is converted with others, these are kept until read."""
        if name in self.renamed:
            return self.files.read(self.renamed[name])
        if name not in self._converted:
            self._converted = self._convert(self._conversion_keys[name], self.files.read)
        return self._converted.pop(name)

    def find_tied_names(self, name: str) -> list[str]:
        """Returns a name and those that the configuration ties to it, of what is stored."""
        group = next((each for each in self.tied_groups if name in each), {name})
        return [each for each in (name, *sorted(group - {name})) if each in self]

    def is_equal(self, one: str, other: str) -> bool:
        """Returns whether two tensors hold the same numbers; it stops at the first difference."""
        if self.shape(one) != self.shape(other):
            return False
        first, second = self.read(one), self.read(other)
        return all(
            torch.equal(first[row : row + ROWS], second[row : row + ROWS])
            for row in range(0, len(first), ROWS)
        )


def _ignored_patterns(model: PreTrainedModel) -> Callable[[str], bool]:
    """Returns what tells names that ``_adjust_missing_and_unexpected_keys`` drops."""
    patterns = {*(model._keys_to_ignore_on_load_unexpected or ())}
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    found = re.compile("|".join(f"({each})" for each in patterns)) if patterns else None
    return lambda name: found is not None and found.search(name) is not None
