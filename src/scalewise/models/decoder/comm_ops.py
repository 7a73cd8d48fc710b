"""What a decoder's ranks send each other within a pass, for the planner: sizes, no tensors."""

from __future__ import annotations

from scalewise.models.decoder.linear_ops import LinearOps
from scalewise.models.op_graph import OpWork


class CommOps(LinearOps):
    """Writes what tensor and context ranks send onto a tape."""

    def joined(self, x: int) -> int:
        """Writes how tokens that tensor ranks share out become whole, and their gradients sums."""
        run, tape = self.run, self.tape
        if run.tensor == 1 or not run.cut_tokens:
            return x
        whole = tape.sizes[x] * run.tensor
        return tape.add(OpWork.message, (x,), whole, forward_scratch=whole, scratch=whole)

    def summed(self, x: int, *, cut: bool, holds: tuple[int, ...] = ()) -> int:
        """Writes how parts of a sum on all tensor ranks are added up, and perhaps cut by tokens.

        ``holds``: what lives on meanwhile.
        """
        run, tape = self.run, self.tape
        if run.tensor == 1:
            return x
        size = tape.sizes[x]
        if not cut:
            return tape.add(
                OpWork.message,
                (x, *holds),
                size,
                gradients=(x,),
                shares=True,
                kept_by_selective=True,
            )
        return tape.add(
            OpWork.message,
            (x, *holds),
            size // run.tensor,
            gradients=(x,),
            forward_scratch=size,
            scratch=size,
            kept_by_selective=True,
        )

    def exchanged(self, x: int, size: int) -> int:
        """Writes an all-to-all: packed, sent, unpacked and put in order."""
        return self.tape.add(
            OpWork.message,
            (x,),
            size,
            forward_scratch=2 * size,
            scratch=2 * size,
            kept_by_selective=True,
        )
