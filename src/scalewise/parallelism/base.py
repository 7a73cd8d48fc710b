"""What every layout answers: how many ranks, who reads which rows, and the real strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Self

from scalewise.config.registry import option_name
from scalewise.errors import ConfigIssue
from scalewise.hardware import DeviceKind

if TYPE_CHECKING:
    from scalewise.parallelism.communication import Collective
    from scalewise.parallelism.rank_memory import RankMemory
    from scalewise.run_config import RunConfig
    from scalewise.strategies.base import ParallelStrategy

DEFAULT_CPU_RANKS = 2
"""Size of an axis on the CPU when none is asked for: the least that is parallel."""


class ParallelismConfig(ABC):
    """A layout as a spec."""

    supports_optimizer_sharding = False
    """Whether ``optimizer.shard`` has replicas to share the state out over."""
    supports_optimizer_offload = False
    """Whether ``optimizer.offload`` steps in host memory; others offload in a way of theirs."""
    flattens_parameters = False
    """Whether the optimizer is given weights as pieces of one long vector."""

    @property
    def reduces_after_backward(self) -> bool:
        """Returns whether a gradient is whole only after the pass backward."""
        return True

    @property
    def backward_follows_forward(self) -> bool:
        """Returns whether a pass goes backward before the next goes forward, with its weights."""
        return True

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Returns the number of processes, one device each."""

    @property
    def shards_parameters(self) -> bool:
        """Returns whether a rank steps pieces of matrices."""
        return self.flattens_parameters

    @property
    def has_gatherable_shards(self) -> bool:
        """Returns whether those pieces are shards on the device, which can be gathered."""
        return False

    @property
    def data_parallel_size(self) -> int:
        """Returns how many ranks see different rows."""
        return self.world_size

    def data_parallel_rank(self, rank: int) -> int:
        """Returns which of the ``data_parallel_size`` shares of the rows a rank reads."""
        return rank

    def dropout_rank(self, rank: int) -> int:
        """Returns a number that ranks share whose dropout draws the same masks."""
        return rank

    @property
    def gradient_averaging_size(self) -> int:
        """Returns over how many ranks the layout averages gradients when it reduces them."""
        return self.data_parallel_size

    @property
    def averaging_conflict(self) -> tuple[str, str] | None:
        """Returns why no callback can average the weights of this strategy, and a fix."""
        return None

    def resolve(self, devices: int | None) -> Self:
        """Returns the layout with the sizes left open filled in for ``devices`` devices.

        None is a CPU, which carries any number: an open size becomes ``DEFAULT_CPU_RANKS``.
        """
        return self

    def validate(self) -> Iterator[ConfigIssue]:
        """Yields sizes that are no layout."""
        yield from ()

    def validate_on_device(self, device: DeviceKind) -> Iterator[ConfigIssue]:
        """Yields what a kind of device lacks for this layout, whatever is trained."""
        yield from ()

    def validate_with(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields what this layout cannot do with the other parts of ``run``."""
        if run.optimizer.in_backward and self.reduces_after_backward:
            reason = "steps before the gradient is whole, which in this layout it is at the end"
            fix = "set optimizer.in_backward=false, or parallelism=fsdp"
            yield ConfigIssue("optimizer.in_backward", True, reason, fix)
        if run.optimizer.shard and not self.supports_optimizer_sharding:
            reason = "this layout has no replicas that could share the state out"
            fix = "set optimizer.shard=false, or parallelism=ddp"
            yield ConfigIssue("optimizer.shard", True, reason, fix)
        if run.optimizer.offload and not self.supports_optimizer_offload:
            reason = "steps whole weights in host memory, and this layout has a way of its own"
            own = "offload_optimizer=cpu" if self.flattens_parameters else "cpu_offload=true"
            fix = f"set optimizer.offload=false parallelism.{own}"
            yield ConfigIssue("optimizer.offload", True, reason, fix)
        gathered = run.optimizer.gathers_shards and self.has_gatherable_shards
        asks_whole = run.optimizer.uses_whole_weights and self.shards_parameters and not gathered
        if asks_whole or (self.flattens_parameters and not run.optimizer.elementwise):
            chosen = run.choices.get("optimizer", option_name(run.optimizer))
            reason = "steps whole weights, of which this layout gives a rank pieces"
            if not asks_whole:
                reason = "needs each weight by itself, and this layout steps them as one vector"
            better = "fsdp" if run.optimizer.gathers_shards else "ddp"
            fix = f"set optimizer=adamw, or parallelism={better}"
            yield ConfigIssue("optimizer", chosen, reason, fix)

    def collectives(self, run: RunConfig, rank: int = 0) -> tuple[Collective, ...]:
        """Returns what a rank sends in one optimizer step of ``run``."""
        return ()

    def describe_group(self, axes: Sequence[str], devices_per_node: int | None) -> tuple[int, bool]:
        """Returns how many ranks a message along ``axes`` joins, and whether it leaves a node."""
        ranks = self.world_size
        return ranks, devices_per_node is not None and ranks > devices_per_node

    def distinct_ranks(self, run: RunConfig) -> tuple[int, ...]:
        """Returns one rank of each kind that holds another share than the rest."""
        return (0,)

    @property
    def unmodeled_memory(self) -> str:
        """Returns what the memory ledger leaves out of this layout; empty: nothing to speak of."""
        return ""

    @abstractmethod
    def rank_memory(self, run: RunConfig, rank: int = 0) -> RankMemory:
        """Returns what a rank holds of ``run`` and works on."""

    def ranks_along(self, axes: Sequence[str], rank: int) -> tuple[int, ...]:
        """Returns the ranks that differ from ``rank`` along ``axes`` alone, itself among them."""
        return tuple(range(self.world_size))

    def validate_machine(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yields what the present machine lacks for this layout of ``run``."""
        yield from ()

    def prepare(self, run: RunConfig) -> None:  # noqa: B027 (few layouts need anything)
        """Makes, before there are ranks, what all of them need."""

    @abstractmethod
    def build_strategy(self, device: DeviceKind) -> ParallelStrategy:
        """Returns the Lightning strategy for a kind of device, in one of the ranks' processes."""
