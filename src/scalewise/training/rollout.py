"""A model's own answers to prompts: written token by token, rewarded, ready to be learnt from.

Shape suffixes: B sequences, T tokens, A tokens of an answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scalewise.data.base import DataConfig
from scalewise.data.datasets import splitmix64
from scalewise.objectives.base import IGNORED, ObjectiveConfig
from scalewise.objectives.grpo import GRPO
from scalewise.objectives.likelihood import NextToken

Batch = dict[str, Tensor]
Ask = Callable[[ObjectiveConfig, Batch], Tensor]
"""Returns what a model says of a batch, without gradients."""


@dataclass(frozen=True)
class Rollout:
    """How a model answers the prompts of some data."""

    objective: GRPO
    data: DataConfig

    def sample(self, batch: Batch, forward_no_grad: Ask, seed: int, step: int) -> Batch:
        """Returns ``answers`` drawn for each prompt, with their rewards and advantages.

        What is drawn is a function of seed, step, prompt and the answer's number in its group:
        whatever rank reads a prompt in whatever micro batch draws alike.
        """
        each = self.objective.answers
        asked = {key: batch[key].repeat_interleave(each, 0) for key in ("inputs", "labels")}
        prompts_BP = asked["inputs"][:, : 1 - self.data.answer_length or None].cpu().numpy()
        number_B = np.arange(len(prompts_BP)) % each
        key_B = np.full(len(prompts_BP), (seed << 32) + step, dtype=np.uint64)
        for column_B in (number_B, *prompts_BP.T):
            key_B = splitmix64(key_B ^ splitmix64(column_B.astype(np.uint64)))

        def draw(logits_BV: Tensor, place: int) -> Tensor:
            chance_B = splitmix64(key_B + np.uint64(place)).astype(np.float64) / 2.0**64
            sums_BV = logits_BV.double().softmax(-1).cumsum(-1)
            below_BV = sums_BV <= torch.from_numpy(chance_B).to(sums_BV.device)[:, None]
            return below_BV.sum(1).clamp(max=sums_BV.shape[1] - 1)

        found = self._generate(asked, forward_no_grad, draw)
        return {**found, "advantage": self.objective.compute_advantages(found["reward"])}

    def generate_greedy(self, batch: Batch, forward_no_grad: Ask) -> Batch:
        """Returns the likeliest answer to each prompt, token by token, and its reward."""
        found = self._generate(
            batch, forward_no_grad, lambda logits_BV, place: logits_BV.argmax(-1)
        )
        return {**found, "advantage": torch.zeros_like(found["reward"])}

    def _generate(
        self, batch: Batch, forward_no_grad: Ask, choose_token: Callable[[Tensor, int], Tensor]
    ) -> Batch:
        inputs_BT, labels_BT = batch["inputs"].clone(), batch["labels"].clone()
        tokens = labels_BT.shape[1]
        first = tokens - self.data.answer_length
        for place in range(first, tokens):
            question = {"inputs": inputs_BT, "labels": labels_BT}
            token_B = choose_token(forward_no_grad(NextToken(position=place), question), place)
            filler_B = labels_BT[:, place] == IGNORED
            labels_BT[:, place] = token_B.masked_fill(filler_B, IGNORED)
            if place + 1 < tokens:
                inputs_BT[:, place + 1] = token_B
        reward_B = self.data.reward(labels_BT[:, first:], batch["labels"][:, first:])
        return {"inputs": inputs_BT, "labels": labels_BT, "reward": reward_B}
