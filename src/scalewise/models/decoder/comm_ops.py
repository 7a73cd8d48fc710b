"""Collectives in the operator graph of the decoder, for the planner."""

from __future__ import annotations

from scalewise.models.decoder.linear_ops import LinearOps
from scalewise.models.op_graph import OpWork


class CommOps(LinearOps):
    """Adds the collectives of tensor and context parallelism to an operator graph."""

    def add_all_gather(self, x: int) -> int:
        """Add the all-gather of sequence-parallel tokens; its backward is a reduce-scatter."""
        forward_spec, graph = self.forward_spec, self.graph
        if forward_spec.tensor_ranks == 1 or not forward_spec.sequence_parallel:
            return x
        size = graph.sizes[x] * forward_spec.tensor_ranks
        return graph.add_op(
            OpWork.communication, (x,), size, forward_scratch=size, backward_scratch=size
        )

    def add_reduction(self, x: int, *, scatter: bool, live_tensors: tuple[int, ...] = ()) -> int:
        """Add the all-reduce, or reduce-scatter, of partial sums on tensor-parallel ranks.

        Args:
            x: Partial sum.
            scatter: Whether the result is sharded by tokens (reduce-scatter).
            live_tensors: Tensors that stay alive during the collective.
        """
        forward_spec, graph = self.forward_spec, self.graph
        if forward_spec.tensor_ranks == 1:
            return x
        size = graph.sizes[x]
        if not scatter:
            return graph.add_op(
                OpWork.communication,
                (x, *live_tensors),
                size,
                gradients=(x,),
                shares_gradient=True,
                saved_by_selective=True,
            )
        return graph.add_op(
            OpWork.communication,
            (x, *live_tensors),
            size // forward_spec.tensor_ranks,
            gradients=(x,),
            forward_scratch=size,
            backward_scratch=size,
            saved_by_selective=True,
        )

    def add_all_to_all(self, x: int, size: int) -> int:
        """Add an all-to-all with its packing, unpacking and transposition."""
        return self.graph.add_op(
            OpWork.communication,
            (x,),
            size,
            forward_scratch=2 * size,
            backward_scratch=2 * size,
            saved_by_selective=True,
        )
