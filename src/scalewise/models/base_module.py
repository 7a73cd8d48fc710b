"""What a layout asks of every model's living module."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from scalewise.adapters.target_modules import is_adapter_weight
from scalewise.models.init import PackedMatrix


class ModelModule(nn.Module):
    """A model or a part of it; made on the meta device and cut there.

    ``forward(x, labels_BT=None, places_BS=None)``: a last part that was given ``loss`` returns the
    summed loss of the labels instead of logits. ``gather_tokens`` makes a rank's part of the tokens
    whole
    for it. ``places_BS`` are those of whole rows where several texts lie in one: each attends to
    itself alone, and begins at place 0.
    """

    loss: Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor] | None = None
    """Takes what gives logits, ``x_BTW`` and ``labels_BT``."""
    gather_tokens: Callable[[Tensor], Tensor] = staticmethod(lambda x_BTW: x_BTW)

    def own_parameters(self) -> Iterator[tuple[str, nn.Parameter | PackedMatrix]]:
        """Yields the model's parameters by their names, whatever an adapter has put around them.

        What is held of a packed matrix is one.
        """
        for name, parameter in self.named_parameters():
            holder, _, kind = name.rpartition(".")
            layer = self.get_submodule(holder)
            if is_adapter_weight(name) or (isinstance(layer, PackedMatrix) and "scale" in kind):
                continue
            packed = layer if isinstance(layer, PackedMatrix) and kind == "weight" else None
            yield name.replace(".base_layer.", "."), packed or parameter

    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """Returns the blocks, in order: what is sharded, compiled and checkpointed one by one."""

    @abstractmethod
    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Yields what is read to make logits of what ``loss`` is given."""

    @abstractmethod
    def replace_attention(self, make: Callable[[float], nn.Module]) -> None:
        """Puts another attention into every block; ``make`` is told its dropout."""

    @abstractmethod
    def add_prompt_tokens(self, tokens: int) -> None:
        """Puts so many vectors, made on the meta device, before the embedded tokens of rows."""

    @abstractmethod
    def add_prefix_kv(self, tokens: int) -> None:
        """Puts so many keys and values, made on the meta device, before those of each layer."""

    @abstractmethod
    def set_position_ids(self, places_T: Tensor) -> None:
        """Says which places of a row the tokens have: 0, 1, 2... unless rows are shared out."""

    def init_buffers(self) -> None:
        """Fills what no checkpoint holds, where moving the module does not: nothing here."""
