"""The loss of logits as operators, for every model's plan."""

from __future__ import annotations

from scalewise.models.op_graph import ForwardSpec, OpGraph, OpWork


def cross_entropy_ops(forward_spec: ForwardSpec, output_size: int) -> OpGraph:
    """Returns the cross-entropy of logits, in fp32; tensor ranks may have some of these each."""
    graph = OpGraph()
    count = (
        forward_spec.num_tokens
        * output_size
        // (forward_spec.tensor_ranks if forward_spec.loss_parallel else 1)
    )
    logits, size = (
        graph.add_tensor(count * forward_spec.compute_element_bytes),
        count * forward_spec.loss_element_bytes,
    )
    whole = (
        logits
        if forward_spec.compute_element_bytes == forward_spec.loss_element_bytes
        else graph.add_op(OpWork.pointwise, (logits,), size)
    )
    # Two backward steps hold a whole gradient: of the likelihoods, then of the logits.
    scratch = 0 if forward_spec.loss_parallel else size
    reads = (whole, logits)
    graph.add_op(
        OpWork.pointwise,
        reads,
        0,
        gradients=(whole,),
        extra_output_bytes=(size,),
        backward_scratch=scratch,
    )
    return graph
