"""Memory of the passes of one micro-batch through a stage whose backward is split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from scalewise.memory_config import ActivationCheckpointing
from scalewise.models.base import ModelConfig, StageSlice
from scalewise.models.op_graph import ForwardSpec, SavedOn
from scalewise.planner.activation_liveness import model_op_graphs
from scalewise.planner.memory_breakdown import StepPhase
from scalewise.planner.split_backward_liveness import (
    HEAD,
    LOSS,
    SplitPartLiveness,
    split_part_liveness,
)
from scalewise.planner.split_schedule import PassKind
from scalewise.planner.step_liveness import StepLiveness, step_liveness

PhaseBytes = Mapping[StepPhase, int]


@dataclass(frozen=True)
class StageMemory:
    """Memory of the passes through one stage, in bytes; receive buffers are not included."""

    waiting_bytes: int
    """Tensors of a micro-batch between its forward and its input backward."""
    deferred_bytes: int
    """Tensors of a micro-batch between its input backward and its weight backward."""
    input_gradient_bytes: int
    """Gradient of the input, which torch keeps until the next step; 0 if it is a receive buffer."""
    sent_output_bytes: int
    """Output that another rank receives; gloo keeps it until the schedule ends."""
    gradient_bytes: int
    """Gradients of all weights of the stage."""
    peaks: Mapping[tuple[PassKind, bool], PhaseBytes]
    """Peak of a pass by phase, above the bytes before it; by kind of pass and whether the weights
    have no gradient yet."""


@lru_cache(maxsize=4096)
def stage_memory(
    model: ModelConfig,
    memory: ActivationCheckpointing,
    stage: StageSlice,
    forward_spec: ForwardSpec,
    saved_on: SavedOn,
    last_gather_bytes: int,
    *,
    has_local_next: bool,
    has_local_previous: bool,
) -> StageMemory:
    """Return the memory of the passes through a stage.

    Args:
        model: Model.
        memory: Activation checkpointing.
        stage: Pipeline stage.
        forward_spec: Sizes and formats of a forward pass.
        saved_on: Memory of saved tensors between forward and backward.
        last_gather_bytes: Size of the last all-gather buffer of a forward pass.
        has_local_next: Whether the next stage is on the same rank, so that its receive buffers are
            the outputs of this stage.
        has_local_previous: The same of the previous stage and of the gradients of the inputs.
    """
    passes = _StagePasses(model, memory, stage, forward_spec, saved_on)
    deferred = passes.waiting_bytes
    if not stage.is_first:
        deferred = passes.deferred_bytes()
    output = passes.output_bytes
    peaks: dict[tuple[PassKind, bool], PhaseBytes] = {}
    for fresh in (True, False):
        peaks[PassKind.forward, fresh] = passes.forward_peaks(last_gather_bytes)
        peaks[PassKind.input_backward, fresh] = {} if stage.is_first else passes.input_peaks()
        peaks[PassKind.weight_backward, fresh] = (
            passes.full_backward_peaks(fresh_gradients=fresh)
            if stage.is_first
            else passes.weight_peaks(fresh_gradients=fresh)
        )
    return StageMemory(
        passes.waiting_bytes - output * has_local_next,
        deferred - output * has_local_next,
        0 if stage.is_first or has_local_previous else passes.residual_bytes,
        0 if stage.is_last or has_local_next else output,
        passes.gradient_bytes,
        peaks,
    )


class _StagePasses:
    """Passes of one micro-batch through a stage; see ``stage_memory``."""

    def __init__(
        self,
        model: ModelConfig,
        memory: ActivationCheckpointing,
        stage: StageSlice,
        forward_spec: ForwardSpec,
        saved_on: SavedOn,
    ) -> None:
        self._model, self._forward_spec, self._stage = model, forward_spec, stage
        self._liveness: dict[bool, StepLiveness] = {
            fresh: step_liveness(model, memory, (stage,), forward_spec, saved_on, fresh, -1)
            for fresh in (True, False)
        }
        op_graphs, liveness = model_op_graphs(model, forward_spec), self._liveness[False]
        self.residual_bytes = self.output_bytes = op_graphs.block.sizes[0]
        if stage.is_last and op_graphs.loss:
            self.output_bytes = op_graphs.loss.sizes[0]
        self._embedding, self._head, self._loss = liveness.non_blocks
        self._shared_bytes = op_graphs.shared_bytes
        self._blocks_bytes = liveness.cumulative_saved_bytes[-1]
        self._received_bytes = self.residual_bytes * (not stage.is_first and not memory.offload)
        """Input in a receive buffer, which the saved tensors of the first block include."""
        self._before_head = self._blocks_bytes - self._received_bytes + self._shared_bytes
        self._before_head += self._embedding.saved_bytes
        self.waiting_bytes = self._before_head + self._head.saved_bytes + self._loss.saved_bytes
        self.waiting_bytes += self.output_bytes
        non_blocks = [HEAD] if stage.is_last else []
        self._parts = [*stage.layers, *non_blocks]
        self._has_loss = stage.is_last and op_graphs.loss is not None

    @property
    def gradient_bytes(self) -> int:
        """Gradients of all weights of the stage."""
        gradients = self._liveness[True].gradients
        return gradients.cumulative[-1] + gradients.embedding + gradients.head

    def forward_peaks(self, last_gather_bytes: int) -> PhaseBytes:
        """Peaks of a forward pass."""
        head, blocks_peak = self._head, self._liveness[False].forward_peak
        peaks = {StepPhase.forward: self._before_head - self._blocks_bytes + blocks_peak}
        if self._stage.is_last:
            head_peak = head.forward_peak - head.saved_bytes + last_gather_bytes
            peaks[StepPhase.loss] = (
                self._before_head + head.saved_bytes + max(head_peak, self._loss.forward_peak)
            )
        return peaks

    def input_peaks(self) -> PhaseBytes:
        """Peaks of an input backward, which computes no gradient of a weight."""
        retained, peaks = 0, dict[StepPhase, int]()
        received = 0 if self._stage.is_last else self.residual_bytes  # gradient of the output
        for part in reversed([*self._parts, *[LOSS] * self._has_loss]):
            liveness = self._split_part(part)
            phase = self._phase(part)
            peaks[phase] = max(peaks.get(phase, 0), retained + liveness.input_peak - received)
            retained += liveness.retained_bytes
            retained += max(0, liveness.retained_output_bytes - received)
            received = 0
        return peaks

    def deferred_bytes(self) -> int:
        """Tensors of a micro-batch between both backward passes: its graph and gradients."""
        total, keeps_all = 0, False
        received = 0 if self._stage.is_last else self.residual_bytes
        for part in reversed(self._parts):
            liveness = self._split_part(part, keeps_all=keeps_all)
            total += liveness.kept_bytes + liveness.retained_bytes
            total += max(0, liveness.retained_output_bytes - received)
            if part == self._parts[0] and liveness.keeps_input:
                total -= self._received_bytes
            keeps_all, received = keeps_all or liveness.has_weights, 0
        output = 0 if self._stage.is_last else self.output_bytes
        return total + self._shared_bytes + output

    def weight_peaks(self, *, fresh_gradients: bool) -> PhaseBytes:
        """Peaks of a weight backward, which runs from the first weight of the stage to the last."""
        current, peaks = 0, dict[StepPhase, int]()
        for part in self._parts:
            liveness = self._split_part(part, fresh_gradients=fresh_gradients)
            phase = self._phase(part)
            peaks[phase] = max(peaks.get(phase, 0), current + liveness.weight_peak)
            current += liveness.weight_change
        return peaks

    def full_backward_peaks(self, *, fresh_gradients: bool) -> PhaseBytes:
        """Peaks of the backward of the first stage, which torch runs as a whole."""
        liveness, peaks = self._liveness[fresh_gradients], dict[StepPhase, int]()
        saved, gradients = liveness.cumulative_saved_bytes, liveness.cumulative_gradient_bytes
        received = self.residual_bytes
        for index, layer in reversed([*enumerate(self._stage.layers)]):
            running = saved[index] + liveness.blocks[index].backward_peak - received
            running += gradients[len(liveness.blocks) - 1 - index] - saved[-1]
            phase = self._phase(layer)
            peaks[phase] = max(peaks.get(phase, 0), running)
            received = 0
        peaks[StepPhase.backward_embedding] = (
            liveness.non_blocks[0].backward_peak + gradients[-1] - self._before_head
        )
        return peaks

    def _split_part(
        self, part: int, *, fresh_gradients: bool = False, keeps_all: bool = True
    ) -> SplitPartLiveness:
        if part >= 0:
            part = model_op_graphs(self._model, self._forward_spec).equal_layer(part)
        return split_part_liveness(
            self._model,
            self._forward_spec,
            part,
            fresh_gradients=fresh_gradients,
            keeps_all=keeps_all,
        )

    def _phase(self, part: int) -> StepPhase:
        """Return the phase of the backward of a part."""
        layers = self._stage.layers
        if part in (HEAD, LOSS):
            return StepPhase.backward_head if part == HEAD else StepPhase.backward_loss
        if part == layers[-1]:
            return StepPhase.backward_last
        return StepPhase.backward_first if part == layers[0] else StepPhase.backward_next
