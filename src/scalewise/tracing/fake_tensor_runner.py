"""Runs of parts of Hugging Face models on fake tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import product
from typing import cast

import torch
from torch import Tensor, nn

from scalewise.adapters.build import apply_adapter
from scalewise.adapters.config import AdapterConfig, NoAdapterConfig
from scalewise.adapters.ia3_config import IA3AdapterConfig
from scalewise.adapters.lora_config import DoRAAdapterConfig, LoRAAdapterConfig
from scalewise.hardware import DeviceKind
from scalewise.measure.allocated_bytes import LiveBytes
from scalewise.memory_config import FixedCheckpointing
from scalewise.models.base import StageSlice
from scalewise.models.build import build_meta
from scalewise.models.hf.causal_lm import CausalLMModule
from scalewise.models.hf.config import HuggingFaceConfig
from scalewise.models.linear_ops import LinearOps
from scalewise.models.loss_ops import cross_entropy_ops
from scalewise.models.op_graph import (
    BackwardMode,
    ForwardSpec,
    OpGraph,
    Recompute,
    RecordedPart,
    SavedOn,
)
from scalewise.objectives import CausalLM
from scalewise.objectives.losses import set_chunked_loss, sum_over_tokens
from scalewise.precision.build import apply_precision
from scalewise.precision.config import Float8, LightningPrecision
from scalewise.quantization.build import apply_quantization
from scalewise.quantization.config import NF4Config, QAT8da4wConfig, QATInt4Config
from scalewise.strategies.activation_checkpointing import apply_checkpointing
from scalewise.tracing.cuda_kernels import cuda_kernels
from scalewise.tracing.fake_tensors import fake_tensor_mode, precision_plugin, replace_tensors
from scalewise.tracing.op_recorder import (
    CountingBlock,
    NonBlockParts,
    OpRecorder,
    Sizes,
    TensorKind,
    count_backward,
    drop_gradients,
    first_tensor,
    measure_part,
)
from scalewise.tracing.tensor_parallel_shard import shard_for_rank, shard_tokens

FRESH = BackwardMode(Recompute.nothing, fresh_gradients=True)
DTYPES = {4: torch.float32, 2: torch.bfloat16}
"""Dtype by bytes per element; bf16 also stands for fp16, which has the same size."""
ONE_LAYER = StageSlice(range(1))


def measured_part(graph: OpGraph, measure: Callable[[BackwardMode], Sizes]) -> RecordedPart:
    """Return a part with the operators of ``graph`` whose memory ``measure`` returns."""
    return RecordedPart(
        sizes=graph.sizes,
        requires_grad=graph.requires_grad,
        operators=graph.operators,
        measure=measure,
    )


class FakeTensorRunner:
    """Runs parts of a model on fake tensors, in the dtypes of the run."""

    def __init__(
        self, spec: HuggingFaceConfig, forward_spec: ForwardSpec, stage: StageSlice = ONE_LAYER
    ) -> None:
        """``stage``: blocks of the model that runs."""
        self.spec, self.forward_spec, self._stage = spec, forward_spec, stage
        self.fake_mode = fake_tensor_mode()
        self.uses_chunked_loss = 0 < forward_spec.loss_chunk < forward_spec.num_tokens
        self.objective = CausalLM(
            loss_chunk=forward_spec.loss_chunk if self.uses_chunked_loss else None
        )
        self.run_non_block_parts = cache(self._run_non_block_parts)

    @contextmanager
    def fake_tensors(self) -> Iterator[None]:
        """Context with fake tensors, and the memory of the run's device."""
        with self.fake_mode, nullcontext() if self.forward_spec.on_cpu else cuda_kernels():
            yield

    def _build_module(
        self, backward_mode: BackwardMode, *, in_forward: bool = False
    ) -> CausalLMModule:
        """Return the model with the blocks of the stage, as fake tensors."""
        module = build_meta(self.spec, self._stage)
        assert isinstance(module, CausalLMModule)
        if self.forward_spec.packed_layers:  # unpacked weights have the same size in all formats
            packing = NF4Config(double=self.forward_spec.scale_bytes > 0)
            apply_quantization(packing, module, self.spec)
        if self.forward_spec.fp8_layers:
            self._convert_to_fp8(module)
        if self.forward_spec.fake_quantized_layers:
            rounding = QAT8da4wConfig if self.forward_spec.rounds_inputs else QATInt4Config
            quantization = rounding(group=self.forward_spec.quantization_group)
            apply_quantization(quantization, module, self.spec)
        apply_adapter(self._build_adapter_config(), module, self.spec)
        if self.forward_spec.tensor_ranks > 1:
            tp_styles, chunks_loss = self.spec.tensor_parallel_styles(), self.uses_chunked_loss
            shard_for_rank(module, tp_styles, self.forward_spec, chunks_loss=chunks_loss)
        set_chunked_loss(self.objective, module, in_forward=in_forward)
        saved_on = backward_mode.saved_on
        checkpointing = FixedCheckpointing(
            backward_mode.recompute, offload=saved_on is not SavedOn.device
        )
        device = DeviceKind.cuda if saved_on is SavedOn.host else DeviceKind.cpu
        apply_checkpointing(checkpointing, module, self._stage, device)
        with self.fake_tensors():
            replace_tensors(
                module, partial(self._materialize, backward_mode=backward_mode), torch.empty_like
            )
        return module

    def _shard_tokens(self, first_block: nn.Module) -> None:
        """Let the first block read the tokens of one sequence-parallel rank."""
        ranks = self.forward_spec.tensor_ranks
        if self.forward_spec.sequence_parallel and ranks > 1:
            first_block.register_forward_pre_hook(partial(shard_tokens, ranks))

    def _convert_to_fp8(self, module: CausalLMModule) -> None:
        """Replace linear layers by torchao's FP8 layers, as on the CPU.

        On CUDA they first cast their input, as autocast does.
        """
        apply_precision(Float8(), module, self.spec, DeviceKind.cpu)
        if self.forward_spec.autocast and not self.forward_spec.on_cpu:
            for block, name in product(module.layers(), self.forward_spec.fp8_layers):
                layer = block.get_submodule(name)
                layer.register_forward_pre_hook(lambda _, args: (args[0].to(torch.bfloat16),))

    def _materialize(self, parameter: nn.Parameter, backward_mode: BackwardMode) -> nn.Parameter:
        dtype = (
            DTYPES[self.forward_spec.gradient_element_bytes]
            if parameter.is_floating_point()
            else parameter.dtype
        )
        empty = torch.empty(parameter.shape, dtype=dtype)
        fake = nn.Parameter(empty, parameter.requires_grad)
        if fake.requires_grad and not backward_mode.fresh_gradients:
            fake.grad = torch.empty_like(fake)
        if fake.requires_grad and backward_mode.step_scratch_ratio >= 0:
            fake.register_post_accumulate_grad_hook(
                partial(drop_gradients, backward_mode.step_scratch_ratio)
            )
        return fake

    def _build_adapter_config(self) -> AdapterConfig:
        """Return an adapter with the same shapes; its initial values do not matter."""
        forward_spec = self.forward_spec
        trained = tuple(map(re.escape, forward_spec.fully_trained_modules))
        if forward_spec.scaled_layers:
            scaled = tuple(map(re.escape, forward_spec.scaled_layers))
            return IA3AdapterConfig(targets=scaled, trained=trained)
        if not forward_spec.adapted_layers:
            return NoAdapterConfig()
        kind = DoRAAdapterConfig if forward_spec.has_magnitudes else LoRAAdapterConfig
        targets = tuple(map(re.escape, forward_spec.adapted_layers))
        return kind(
            rank=forward_spec.adapter_rank,
            dropout=forward_spec.adapter_dropout,
            targets=targets,
            trained=trained,
        )

    def _forward_context(self) -> AbstractContextManager[object]:
        """Return the autocast context of the forward pass."""
        name: LightningPrecision = "bf16-mixed" if self.forward_spec.autocast else "32-true"
        plugin = precision_plugin(name, DeviceKind.cpu)
        return plugin.forward_context()

    def _empty_batch(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return tokens, labels and the positions of packed texts."""
        shape = (self.forward_spec.sequences, self.forward_spec.tokens_per_sequence)
        tokens, labels, positions = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
        return tokens, labels, positions if self.forward_spec.sequence_packing else None

    def run_block(self, backward_mode: BackwardMode, *, input_requires_grad: bool) -> Sizes:
        """Return the sizes of one block; ``input_requires_grad``: whether its input needs one."""
        outer, module = self.run_non_block_parts(FRESH), self._build_module(backward_mode)
        (block,) = module.layers()
        with self.fake_tensors():
            leaf = outer.x.empty_leaf(requires_grad=input_requires_grad)
        with self.fake_tensors(), LiveBytes() as live:
            x = leaf.clone()
            with self._forward_context():
                outputs = [first_tensor(block(x, *outer.arguments, **outer.keywords))]
            del x
            return measure_part(
                live, outputs, module, fresh_gradients=backward_mode.fresh_gradients
            )

    def build_loss_graph(self, recorded: OpGraph) -> OpGraph | None:
        """Return the part with the loss, or None if a chunked loss is part of the head.

        The loss of logits that tensor-parallel ranks shard is not run but computed analytically.
        """
        if self.uses_chunked_loss:
            return None
        if self.forward_spec.loss_parallel:
            return cross_entropy_ops(self.forward_spec, self.spec.output_size)
        return measured_part(recorded, lambda *_: self.run_loss())

    def run_loss(self) -> Sizes:
        """Return the sizes of the loss."""
        with self.fake_tensors():
            leaf, (_, labels, _) = (
                self.run_non_block_parts(FRESH).logits.empty_leaf(requires_grad=True),
                self._empty_batch(),
            )
        with self.fake_tensors(), LiveBytes() as live:
            logits = leaf.clone()
            outputs = [sum_over_tokens(self.objective, logits, labels)]
            forward_peak = live.take_peak()
            del logits
            return live.current_bytes, forward_peak, count_backward(outputs, live), 0

    def _run_non_block_parts(self, backward_mode: BackwardMode) -> NonBlockParts:
        """Run the operators before and after the blocks, with a block that computes nothing."""
        in_forward = self.forward_spec.loss_in_forward
        module = self._build_module(backward_mode, in_forward=in_forward)
        before, after = LiveBytes(), LiveBytes()
        between = CountingBlock(before, after, returns_tuple=self.spec.info.returns_tuples)
        self._shard_tokens(between)
        module.set_layers([between])
        with self.fake_tensors():
            tokens, labels, positions = self._empty_batch()
            before.__enter__()  # type: ignore[no-untyped-call]  # torch lacks the annotation
            with self._forward_context():
                outputs = [module(tokens, labels if self.uses_chunked_loss else None, positions)]
            logits = TensorKind.from_tensor(*outputs)
            head = measure_part(
                after, outputs, module, fresh_gradients=backward_mode.fresh_gradients
            )
            after.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # as above
            if backward_mode.fresh_gradients:
                module.zero_grad()
            return between.build_parts(
                before, head, logits, module, fresh_gradients=backward_mode.fresh_gradients
            )

    def _build_linear_writer(self, layer: nn.Linear) -> Callable[[LinearOps, int], int]:
        """Return a function that adds the operators of an FP8 or fake-quantized layer."""
        (out, into), bias = layer.weight.shape, layer.bias is not None
        if self.forward_spec.fp8_layers:
            return lambda writer, x: writer.add_fp8_linear(x, into, out, (), bias=bias)
        return lambda writer, x: writer.add_fake_quantized_linear(x, into, out, ())

    def record_operators(self) -> tuple[OpGraph, OpGraph, OpGraph]:
        """Return the operators of a block, of the operators after all blocks, and of the loss."""
        module = self._build_module(FRESH)
        (block,) = module.layers()
        self._shard_tokens(block)
        module.set_layers([block])
        recorder = OpRecorder(self.forward_spec)
        for name in self.forward_spec.fp8_layers + self.forward_spec.fake_quantized_layers:
            layer = cast(nn.Linear, block.get_submodule(name))
            recorder.replace_layer_ops(layer, self._build_linear_writer(layer))
        with self.fake_tensors():
            tokens, labels, positions = self._empty_batch()
            with self._forward_context(), recorder:
                block.register_forward_pre_hook(
                    lambda _, args: recorder.begin_part("block", args[:1])
                )
                block.register_forward_hook(
                    lambda _, __, out: recorder.begin_part("head", (first_tensor(out),))
                )
                out = module(tokens, labels if self.uses_chunked_loss else None, positions)
                recorder.begin_part("loss", (out,))
                if not self.uses_chunked_loss:
                    sum_over_tokens(self.objective, out, labels)
        return recorder.graphs["block"], recorder.graphs["head"], recorder.graphs["loss"]
