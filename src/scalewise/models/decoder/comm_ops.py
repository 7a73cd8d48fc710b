"""What a decoder's ranks send each other within a pass, for the planner: sizes, no tensors."""

from __future__ import annotations

from scalewise.models.decoder.linear_ops import LinearOps
from scalewise.models.op_graph import OpWork


class CommOps(LinearOps):
    """Writes what tensor and context ranks send onto a tape."""

    def add_all_gather(self, x: int) -> int:
        """Writes how tokens that tensor ranks share out become whole, and their gradients sums."""
        run, graph = self.forward_spec, self.graph
        if run.tensor_ranks == 1 or not run.sequence_parallel:
            return x
        whole = graph.sizes[x] * run.tensor_ranks
        return graph.add_op(
            OpWork.communication, (x,), whole, forward_scratch=whole, backward_scratch=whole
        )

    def add_reduction(self, x: int, *, scatter: bool, live_tensors: tuple[int, ...] = ()) -> int:
        """Writes how parts of a sum on all tensor ranks are added up, and perhaps cut by tokens.

        ``live_tensors``: what lives on meanwhile.
        """
        run, graph = self.forward_spec, self.graph
        if run.tensor_ranks == 1:
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
            size // run.tensor_ranks,
            gradients=(x,),
            forward_scratch=size,
            backward_scratch=size,
            saved_by_selective=True,
        )

    def add_all_to_all(self, x: int, size: int) -> int:
        """Writes an all-to-all: packed, sent, unpacked and put in order."""
        return self.graph.add_op(
            OpWork.communication,
            (x,),
            size,
            forward_scratch=2 * size,
            backward_scratch=2 * size,
            saved_by_selective=True,
        )
