"""Walks a tape backward and counts what is alive: operators one by one, or a compiler's kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from scalewise.models.op_graph import Op, OpGraph

Buffers = tuple[int, ...]


class BackwardLiveness:
    """Counts bytes through the operators, in reverse.

    ``saves``: how often each tensor is saved. ``leftover``: bytes that nothing in it lets go.
    ``fresh``, ``stepped``: see ``Way``. ``away``: what is brought back where it is first read.

    A gradient is one buffer, or what a compiler's kernel is yet to make it of: several buffers, and
    tokens of operators whose saved tensors it reads. These are held until the kernel ends.
    """

    def __init__(
        self,
        tape: OpGraph,
        saves: Mapping[int, int],
        leftover: int,
        *,
        fresh: bool,
        away: frozenset[int] = frozenset(),
        stepped: float,
    ) -> None:
        self._tape, self._fresh, self._stepped = tape, fresh and stepped < 0, stepped
        self._saves, self._away = dict(saves), set(away)
        self.now = leftover + sum(tape.sizes[place] for place in saves if place not in away)
        self.peak = self.held = 0
        self._gradient: dict[int, Buffers] = {}
        self._sizes: list[int] = []
        self._owners: list[int] = []
        self._tokens: dict[int, Op] = {}
        self._split: set[int] = set()  # buffers that a kernel makes several gradients of
        self._done: set[int] = set()  # tokens of kernels that write over no split buffer any more
        kernels = [operator for operator in tape.operators if operator.kernel]
        others = [operator for operator in tape.operators if not operator.kernel]
        read = {place for operator in others for place in (*operator.reads, *operator.saved)}
        self._of_kernels = {place for operator in kernels for place in operator.writes}
        self._inner = self._of_kernels - read

    def run(self, operators: Sequence[Op]) -> None:
        """Goes through the last operators of the tape, from the gradient of what comes out."""
        tape = self._tape
        output = tape.operators[-1].writes[0]
        self._gradient[output] = (self._make(tape.sizes[output]),)
        for operator in reversed(operators):
            if operator.writes[0] in self._gradient:
                self._through(operator)

    def _through(self, operator: Op) -> None:
        sizes = self._tape.sizes
        arrived = self._gradient.pop(operator.writes[0])
        for place in self._away.intersection(operator.saved):
            self._grow(sizes[place])
        self._away.difference_update(operator.saved)
        if operator.hands_over:
            self._let_go(operator)
        computed, held = operator.weight
        if computed and operator.weight_first:
            self._grow(computed)
        make = self._by_kernel if operator.kernel else self._one_by_one
        made = [*make(operator, arrived)]
        if computed and not operator.weight_first:
            self._grow(computed)
        self.peak = max(self.peak, self.now + operator.scratch)
        self._drop(arrived)
        if not operator.hands_over and not operator.kernel:
            self._let_go(operator)
        for place, buffers in made:
            self._add(place, buffers)
        if computed:
            if held != computed:
                self._grow(held)
                self.now -= computed
            self.peak = max(self.peak, self.now + round(held * max(0.0, self._stepped)))
            self.held += held * self._fresh
            self.now -= held * (not self._fresh)

    def _one_by_one(self, operator: Op, arrived: Buffers) -> Iterator[tuple[int, Buffers]]:
        for place in operator.gradients:
            size = self._tape.sizes[place]
            shared = operator.shares and size == self._sizes[arrived[0]]
            yield place, self._own(arrived) if shared else (self._make(size),)

    def _by_kernel(self, operator: Op, arrived: Buffers) -> Iterator[tuple[int, Buffers]]:
        """Yields gradients: of what is in no memory, all that a kernel makes them of."""
        token = self._make(0)
        self._tokens[token] = operator
        if operator.anew:
            self._done.add(token)
        if len(operator.gradients) > 1:
            self._split.update(arrived)
        begun = (*arrived, token)
        as_it_is = arrived if operator.shares and len(arrived) == 1 else ()
        shared = as_it_is
        for place in operator.gradients:
            if place in self._inner:
                yield place, self._own(as_it_is or begun)
            elif shared:
                yield place, self._own(shared)
            else:
                written = (self._written(place, begun),)
                shared = written if operator.shares else ()
                yield place, written
        self._drop((token,))

    def _written(self, place: int, begun: Buffers) -> int:
        """Returns the buffer that a kernel writes a gradient to, which it may have read."""
        size, before = self._tape.sizes[place], self._gradient.get(place, ())
        if len(before) == 1 and place not in self._of_kernels and self._owners[before[0]] == 1:
            del self._gradient[place]
            return before[0]
        over = self._done.isdisjoint(begun)
        for each in begun:
            free = self._owners[each] == 1 and (over or each not in self._split)
            if free and self._sizes[each] == size:
                if each in self._split:
                    self._done.update(self._tokens.keys() & begun)
                return self._own((each,))[0]
        return self._make(size)

    def _add(self, place: int, buffers: Buffers) -> None:
        """Adds to the gradient of a place what one of its readers gives."""
        before = self._gradient.get(place)
        if before is not None and place in self._of_kernels:
            buffers = (*before, *buffers)
        elif before is not None:
            total = self._make(self._tape.sizes[place])
            self._drop(before)
            self._drop(buffers)
            buffers = (total,)
        self._gradient[place] = buffers

    def _let_go(self, operator: Op) -> None:
        for place in operator.saved:
            self._saves[place] -= 1
            if not self._saves[place]:
                self.now -= self._tape.sizes[place]

    def _make(self, size: int) -> int:
        self._sizes.append(size)
        self._owners.append(1)
        self._grow(size)
        return len(self._sizes) - 1

    def _own(self, buffers: Buffers) -> Buffers:
        for buffer in buffers:
            self._owners[buffer] += 1
        return buffers

    def _drop(self, buffers: Buffers) -> None:
        for buffer in buffers:
            self._owners[buffer] -= 1
            if not self._owners[buffer]:
                self.now -= self._sizes[buffer]
                if buffer in self._tokens:
                    self._let_go(self._tokens[buffer])

    def _grow(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
