"""The decoder's operators as it runs them, for the planner: sizes, no tensors."""

from __future__ import annotations

from dataclasses import replace

from scalewise.models import cross_entropy
from scalewise.models.decoder.attention_ops import AttentionOps
from scalewise.models.decoder.config import ActivationKind, DecoderConfig, NormKind, PositionKind
from scalewise.models.decoder.linear_ops import FP32
from scalewise.models.op_graph import ForwardSpec, ModelOpGraphs, OpWork


def decoder_op_graphs(spec: DecoderConfig, run: ForwardSpec) -> ModelOpGraphs:
    """Returns the operators of a decoder, part by part."""
    longer = replace(run, tokens=run.tokens + run.ahead)
    first = OpGraphWriter(spec, run)
    start, block, last = (OpGraphWriter(spec, longer) for _ in range(3))
    first.embedding()
    start.block(trained=start.trains("embedding") or start.trains("position") or run.ahead > 0)
    block.block()
    last.head()
    rope = spec.position is PositionKind.rope
    rotations = 2 * longer.tokens * spec.head_size * run.table * rope
    row = run.tokens * run.context
    if run.packing:  # rows differ, and each has a mask of whole rows
        rotations = rotations * run.rows + run.rows * row * (row + run.before) * run.compute
    elif run.before:
        rotations += row * (row + run.before) * run.compute
    in_pieces = 0 < run.loss_chunk < run.places
    loss = None if in_pieces else cross_entropy.cross_entropy_ops(run, spec.outputs)
    return ModelOpGraphs(first.tape, start.tape, block.tape, last.tape, loss, rotations)


class OpGraphWriter(AttentionOps):
    """Writes the tape of one part."""

    def embedding(self) -> None:
        """Writes the look-up of tokens, and of their places."""
        spec, run, tape = self.spec, self.run, self.tape
        size = run.places * spec.width * run.stream
        count = spec.vocabulary * spec.width * run.held
        # Its gradient is made whole, and cut as the weight is.
        weight = (count, count // run.tensor) if self.trains("embedding") else (0, 0)
        x = tape.add(OpWork.pointwise, (), size, weight=weight)
        x = self._put_ahead(x) if run.ahead else self.summed(x, cut=run.cut_tokens)
        if spec.position is PositionKind.learned:
            place = spec.context * spec.width * run.held
            table = (place, place) if self.trains("position") else (0, 0)
            rows = 1 if run.packing else run.rows
            row = tape.add(OpWork.pointwise, (), tape.sizes[x] // rows, weight=table)
            x = tape.add(OpWork.pointwise, (x, row), tape.sizes[x], shares=True)
        self.dropped(x, spec.dropout)

    def block(self, *, trained: bool = True) -> None:
        """Writes one layer; ``trained``: whether something before it is."""
        x = self.tape.tensor(self._stream, trained=trained)
        x2 = self._residual(x, self._attention(self._norm("attention_norm", x)))
        self._residual(x2, self._feedforward(self._norm("feedforward_norm", x2)))

    def head(self) -> None:
        """Writes the last norm and the logits; with them the loss, if it is taken in pieces."""
        spec, run = self.spec, self.run
        read = self.joined(self._norm("norm", self.tape.tensor(self._stream)))
        if run.ahead:  # which have no logits
            self.run = run = replace(run, tokens=run.tokens - run.ahead)
            read = self.tape.add(OpWork.pointwise, (read,), run.places * spec.width * run.stream)
        if 0 < run.loss_chunk < run.places:
            self._pieces(read)
        else:
            self._linear("head", read, spec.width, spec.outputs // run.tensor)

    def trains(self, name: str) -> bool:
        """Returns whether a module's own weights are trained."""
        owner = "embedding" if name == "head" and self.spec.tied else name
        return not self.run.frozen or owner in self.run.whole

    @property
    def _stream(self) -> int:
        """Returns the bytes of what goes from layer to layer."""
        return self.run.between * self.spec.width * self.run.stream

    def _put_ahead(self, x: int) -> int:
        """Writes how vectors come before all tokens, of which a tensor rank goes on with some."""
        run, tape = self.run, self.tape
        x = self.summed(x, cut=False)
        more = tape.sizes[x] * run.ahead // run.tokens
        vectors = run.ahead * self.spec.width * run.held
        x = tape.add(OpWork.pointwise, (x,), tape.sizes[x] + more, weight=(more, vectors))
        return tape.add(OpWork.message, (x,), tape.sizes[x] // run.tensor) if run.cut_tokens else x

    def _pieces(self, normed: int) -> None:
        """Writes head and loss of a piece of the tokens at a time.

        Made once more for backward, gradients of the head's weight are summed out of place: the
        sum so far, one more, and both. Taken in forward they are summed in place, and held.
        """
        spec, run, tape = self.spec, self.run, self.tape
        piece = max(1, run.loss_chunk // run.rows) * run.rows
        count = spec.width * spec.outputs // run.tensor
        logits, read = piece * count // spec.width * FP32, piece * spec.width * run.compute
        if run.tensor > 1 and not run.cut_loss:
            logits *= run.tensor
        made = piece * count // spec.width * run.compute * (run.compute < FP32)
        flops = 2.0 * count * run.places
        copy = count * run.compute * run.casts
        trains = self.trains("head")
        gradient = count * run.held * trains
        if run.loss_in_forward:
            of_x = tape.sizes[normed] * tape.trained[normed]
            computed = count * run.compute * run.casts * trains
            last = max(read + gradient + (computed or logits), made + max(logits, read + computed))
            tape.add(
                OpWork.product,
                (normed,),
                0,
                weight=(gradient, gradient),
                extra=(of_x, gradient),
                hands_over=True,
                forward_scratch=read + copy + max(made + 2 * logits, 3 * logits, last, of_x),
                flops=(2 + trains) * flops,
            )
            return
        tape.add(
            OpWork.product,
            (normed,),
            0,
            saved=(normed,),
            weight=(gradient, gradient),
            forward_scratch=read + made + 2 * logits + copy,
            scratch=read + copy + max(3 * logits, logits + read + gradient, 2 * gradient + read),
            flops=flops,
            backward_flops=(2 + trains) * flops,
        )

    def _residual(self, x: int, branch: int) -> int:
        branch = self.dropped(branch, self.spec.dropout)
        return self.tape.add(OpWork.pointwise, (x, branch), self.tape.sizes[x], shares=True)

    def _norm(self, name: str, x: int) -> int:
        spec, run, tape = self.spec, self.run, self.tape
        trains = self.trains(name)
        size, small = tape.sizes[x], run.between * FP32
        biased = spec.bias and spec.norm is NormKind.layernorm
        count = spec.width * (1 + biased) * trains
        weight = (count * run.held,) * 2
        if spec.norm is NormKind.layernorm or not run.on_cpu:
            mean = run.between * (run.stream if run.on_cpu else FP32)
            extra = (mean, mean) if spec.norm is NormKind.layernorm else (small,)
            return tape.add(OpWork.pointwise, (x,), size, saved=(x,), extra=extra, weight=weight)
        whole = run.between * spec.width * FP32
        wide = self.cast(x, whole) if size != whole else x
        square = tape.add(OpWork.pointwise, (wide,), whole, saved=(wide,), scratch=2 * whole)
        mean = tape.add(OpWork.pointwise, (square,), small)
        root = tape.add(OpWork.pointwise, (mean,), small, saves_output=True)
        scaled = tape.add(
            OpWork.pointwise, (wide, root), whole, saved=(wide, root), scratch=whole - small
        )
        out = tape.add(
            OpWork.pointwise,
            (scaled,),
            whole,
            saved=(scaled,) if trains else (),
            weight=weight,
            scratch=whole * trains,
        )
        return out if size == whole else self.cast(out, size)

    def _linear(
        self,
        name: str,
        x: int,
        into: int,
        out: int,
        *,
        bias: bool = False,
        row: bool = False,
        holds: tuple[int, ...] = (),
    ) -> int:
        """Writes a linear layer and, where it is adapted, the two narrow ones beside it.

        ``row``: whether tensor ranks have parts of its sums, as each reads some of the features.
        """
        run, tape = self.run, self.tape
        scaled = name in run.scaled
        x = self._rescaled(x, into, wide_input=True) if row and scaled else x
        if name in run.in_fp8:
            written = self.product_fp8(x, into, out, holds, bias=bias)
        elif name in run.fake_quantized:
            written = self.rounded_product(x, into, out, holds)
        elif name in run.packed:
            written = self.unpacked_product(x, into, out, holds)
        else:
            trains = self.trains(name)
            written = self.product(x, into, out, bias=bias, trains=trains, holds=holds)
        written = self.summed(written, cut=run.cut_tokens, holds=(x, *holds)) if row else written
        if scaled and not row:
            return self._rescaled(written, out)
        if name not in run.adapted:
            return written
        size = tape.sizes[written]
        if run.magnitudes and bias:
            written = tape.add(OpWork.pointwise, (written,), size)
        narrow = self.product(self.dropped(x, run.dropout), into, run.rank)
        narrow = self.summed(narrow, cut=run.cut_tokens) if row else narrow
        wide = self.product(narrow, run.rank, out, places=run.between if row else run.places)
        if run.magnitudes:
            self._row_norms(into, out)
        weighed = tape.add(OpWork.pointwise, (wide,), size)
        summed = tape.add(OpWork.pointwise, (written, weighed), size, shares=True)
        if not run.magnitudes:
            return summed
        grown = self._scaled(summed, size, out)
        return tape.add(OpWork.pointwise, (grown,), size, shares=True) if bias else grown

    def _row_norms(self, into: int, out: int) -> None:
        """Writes how rows of W + scale B A are measured: of W and A, of A, and of B with that."""
        run, rank = self.run, self.run.rank
        for flops, rows in ((into * out, out), (into * rank, rank), (rank * out, out)):
            self.tape.add(
                OpWork.product,
                (),
                rows * rank * run.held,
                kept_by_selective=True,
                flops=2.0 * rank * flops,
            )

    def _rescaled(self, x: int, features: int, *, wide_input: bool = False) -> int:
        """Writes PEFT's product of features and scales, made in the format of the scales.

        ``wide_input``: whether what is scaled is cast before, and not by the product itself.
        """
        size = self.tape.sizes[x]
        wide = size // self.run.compute * self.run.held
        given = self.cast(x, wide) if wide_input and wide != size else x
        scaled = self._scaled(given, wide, features)
        return scaled if wide == size else self.cast(scaled, size)

    def _scaled(self, x: int, size: int, features: int) -> int:
        """Writes a product, of ``size`` bytes, with a vector that is trained."""
        vector = features * self.run.held
        return self.tape.add(
            OpWork.pointwise, (x,), size, saved=(x,), weight=(vector, vector), scratch=size
        )

    def _rotate(self, x: int) -> int:
        run, tape = self.run, self.tape
        size = tape.sizes[x]
        # The table is fp32: in a mixed pass what it multiplies becomes so.
        wide = size // run.compute * max(run.compute, run.table)
        rolled = tape.add(OpWork.pointwise, (x,), size)
        second = tape.add(OpWork.pointwise, (rolled,), wide)
        first = tape.add(OpWork.pointwise, (x,), wide)
        total = tape.add(
            OpWork.pointwise, (second, first, rolled), wide, gradients=(second, first), shares=True
        )
        return total if wide == size else self.cast(total, size)

    def _attention(self, normed: int) -> int:
        spec, run = self.spec, self.run
        read, cut = self.joined(normed), run.tensor
        query = self._linear(
            "attention.query", read, spec.width, spec.query_width // cut, bias=spec.bias
        )
        key = self._linear("attention.key", read, spec.width, spec.kv_width // cut, bias=spec.bias)
        value = self._linear(
            "attention.value", read, spec.width, spec.kv_width // cut, bias=spec.bias
        )
        if spec.position is PositionKind.rope:
            query, key = self._rotate(query), self._rotate(key)
        mixed = self.mixed(query, key, value)
        return self._linear(
            "attention.output",
            mixed,
            spec.query_width // cut,
            spec.width,
            bias=spec.bias,
            row=True,
            holds=(read, normed),
        )

    def _feedforward(self, normed: int) -> int:
        spec, tape, bias = self.spec, self.tape, self.spec.bias
        read, hidden_width = self.joined(normed), self.spec.feedforward // self.run.tensor
        if spec.activation is ActivationKind.swiglu:
            gate = self._linear("feedforward.gate", read, spec.width, hidden_width, bias=bias)
            size = tape.sizes[gate]
            opened = tape.add(OpWork.pointwise, (gate,), size, saved=(gate,))
            up = self._linear("feedforward.up", read, spec.width, hidden_width, bias=bias)
            hidden = tape.add(OpWork.pointwise, (opened, up), size, saved=(opened, up))
        else:
            up = self._linear("feedforward.up", read, spec.width, hidden_width, bias=bias)
            hidden = tape.add(OpWork.pointwise, (up,), tape.sizes[up], saved=(up,))
        return self._linear(
            "feedforward.down",
            hidden,
            hidden_width,
            spec.width,
            bias=bias,
            row=True,
            holds=(read, normed),
        )
