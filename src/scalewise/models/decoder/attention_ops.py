"""Attention of a decoder, and what is dropped, as they run, for the planner: sizes, no tensors."""

from __future__ import annotations

from scalewise.models.decoder.comm_ops import CommOps
from scalewise.models.decoder.config import DecoderConfig
from scalewise.models.decoder.linear_ops import FP32
from scalewise.models.op_graph import ForwardSpec, OpWork


class AttentionOps(CommOps):
    """Writes how a token becomes a mix of others onto a tape."""

    def __init__(self, spec: DecoderConfig, run: ForwardSpec) -> None:
        super().__init__(run)
        self.spec = spec

    def mixed(self, query: int, key: int, value: int) -> int:
        """Writes attention, and what brings it the tokens of other context ranks."""
        spec, run, tape = self.spec, self.run, self.tape
        whole, mask = run.tokens * run.context + run.before, 0
        if run.before:
            key, value = self._lengthened(key), self._lengthened(value)
        if run.context > 1 and run.gathers:
            both = tape.sizes[key] * run.context * 2
            gathered = tape.add(
                OpWork.message, (key, value), both, forward_scratch=2 * both, scratch=both
            )
            read: tuple[int, ...] = (query, gathered)
            piece = run.tokens // 2  # of either end; the mask says which of the keys each sees
            mask = piece * piece * (2 * run.context + 1) * run.compute * (not run.packing)
        elif run.context > 1:
            heads = spec.key_heads // run.tensor
            wide = tape.sizes[key] if heads % run.context == 0 else tape.sizes[query]
            read = (
                self.exchanged(query, tape.sizes[query]),
                self.exchanged(key, wide),
                self.exchanged(value, wide),
            )
        else:
            read = (query, key, value)
        masked = run.packing or run.before > 0
        skips = not masked or (run.context > 1 and run.gathers)  # half, as what comes later
        fused = not (spec.dropout and run.on_cpu)
        products = 2.0 if skips and fused else 4.0  # a mask hides what was computed
        flops = products * run.places * whole * spec.query_width / run.tensor
        if fused:
            mixed = tape.add(
                OpWork.attention,
                read,
                tape.sizes[query],
                saved=read,
                saves_output=True,
                extra=(run.places * spec.heads // run.tensor * FP32, mask),
                kept_by_selective=True,
                flops=flops,
                backward_flops=2.5 * flops,
            )
        else:
            mixed = self._step_by_step(read, whole, masked, flops)
        if run.context == 1:
            return mixed
        if run.gathers:  # the halves of the tokens are put together
            return tape.add(OpWork.pointwise, (mixed,), tape.sizes[mixed])
        return self.exchanged(mixed, tape.sizes[mixed])

    def _step_by_step(self, read: tuple[int, ...], whole: int, masked: bool, flops: float) -> int:
        """Writes attention with dropout as torch has it on the CPU: no kernel of its own, in fp32.

        After ``at::_scaled_dot_product_attention_math``; each product reads copies.
        """
        spec, run, tape = self.spec, self.run, self.tape
        size = tape.sizes[read[0]]
        queries = size // run.compute * FP32
        spread = run.context > 1 and not run.gathers  # some heads of all tokens
        keys = queries if spread else queries * whole // run.tokens
        scores = run.places * whole * spec.heads // run.tensor * FP32
        query = tape.add(OpWork.pointwise, read[:1], queries)
        key = tape.add(OpWork.pointwise, read[1:2], keys)
        products = self._multiplied(query, key, scores, flops / 2)
        mask = 0 if masked else run.tokens * whole * FP32
        shares = tape.add(
            OpWork.pointwise, (products,), scores, saves_output=True, forward_scratch=scores + mask
        )
        dropped = self.dropped(shares, spec.dropout)
        value = tape.add(OpWork.pointwise, read[-1:], keys)
        mixed = self._multiplied(dropped, value, queries, flops / 2)
        return mixed if size == queries else tape.add(OpWork.pointwise, (mixed,), size)

    def _multiplied(self, one: int, other: int, size: int, flops: float) -> int:
        """Writes a product of two tensors, of which backward reads each for the other's sake."""
        tape = self.tape
        pairs = ((one, other), (other, one))
        return tape.add(
            OpWork.attention,
            (one, other),
            size,
            saved=tuple(each for each, partner in pairs if tape.trained[partner]),
            kept_by_selective=True,
            flops=flops,
            backward_flops=2.0 * flops,
        )

    def _lengthened(self, x: int) -> int:
        """Writes how what is learnt comes before the keys, or the values, of each row."""
        run, size = self.run, self.tape.sizes[x]
        count = run.before * self.spec.kv_width // run.tensor
        return self.tape.add(
            OpWork.pointwise,
            (x,),
            size + size * run.before // run.tokens,
            weight=(count * run.compute, count * run.held),
            weight_first=False,
        )

    def dropped(self, x: int, share: float) -> int:
        """Writes how a share of the numbers is dropped."""
        if not share:
            return x
        size = self.tape.sizes[x]
        as_numbers = self.run.on_cpu and not self.run.compiled
        mask = size if as_numbers else size // self.run.stream
        return self.tape.add(OpWork.pointwise, (x,), size, extra=(mask,))
