"""Cross-entropy in operator graphs, for the planner."""

from __future__ import annotations

from scalewise.models.op_graph import ForwardSpec, OpGraph, OpWork


def cross_entropy_ops(forward_spec: ForwardSpec, output_size: int) -> OpGraph:
    """Return the cross-entropy of logits in fp32; with loss parallelism, of this rank's shard.

    If it is compiled, the kernels read and write logits and gradients in the compute format, and
    save two fp32 values per token.
    """
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
    if forward_spec.is_loss_compiled:
        per_token = 2 * forward_spec.num_tokens * forward_spec.loss_element_bytes
        graph.add_op(
            OpWork.pointwise, (logits,), 0, saved=(logits,), extra_output_bytes=(per_token,)
        )
        return graph
    loss_logits = (
        logits
        if forward_spec.compute_element_bytes == forward_spec.loss_element_bytes
        else graph.add_op(OpWork.pointwise, (logits,), size)
    )
    # Two backward ops each need a full gradient, but a sharded loss fuses them.
    adds_gradient = forward_spec.has_z_loss and loss_logits == logits
    fuses_gradients = forward_spec.loss_parallel and not adds_gradient
    graph.add_op(
        OpWork.pointwise,
        (loss_logits, logits),
        0,
        gradients=(loss_logits,),
        extra_output_bytes=(size,),
        backward_scratch=0 if fuses_gradients else size,
    )
    return graph
