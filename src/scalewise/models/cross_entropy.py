"""Operator graph of the cross-entropy loss, for the planner."""

from __future__ import annotations

from scalewise.models.op_graph import ForwardSpec, OpGraph, OpWork


def cross_entropy_ops(forward_spec: ForwardSpec, output_size: int) -> OpGraph:
    """Return the cross-entropy of logits in fp32; with loss parallelism, of this rank's shard."""
    graph = OpGraph()
    numel = (
        forward_spec.num_tokens
        * output_size
        // (forward_spec.tensor_ranks if forward_spec.loss_parallel else 1)
    )
    logits, size = (
        graph.add_tensor(numel * forward_spec.compute_element_bytes),
        numel * forward_spec.loss_element_bytes,
    )
    loss_logits = (
        logits
        if forward_spec.compute_element_bytes == forward_spec.loss_element_bytes
        else graph.add_op(OpWork.pointwise, (logits,), size)
    )
    # Two backward ops each need a full gradient: of the log-probabilities, then of the logits.
    scratch = 0 if forward_spec.loss_parallel else size
    reads = (loss_logits, logits)
    graph.add_op(
        OpWork.pointwise,
        reads,
        0,
        gradients=(loss_logits,),
        extra_output_bytes=(size,),
        backward_scratch=scratch,
    )
    return graph
