"""Rollouts: answers that the policy samples for prompts, with their rewards and advantages.

Shape suffixes: B sequences, T tokens, A tokens of an answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scalewise.data.base import DataConfig
from scalewise.data.synthetic_datasets import splitmix64
from scalewise.objectives.config import GRPO, IGNORED, NextToken, ObjectiveConfig
from scalewise.objectives.losses import compute_advantages

Batch = dict[str, Tensor]
ForwardNoGrad = Callable[[ObjectiveConfig, Batch], Tensor]
"""Function that evaluates an objective on a batch without gradients."""


@dataclass(frozen=True)
class Rollout:
    """Sampler of answers to the prompts of a data set."""

    objective: GRPO
    """Objective: number of answers per prompt and advantage normalization."""
    data: DataConfig
    """Data config: length of an answer."""

    def sample(self, batch: Batch, forward_no_grad: ForwardNoGrad, seed: int, step: int) -> Batch:
        """Sample a group of answers for each prompt.

        A sampled token is a function of seed, step, prompt, position and the index of the answer
        in its group. It does not depend on the rank or the micro-batch that contains the prompt.

        Returns:
            Batch of ``objective.answers`` sequences per prompt, with their ``reward`` and
            ``advantage``.
        """
        group_size = self.objective.answers
        repeated = {
            key: batch[key].repeat_interleave(group_size, 0) for key in ("inputs", "labels")
        }
        prompts_BP = repeated["inputs"][:, : 1 - self.data.answer_length or None].cpu().numpy()
        index_B = np.arange(len(prompts_BP)) % group_size
        key_B = np.full(len(prompts_BP), (seed << 32) + step, dtype=np.uint64)
        for column_B in (index_B, *prompts_BP.T):
            key_B = splitmix64(key_B ^ splitmix64(column_B.astype(np.uint64)))

        def sample_token(logits_BV: Tensor, position: int) -> Tensor:
            uniform_B = splitmix64(key_B + np.uint64(position)).astype(np.float64) / 2.0**64
            cdf_BV = logits_BV.double().softmax(-1).cumsum(-1)
            below_BV = cdf_BV <= torch.from_numpy(uniform_B).to(cdf_BV.device)[:, None]
            return below_BV.sum(1).clamp(max=cdf_BV.shape[1] - 1)

        answers = self._generate(repeated, forward_no_grad, sample_token)
        return {**answers, "advantage": compute_advantages(self.objective, answers["reward"])}

    def generate_greedy(self, batch: Batch, forward_no_grad: ForwardNoGrad) -> Batch:
        """Greedily decoded answer to each prompt, and its reward."""
        answers = self._generate(
            batch, forward_no_grad, lambda logits_BV, position: logits_BV.argmax(-1)
        )
        return {**answers, "advantage": torch.zeros_like(answers["reward"])}

    def _generate(
        self,
        batch: Batch,
        forward_no_grad: ForwardNoGrad,
        choose_token: Callable[[Tensor, int], Tensor],
    ) -> Batch:
        inputs_BT, labels_BT = batch["inputs"].clone(), batch["labels"].clone()
        tokens = labels_BT.shape[1]
        first = tokens - self.data.answer_length
        for position in range(first, tokens):
            partial = {"inputs": inputs_BT, "labels": labels_BT}
            logits_BV = forward_no_grad(NextToken(position=position), partial)
            token_B = choose_token(logits_BV, position)
            padding_B = labels_BT[:, position] == IGNORED
            labels_BT[:, position] = token_B.masked_fill(padding_B, IGNORED)
            if position + 1 < tokens:
                inputs_BT[:, position + 1] = token_B
        correct_BA = labels_BT[:, first:] == batch["labels"][:, first:]
        reward_B = correct_BA.float().mean(1)
        return {"inputs": inputs_BT, "labels": labels_BT, "reward": reward_B}
