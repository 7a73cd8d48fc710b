"""The products of a decoder's linear layers as they run, for the planner: sizes, no tensors."""

from __future__ import annotations

from scalewise.models.op_graph import ForwardSpec, OpGraph, OpWork

FP32 = 4


class LinearOps:
    """Writes products of matrices onto a tape, in whatever format they are made."""

    def __init__(self, run: ForwardSpec) -> None:
        self.run, self.tape = run, OpGraph()
        self._products, self._masked = 0, set[int]()

    def product(
        self,
        x: int,
        into: int,
        out: int,
        *,
        bias: bool = False,
        trains: bool = True,
        places: int | None = None,
        holds: tuple[int, ...] = (),
    ) -> int:
        """Writes a product with a matrix, cast where it is held in another format."""
        run, tape = self.run, self.tape
        places = places or run.places
        count, more = into * out, out * bias
        saved, read = [], x
        if run.casts:
            if bias:
                tape.add(OpWork.pointwise, (), out * run.compute)
            if tape.trained[x]:
                saved.append(tape.add(OpWork.pointwise, (), count * run.compute))
            else:
                tape.add(OpWork.pointwise, (), count * run.compute)
            if tape.sizes[x] != places * into * run.compute:
                read = self.cast(x, places * into * run.compute)
        weights = (count + more) * trains
        flops = 2.0 * count * places
        return tape.add(
            OpWork.product,
            (read, *holds),
            places * out * run.compute,
            saved=(*((read,) if trains else ()), *saved),
            gradients=(read,),
            weight=(weights * run.compute, weights * run.held),
            weight_first=not bias,
            kept_by_selective=self._kept_by_selective(),
            flops=flops,
            backward_flops=flops * (tape.trained[x] + trains),
        )

    def product_fp8(
        self, x: int, into: int, out: int, holds: tuple[int, ...], *, bias: bool
    ) -> int:
        """Writes torchao's product, whose operands are cast to 8 bits for each of three products.

        A cast of n numbers makes 9n bytes: scaled and saturated in fp32, then cast. Backward casts
        the gradient for either product, and what forward has cast once more. Compiled, a cast
        reads its numbers twice and writes them once; by torch's own operators it moves more.
        """
        run, tape = self.run, self.tape
        if not run.on_cpu and tape.sizes[x] != run.places * into * run.compute:
            x = self.cast(x, run.places * into * run.compute)
        read, made, weights = run.places * into, run.places * out, into * out
        gradients = read * run.compute, weights * run.compute
        # Products want one operand by rows and one by columns; emulated ones copy out of sight.
        turned = not run.on_cpu
        flops = 2.0 * weights * run.places
        moved = [
            2 * size + count
            for count, size in (
                (read, tape.sizes[x]),
                (made, made * run.compute),
                (weights, weights * run.held),
            )
        ]
        written = tape.add(
            OpWork.product_fp8,
            (x, *holds),
            made * run.compute,
            saved=(x,),
            gradients=(x,),
            weight=(gradients[1], weights * run.held),
            weight_first=False,
            forward_scratch=max(9 * read, read + 9 * weights) - made * run.compute,
            scratch=max(
                9 * made,
                made + 9 * weights,
                made + weights * (1 + turned) + gradients[0],
                max(10 * made, 2 * made + 9 * read) + weights + gradients[0],
                (made + read) * (1 + turned) + made + weights + sum(gradients),
            )
            - tape.sizes[x]
            - gradients[1],
            casts=(moved[0] + moved[2], moved[0] + 2 * moved[1] + moved[2]),
            kept_by_selective=self._kept_by_selective(),
            flops=flops,
            backward_flops=2 * flops,
        )
        if not bias:
            return written
        added = (out * run.compute, out * run.held)
        return tape.add(
            OpWork.pointwise, (written,), tape.sizes[written], weight=added, shares=True
        )

    def unpacked_product(self, x: int, into: int, out: int, holds: tuple[int, ...]) -> int:
        """Writes a product with a frozen matrix, unpacked for forward and again for backward."""
        run, tape = self.run, self.tape
        if run.casts and tape.sizes[x] != run.places * into * run.compute:
            x = self.cast(x, run.places * into * run.compute)
        size, flops = into * out * run.compute, 2.0 * into * out * run.places
        scales = round(into * out * run.scale_bytes)
        matrix = tape.add(OpWork.pointwise, (), size, forward_scratch=scales)
        return tape.add(
            OpWork.product,
            (x, matrix, *holds),
            run.places * out * run.compute,
            gradients=(x,),
            scratch=size,
            packed=True,
            kept_by_selective=self._kept_by_selective(),
            flops=flops,
            backward_flops=flops * tape.trained[x],
        )

    def rounded_product(self, x: int, into: int, out: int, holds: tuple[int, ...]) -> int:
        """Writes a product of what is rounded to integers and back, and again for backward.

        It keeps what a plain product keeps; compiled, what is rounded and what is out of range as
        well. Scales are three numbers for each group; torch's own operators pass fourteen times
        over what is rounded, and over a gradient that is masked.
        """
        run, tape = self.run, self.tape
        read, made, weights = run.places * into, run.places * out, into * out
        matrix, rounds, held = weights * run.compute, run.rounds_inputs, weights * run.held
        scales = 3 * FP32 * weights // run.group, 3 * FP32 * run.places
        rounding = self._rounded(weights, held, scales[0])
        of_x, of_weight = read * run.compute, weights * run.compute
        given = of_x if rounds or tape.sizes[x] != of_x else 0
        giving = self._rounded(read, tape.sizes[x], scales[1]) if rounds else given
        if rounds:
            passing = _gradient_mask_bytes(read, tape.sizes[x], scales[1])
        else:
            passing = tape.sizes[x] if given else 0
        summed = tape.sizes[x] + of_weight
        passes = 14 * FP32 * (weights + read * rounds)
        flops = 2.0 * weights * run.places
        return tape.add(
            OpWork.product,
            (x, *holds),
            made * run.compute,
            saved=(x,),
            gradients=(x,),
            weight=(held, held),
            weight_first=False,
            extra=self._kept_compiled(x, read, weights) if run.compiled else (),
            forward_scratch=max(given + matrix, max(giving, given + rounding) - made * run.compute),
            scratch=max(
                rounding,
                matrix + of_x,
                of_x + passing,
                tape.sizes[x] + giving,
                summed + given,
                summed + _gradient_mask_bytes(weights, held, scales[0]),
            )
            - tape.sizes[x]
            - held,
            casts=(passes, 2 * passes),
            kept_by_selective=self._kept_by_selective(),
            flops=flops,
            backward_flops=2 * flops,
        )

    def _kept_compiled(self, x: int, read: int, weights: int) -> tuple[int, ...]:
        """Returns what a compiled product with rounded numbers keeps besides, a byte a mask."""
        run = self.run
        kept = [weights * run.compute, weights]
        if run.rounds_inputs and x not in self._masked:
            made = [op for op in self.tape.operators if x in op.writes]
            kept += [read, read * run.compute * (made[0].work is not OpWork.pointwise)]
            self._masked.add(x)
        return (*kept,)

    def _rounded(self, count: int, size: int, scales: int) -> int:
        """Returns the bytes that rounding takes of numbers of ``size`` bytes in all."""
        wide = count * FP32
        if size < wide:
            return wide + size + scales
        return wide + max(scales, count * self.run.compute * (self.run.compute < FP32))

    def cast(self, x: int, size: int) -> int:
        """Writes how numbers come into another format, of ``size`` bytes in all."""
        return self.tape.add(OpWork.pointwise, (x,), size)

    def _kept_by_selective(self) -> bool:
        """Returns whether selective recomputation keeps the next product."""
        self._products += 1
        return self._products % 2 == 1 or not self.run.every_second


def _gradient_mask_bytes(count: int, size: int, scales: int) -> int:
    """Returns what a gradient of ``count`` numbers, of ``size`` bytes at last, needs to be masked.

    Their levels in fp32 and two answers to whether each is out of range; then one, and itself.
    """
    wide = count * FP32
    return wide + count + max(count, size if size < wide else 0) + scales
