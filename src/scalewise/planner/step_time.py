"""How long a step takes: operators over the device's rates, messages over its links.

A roofline (Williams et al., 2009): a product takes its flops over the rate that products reach, a
pointwise operator its bytes over the memory's bandwidth. Where a profile does not say how long a
launch takes, models of few features run slower than said here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from scalewise.activation_checkpointing import Recompute
from scalewise.hardware import DeviceKind
from scalewise.models.op_graph import ModelOpGraphs, Op, OpGraph, OpWork
from scalewise.parallelism.communication import Collective, CollectiveKind
from scalewise.parallelism.mesh import AXES
from scalewise.parallelism.ring_cost import RingLink
from scalewise.planner import host_transfer
from scalewise.planner.activation_liveness import selective_ops
from scalewise.planner.liveness_cache import model_op_graphs
from scalewise.units import GIGA, MICRO

if TYPE_CHECKING:
    from scalewise.hardware import Hardware
    from scalewise.parallelism.rank_memory import RankMemory
    from scalewise.run_config import RunConfig

HIDDEN_SHARE = 0.8
"""Part of a block's arithmetic under which its messages can hide: the rest waits for the first."""


@dataclass(frozen=True)
class DeviceRates:
    """What a device reaches: flop/s in products and in attention, bytes/s of its memory."""

    products: float
    products_fp8: float
    attention: float
    memory: float
    launch: float
    """Seconds in which the host starts one operator."""

    def seconds(self, work: OpWork, flops: float, moved: float) -> float:
        """Returns the time of an operator; 0 where there is none."""
        if work is OpWork.message or not moved:
            return 0.0
        rates = {OpWork.attention: self.attention, OpWork.product_fp8: self.products_fp8}
        rate = rates.get(work, self.products)
        return max(flops / rate, moved / self.memory, self.launch)


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step on the slowest rank, by what they go into."""

    products: float
    attention: float
    pointwise: float
    recompute: float
    optimizer: float
    messages: dict[str, float]
    """Seconds of messages that nothing hides, by the axes that they cross."""
    hidden: float
    """Seconds of messages under the arithmetic."""
    bubble: float
    """Seconds for which a pipeline's ranks wait for the first and the last piece."""
    rows: float = 0.0
    """Seconds in which the loader gathers rows, before each micro batch."""
    copies: float = 0.0
    """Seconds of copies off the device and back that nothing hides."""
    reference: float = 0.0
    """Seconds of passes forward alone: a reference is asked, or answers are written."""

    @property
    def seconds(self) -> float:
        """Returns their sum; what is hidden takes none."""
        busy = self.products + self.attention + self.pointwise + self.recompute + self.reference
        waits = sum(self.messages.values()) + self.bubble + self.rows + self.copies
        return busy + self.optimizer + waits

    def times(self, factor: float) -> StepTime:
        """Returns a step of which every part takes ``factor`` times as long."""
        messages = {axes: seconds * factor for axes, seconds in self.messages.items()}
        others = {
            entry.name: getattr(self, entry.name) * factor
            for entry in fields(self)
            if entry.name != "messages"
        }
        return StepTime(messages=messages, **others)

    def parts(self) -> dict[str, float]:
        """Returns seconds by what they go into, the largest first."""
        named = {
            "products": self.products,
            "attention": self.attention,
            "pointwise": self.pointwise,
            "recompute": self.recompute,
            "reference": self.reference,
            "optimizer": self.optimizer,
            "bubble": self.bubble,
            "loading rows": self.rows,
            "copies off the device and back": self.copies,
            **{f"messages along {axes}": seconds for axes, seconds in self.messages.items()},
        }
        return dict(sorted(named.items(), key=lambda item: -item[1]))


def device_rates(run: RunConfig) -> DeviceRates | None:
    """Returns what a rank reaches in the run's precision; None where a figure is missing."""
    hardware, kind = run.hardware, run.precision.peak_kind
    peak, products = hardware.peak_flops(kind), hardware.product_flops(kind)
    if not peak or not products or not hardware.memory_gb_per_s:
        return None
    ranks = run.world_size if hardware.device is DeviceKind.cpu else 1  # on one processor
    return DeviceRates(
        products / ranks,
        (hardware.product_flops("fp8") or products) / ranks,  # else emulated
        peak * hardware.attention_share / ranks,
        hardware.memory_gb_per_s * GIGA * hardware.bandwidth_share / ranks,
        hardware.launch_us * MICRO,
    )


def predict_step_time(run: RunConfig) -> StepTime | None:
    """Returns the time of a step on the slowest rank; None where the profile lacks a figure."""
    reached = device_rates(run)
    if reached is None:
        return None
    ranks = run.parallelism.unlike_ranks(run)
    slowest = max(
        (_rank_step_time(run, rank, reached) for rank in ranks), key=lambda step: step.seconds
    )
    return slowest.times(run.hardware.step_scale)


def _rank_step_time(run: RunConfig, rank: int, reached: DeviceRates) -> StepTime:
    holds = run.parallelism.holds(run, rank)
    tapes = model_op_graphs(run.model, holds.shape)
    passes = run.accumulation * holds.pieces
    spent = dict.fromkeys(OpWork, 0.0)
    for tape, count in _rank_parts(tapes, holds):
        for operator in tape.operators:
            spent[operator.work] += (
                passes * count * _forward_backward_seconds(tape, operator, reached)
            )
    recompute = passes * _part_recompute_seconds(
        tapes.block, Counter(run.memory.of_parts(holds.parts)), reached
    )
    reference = passes * run.passes_asked * _reference_seconds(holds, run, reached)
    host = host_transfer.transfer_seconds(run, holds)
    optimizer = host.stepping
    if not holds.states_on_host or run.hardware.device is DeviceKind.cpu:
        # Weights and state are read and written, gradients read, and once before for their norm.
        stepped = holds.numbers(holds.states, trained=True) * run.precision.parameters.bytes
        optimizer += (stepped * (2 + 2) + 2 * holds.state_bytes(run)) / reached.memory
    arithmetic = sum(spent.values()) + recompute + reference
    messages, hidden = _collective_seconds(run, rank, arithmetic)
    beside = host.stepping if holds.streamed else HIDDEN_SHARE * arithmetic - hidden
    copies = max(0.0, host.copies - beside) + host.activations
    rounds = holds.pieces * len(holds.parts)
    bubble = (arithmetic + sum(messages.values())) * (holds.places - 1) / rounds
    return StepTime(
        spent[OpWork.product] + spent[OpWork.product_fp8],
        spent[OpWork.attention],
        spent[OpWork.pointwise],
        recompute,
        optimizer,
        messages,
        hidden,
        bubble,
        _loader_seconds(run),
        copies,
        reference,
    )


def _rank_parts(tapes: ModelOpGraphs, holds: RankMemory) -> list[tuple[OpGraph, int]]:
    """Returns what a rank runs in a pass, and how often."""
    ends = [tape for tape in (tapes.last, tapes.loss) if tape is not None and holds.last]
    return [(tapes.block, holds.layers), *((end, 1) for end in ends)]


def _reference_seconds(holds: RankMemory, run: RunConfig, reached: DeviceRates) -> float:
    """Returns the seconds of a pass forward through the model without its adapter."""
    tapes = model_op_graphs(run.model, replace(holds.shape, adapted=()))
    return sum(
        count * _forward_seconds(tape, operator, reached)
        for tape, count in _rank_parts(tapes, holds)
        for operator in tape.operators
    )


def _loader_seconds(run: RunConfig) -> float:
    """Returns the seconds in which a rank's loader makes its rows of a step."""
    rate = run.hardware.loader_tokens_per_s
    return run.tokens_per_step / run.parallelism.data_parallel_size / rate if rate else 0.0


def _forward_backward_seconds(tape: OpGraph, operator: Op, reached: DeviceRates) -> float:
    written = tape.moved(operator.gradients) + sum(operator.weight)
    back = _moved_bytes(tape, operator) + written if operator.gradients or operator.weight[0] else 0
    casts = reached.seconds(OpWork.pointwise, 0.0, operator.casts[1])
    backward = reached.seconds(operator.work, operator.backward_flops, back) + casts
    return _forward_seconds(tape, operator, reached) + backward


def _forward_seconds(tape: OpGraph, operator: Op, reached: DeviceRates) -> float:
    casts = reached.seconds(OpWork.pointwise, 0.0, operator.casts[0])
    return reached.seconds(operator.work, operator.flops, _moved_bytes(tape, operator)) + casts


def _moved_bytes(tape: OpGraph, operator: Op) -> int:
    return tape.moved((*operator.reads, *operator.writes))


def recompute_seconds(run: RunConfig, reached: DeviceRates) -> float:
    """Returns the seconds that the model's blocks compute again in one pass."""
    block = model_op_graphs(run.model, run.parallelism.holds(run, 0).shape).block
    return _part_recompute_seconds(block, run.memory.of_model(run.model.layers), reached)


def _part_recompute_seconds(
    tape: OpGraph, blocks: Counter[Recompute], reached: DeviceRates
) -> float:
    return sum(
        count * _forward_seconds(tape, operator, reached)
        for recompute, count in blocks.items()
        for operator in _recomputed_ops(tape, recompute)
    )


def _recomputed_ops(tape: OpGraph, recompute: Recompute) -> Iterator[Op]:
    if recompute is Recompute.nothing:
        return
    kept = selective_ops(tape) if recompute is Recompute.selective else frozenset()
    yield from (op for op in tape.operators if op.writes[0] not in kept)


def _collective_seconds(
    run: RunConfig, rank: int, arithmetic: float
) -> tuple[dict[str, float], float]:
    """Returns the seconds of messages that nothing hides, by axes, and of those hidden.

    Weights and gradients travel while blocks are at work; activations are waited for.
    """
    exposed: dict[str, float] = {}
    hideable: dict[str, float] = {}
    for message in run.parallelism.collectives(run, rank):
        seconds = message.count * _message_seconds(run, message)
        every = set(message.axes) == set(AXES)
        cut = [axis for axis in message.axes if run.parallelism.group((axis,), None)[0] > 1]
        name = "the whole mesh" if every else " and ".join(cut or message.axes)
        kind = hideable if message.hides else exposed
        kind[name] = kind.get(name, 0.0) + seconds
    room = HIDDEN_SHARE * arithmetic
    hidden = 0.0
    for name, seconds in hideable.items():
        under = min(seconds, room)
        room, hidden = room - under, hidden + under
        exposed[name] = exposed.get(name, 0.0) + seconds - under
    return {name: seconds for name, seconds in exposed.items() if seconds}, hidden


def _message_seconds(run: RunConfig, message: Collective) -> float:
    """Returns the seconds of one message over the slowest link that it crosses."""
    size, crosses = run.parallelism.group(message.axes, run.hardware.devices_per_node)
    if size == 1 and message.kind is not CollectiveKind.send:
        return 0.0
    return slowest_link(run.hardware, crosses=crosses).seconds(message.kind, size, message.bytes)


def slowest_link(hardware: Hardware, *, crosses: bool) -> RingLink:
    """Returns the link within a node, or between nodes; endless where the profile has none."""
    bandwidth, latency = hardware.link_gb_per_s, hardware.link_latency_us
    if crosses:
        bandwidth = hardware.node_link_gb_per_s or bandwidth
        latency = hardware.node_link_latency_us or latency
    return RingLink((latency or 0.0) * MICRO, (bandwidth or float("inf")) * GIGA)
