"""Operator graphs of Hugging Face models, measured by runs with fake tensors."""

from __future__ import annotations

from scalewise.models.hf.config import HuggingFaceConfig
from scalewise.models.op_graph import ForwardSpec, ModelOpGraphs, RecordedPart, build_op_graphs
from scalewise.tracing.fake_tensor_runner import FRESH, FakeTensorRunner, measured_part
from scalewise.tracing.stack_op_graphs import stack_op_graphs


@build_op_graphs.register(HuggingFaceConfig)
def _hf_op_graphs(spec: HuggingFaceConfig, forward_spec: ForwardSpec) -> ModelOpGraphs:
    """Operator graphs of a model; each part runs when its ``measure`` is called."""
    if not spec.has_equal_blocks:
        return stack_op_graphs(spec, forward_spec)
    runner = FakeTensorRunner(spec, forward_spec)
    outer, (block, head, loss) = runner.run_non_block_parts(FRESH), runner.record_operators()
    return ModelOpGraphs(
        embedding=RecordedPart(measure=lambda mode: runner.run_non_block_parts(mode).embedding),
        first_block=measured_part(
            block, lambda mode: runner.run_block(mode, input_requires_grad=outer.x.requires_grad)
        ),
        block=measured_part(block, lambda mode: runner.run_block(mode, input_requires_grad=True)),
        head=measured_part(head, lambda mode: runner.run_non_block_parts(mode).head),
        loss=runner.build_loss_graph(loss),
        shared_bytes=outer.shared_bytes,
    )
