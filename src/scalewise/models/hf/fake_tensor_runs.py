"""The parts of a model as they run, with no memory behind their tensors: what plans count with."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, cast

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from scalewise.activation_checkpointing import FixedCheckpointing, Recompute
from scalewise.adapters.config import AdapterConfig, NoAdapterConfig
from scalewise.adapters.ia3_config import IA3AdapterConfig
from scalewise.adapters.lora_config import DoRAAdapterConfig, LoRAAdapterConfig
from scalewise.hardware import DeviceKind
from scalewise.measure.memory import LiveBytes
from scalewise.measure.storages import storage_bytes
from scalewise.models import cross_entropy
from scalewise.models.base import StageSlice
from scalewise.models.decoder.linear_ops import LinearOps
from scalewise.models.hf.causal_lm import CausalLMModule
from scalewise.models.hf.non_block_parts import (
    CountedLeaf,
    CountingBlock,
    NonBlockParts,
    Sizes,
    TensorKind,
    count_backward,
    drop_gradients,
    gradient_bytes,
)
from scalewise.models.hf.op_recorder import OpRecorder
from scalewise.models.hf.tp_shard_fake import shard_for_rank
from scalewise.models.op_graph import (
    BackwardMode,
    ForwardSpec,
    ModelOpGraphs,
    OpGraph,
    RecordedPart,
)
from scalewise.objectives import CausalLM
from scalewise.precision.fp8 import Float8
from scalewise.quantization.bitsandbytes_config import NF4Config
from scalewise.quantization.qat import QAT8da4wConfig, QATInt4Config

if TYPE_CHECKING:
    from scalewise.models.hf.config import HuggingFaceConfig

FRESH = BackwardMode(Recompute.nothing, fresh_gradients=True)
NUMBERS = {4: torch.float32, 2: torch.bfloat16}
"""Formats by their bytes: fp16 takes what bf16 does."""
ONE = StageSlice(range(1))


def fake_op_graphs(spec: HuggingFaceConfig, forward_spec: ForwardSpec) -> ModelOpGraphs:
    """Returns the parts of a model, each of which runs when it is asked for."""
    player = FakeTensorRunner(spec, forward_spec)
    ends, (block, last, loss) = player.run_non_block_parts(FRESH), player.record_operators()
    return ModelOpGraphs(
        embedding=RecordedPart(measure=lambda way: player.run_non_block_parts(way).embedding),
        first_block=_run_part(
            block, lambda way: player.run_block(way, input_requires_grad=ends.x.requires_grad)
        ),
        block=_run_part(block, lambda way: player.run_block(way, input_requires_grad=True)),
        head=_run_part(last, lambda way: player.run_non_block_parts(way).head),
        loss=player.build_loss_graph(loss),
        shared_bytes=ends.shared_bytes,
    )


def _run_part(graph: OpGraph, measure: Callable[[BackwardMode], Sizes]) -> RecordedPart:
    return RecordedPart(
        sizes=graph.sizes,
        requires_grad=graph.requires_grad,
        operators=graph.operators,
        measure=measure,
    )


class FakeTensorRunner:
    """Runs parts of a model on the CPU, under ``FakeTensorMode``, in the formats of a pass."""

    def __init__(self, spec: HuggingFaceConfig, forward_spec: ForwardSpec) -> None:
        self.spec, self.forward_spec = spec, forward_spec
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.uses_chunked_loss = 0 < forward_spec.loss_chunk < forward_spec.num_tokens
        self.objective = CausalLM(
            loss_chunk=forward_spec.loss_chunk if self.uses_chunked_loss else None
        )
        self.run_non_block_parts = cache(self._run_non_block_parts)

    def _build_module(
        self, backward_mode: BackwardMode, *, in_forward: bool = False
    ) -> CausalLMModule:
        """Returns the ends of the model and one block, alive in the mode."""
        module = self.spec.build_meta(ONE)
        if self.forward_spec.packed_layers:  # whatever packs: what is unpacked is as large
            NF4Config(double=self.forward_spec.scale_bytes > 0).apply(module, self.spec)
        if self.forward_spec.fp8_layers:
            self._convert_to_fp8(module)
        if self.forward_spec.fake_quantized_layers:
            rounding = QAT8da4wConfig if self.forward_spec.rounds_inputs else QATInt4Config
            rounding(group=self.forward_spec.quantization_group).apply(module, self.spec)
        self._build_adapter_config().apply(module, self.spec)
        if self.forward_spec.tensor_ranks > 1:
            shard_for_rank(module, self.spec.tensor_parallel_styles(), self.forward_spec)
        self.objective.apply(module, in_forward=in_forward)
        FixedCheckpointing(backward_mode.recompute, offload=backward_mode.offload).apply(
            module, ONE
        )
        with self.fake_mode, torch.no_grad():
            for owner in module.modules():
                for name, parameter in owner._parameters.items():
                    if parameter is not None:
                        owner._parameters[name] = self._materialize(parameter, backward_mode)
                for name, buffer in owner._buffers.items():
                    owner._buffers[name] = None if buffer is None else torch.empty_like(buffer)
        return module

    def _convert_to_fp8(self, module: CausalLMModule) -> None:
        """Puts torchao's layers in the place of those that multiply in 8 bits, as on the CPU.

        On CUDA they cast what they read first, as autocast would.
        """
        Float8().apply(module, self.spec, DeviceKind.cpu)
        if self.forward_spec.autocast and not self.forward_spec.on_cpu:
            for block, name in product(module.layers(), self.forward_spec.fp8_layers):
                layer = block.get_submodule(name)
                layer.register_forward_pre_hook(lambda _, given: (given[0].to(torch.bfloat16),))

    def _materialize(self, parameter: nn.Parameter, backward_mode: BackwardMode) -> nn.Parameter:
        held = (
            NUMBERS[self.forward_spec.gradient_element_bytes]
            if parameter.is_floating_point()
            else parameter.dtype
        )
        empty = torch.empty(parameter.shape, dtype=held)
        made = nn.Parameter(empty, parameter.requires_grad)
        if made.requires_grad and not backward_mode.fresh_gradients:
            made.grad = torch.empty_like(made)
        if made.requires_grad and backward_mode.step_scratch_ratio >= 0:
            made.register_post_accumulate_grad_hook(
                partial(drop_gradients, backward_mode.step_scratch_ratio)
            )
        return made

    def _build_adapter_config(self) -> AdapterConfig:
        """Returns an adapter of the same shapes: what it begins with makes no difference."""
        run = self.forward_spec
        whole = tuple(map(re.escape, run.fully_trained_modules))
        if run.scaled_layers:
            return IA3AdapterConfig(targets=tuple(map(re.escape, run.scaled_layers)), trained=whole)
        if not run.adapted_layers:
            return NoAdapterConfig()
        kind = DoRAAdapterConfig if run.has_magnitudes else LoRAAdapterConfig
        targets = tuple(map(re.escape, run.adapted_layers))
        return kind(
            rank=run.adapter_rank, dropout=run.adapter_dropout, targets=targets, trained=whole
        )

    def _forward_context(self) -> AbstractContextManager[object]:
        """Returns the context of a forward pass."""
        mixed = MixedPrecision("bf16-mixed", "cpu")
        return mixed.forward_context() if self.forward_spec.autocast else nullcontext()

    def _empty_batch(self) -> tuple[Tensor, Tensor]:
        """Returns tokens and labels."""
        shape = (self.forward_spec.sequences, self.forward_spec.tokens_per_sequence)
        return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)

    def run_block(self, backward_mode: BackwardMode, *, input_requires_grad: bool) -> Sizes:
        """Returns what a block holds; ``input_requires_grad``: whether something before it is."""
        ends, module = self.run_non_block_parts(FRESH), self._build_module(backward_mode)
        (block,) = module.layers()
        with self.fake_mode:
            leaf = ends.x.empty_leaf(requires_grad=input_requires_grad)
        with self.fake_mode, LiveBytes() as live:
            x = leaf.clone()
            with self._forward_context():
                y = block(x, *ends.arguments, **ends.keywords)
            forward = live.take_peak()
            del x
            kept, end = live.current_bytes - storage_bytes([y]), [CountedLeaf.apply(y)]  # type: ignore[no-untyped-call]  # torch's own
            del y
            return (
                kept,
                forward,
                count_backward(end, live),
                gradient_bytes(module) * backward_mode.fresh_gradients,
            )

    def build_loss_graph(self, recorded: OpGraph) -> OpGraph | None:
        """Returns the part that is the loss, unless it is taken in pieces with the logits.

        What torch makes of logits that tensor ranks share out is not played.
        """
        if self.uses_chunked_loss:
            return None
        if self.forward_spec.loss_parallel:
            return cross_entropy.cross_entropy_ops(self.forward_spec, self.spec.output_size)
        return _run_part(recorded, lambda *_: self.run_loss())

    def run_loss(self) -> Sizes:
        """Returns what the loss holds."""
        with self.fake_mode:
            leaf, (_, labels) = (
                self.run_non_block_parts(FRESH).logits.empty_leaf(requires_grad=True),
                self._empty_batch(),
            )
        with self.fake_mode, LiveBytes() as live:
            logits = leaf.clone()
            end = [self.objective.sum_over_tokens(logits, labels)]
            forward = live.take_peak()
            del logits
            return live.current_bytes, forward, count_backward(end, live), 0

    def _run_non_block_parts(self, backward_mode: BackwardMode) -> NonBlockParts:
        """Runs what stands before the blocks and after them, around a block that does nothing."""
        in_forward = self.forward_spec.loss_in_forward
        module = self._build_module(backward_mode, in_forward=in_forward)
        before, after = LiveBytes(), LiveBytes()
        between = CountingBlock(before, after)
        module.set_layers([between])
        with self.fake_mode:
            tokens, labels = self._empty_batch()
            before.__enter__()  # type: ignore[no-untyped-call]  # torch lacks the annotation
            with self._forward_context():
                out = module(tokens, labels if self.uses_chunked_loss else None)
            logits = TensorKind.from_tensor(out)
            forward = after.take_peak()
            kept = after.current_bytes - storage_bytes([out])
            end = [out if self.uses_chunked_loss else CountedLeaf.apply(out)]  # type: ignore[no-untyped-call]  # torch's own
            del out
            most = count_backward(end, after)
            after.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
            last = (kept, forward, most, gradient_bytes(module) * backward_mode.fresh_gradients)
            if backward_mode.fresh_gradients:
                module.zero_grad()
            return between.build_parts(
                before, last, logits, module, fresh_gradients=backward_mode.fresh_gradients
            )

    def _build_linear_writer(self, layer: nn.Linear) -> Callable[[LinearOps, int], int]:
        """Returns what writes the product of a layer that casts or rounds what it multiplies."""
        (out, into), bias = layer.weight.shape, layer.bias is not None
        if self.forward_spec.fp8_layers:
            return lambda products, x: products.add_fp8_linear(x, into, out, (), bias=bias)
        return lambda products, x: products.add_fake_quantized_linear(x, into, out, ())

    def record_operators(self) -> tuple[OpGraph, OpGraph, OpGraph]:
        """Returns the operators of a block, of what comes after all blocks, and of the loss."""
        module = self._build_module(FRESH)
        (block,) = module.layers()
        module.set_layers([block])
        counted = OpRecorder(self.forward_spec)
        for name in self.forward_spec.fp8_layers + self.forward_spec.fake_quantized_layers:
            layer = cast(nn.Linear, block.get_submodule(name))
            counted.replace_layer_ops(layer, self._build_linear_writer(layer))
        with self.fake_mode:
            tokens, labels = self._empty_batch()
            with self._forward_context(), counted:
                block.register_forward_pre_hook(
                    lambda _, given: counted.begin_part("block", given[:1])
                )
                block.register_forward_hook(lambda _, __, out: counted.begin_part("last", (out,)))
                out = module(tokens, labels if self.uses_chunked_loss else None)
                counted.begin_part("loss", (out,))
                if not self.uses_chunked_loss:
                    self.objective.sum_over_tokens(out, labels)
        return counted.graphs["block"], counted.graphs["last"], counted.graphs["loss"]
