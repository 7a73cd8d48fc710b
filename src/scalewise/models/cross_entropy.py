"""The loss of logits as operators, for every model's plan."""

from __future__ import annotations

from scalewise.models.op_graph import ForwardSpec, OpGraph, OpWork


def cross_entropy_ops(run: ForwardSpec, outputs: int) -> OpGraph:
    """Returns the cross-entropy of logits, in fp32; tensor ranks may have some of these each."""
    tape = OpGraph()
    count = run.places * outputs // (run.tensor if run.cut_loss else 1)
    logits, size = tape.tensor(count * run.compute), count * run.loss
    whole = logits if run.compute == run.loss else tape.add(OpWork.pointwise, (logits,), size)
    # Two backward steps hold a whole gradient: of the likelihoods, then of the logits.
    scratch = 0 if run.cut_loss else size
    reads = (whole, logits)
    tape.add(OpWork.pointwise, reads, 0, gradients=(whole,), extra=(size,), scratch=scratch)
    return tape
