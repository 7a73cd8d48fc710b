"""Interface of model modules that parallelism strategies and adapters use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor, nn

from scalewise.models.base import is_adapter_weight
from scalewise.models.init import PackedMatrix


class ModelModule(nn.Module):
    """A model or one pipeline stage of it, built and sharded on the meta device.

    ``forward(x, labels_BT=None, positions_BS=None)`` returns logits. The last stage returns the
    summed loss of the labels instead if ``loss`` is set. ``positions_BS`` are the position ids of
    unsharded packed sequences: each text attends to itself alone and starts at position 0.
    """

    loss: Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor] | None = None
    """Loss function ``(head, x_BTW, labels_BT)``; ``head`` maps ``x_BTW`` to ``logits_BTV``."""
    embeds_all_tokens: bool = False
    """Whether the embeddings of all tokens are on each tensor-parallel rank before the first block,
    also under sequence parallelism."""
    gather_tokens: Callable[[Tensor], Tensor] = staticmethod(lambda x_BTW: x_BTW)
    """Gathers the tokens of all ranks from this rank's sequence-parallel shard."""

    def base_parameters(self) -> Iterator[tuple[str, nn.Parameter | PackedMatrix]]:
        """Yield the model's own parameters under their names without an adapter.

        A packed matrix is yielded as one object. Adapter weights are left out.
        """
        for name, parameter in self.named_parameters():
            module_name, _, kind = name.rpartition(".")
            layer = self.get_submodule(module_name)
            if is_adapter_weight(name) or (isinstance(layer, PackedMatrix) and "scale" in kind):
                continue
            packed = layer if isinstance(layer, PackedMatrix) and kind == "weight" else None
            yield name.replace(".base_layer.", "."), packed or parameter

    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """Return the blocks, in order; each is sharded, compiled and checkpointed separately."""

    def replace_linears(
        self, names: Iterable[str], build_layer: Callable[[nn.Linear], nn.Module]
    ) -> None:
        """Replace linear layers of all blocks by the result of ``build_layer``, in place.

        ``names``: layers by name within a block. Blocks of different stacks have different layers.
        """
        for block in self.layers():
            layers = dict(block.named_modules())
            for name in layers.keys() & {*names}:
                layer = layers[name]
                assert isinstance(layer, nn.Linear)
                block.set_submodule(name, build_layer(layer))

    @abstractmethod
    def logits(self, x_BTW: Tensor, *, hooks: bool = True) -> Tensor:
        """Return the ``logits_BTV`` of features.

        Args:
            x_BTW: Features that the head reads.
            hooks: Whether to run the hooks of the head module.
        """

    @abstractmethod
    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that the head reads to compute logits."""

    @abstractmethod
    def replace_attention(self, make: Callable[[float], nn.Module]) -> None:
        """Replace the attention of every block by ``make(dropout)``."""

    @abstractmethod
    def add_prompt_tokens(self, tokens: int) -> None:
        """Insert ``tokens`` prompt vectors, on the meta device, before the embedded tokens."""

    @abstractmethod
    def add_prefix_kv(self, tokens: int) -> None:
        """Insert ``tokens`` keys and values, on the meta device, before those of each layer."""

    @abstractmethod
    def set_position_ids(self, positions_T: Tensor) -> None:
        """Set the positions of this rank's tokens in the sequence; default: 0, 1, 2..."""

    def set_sequence_weight(self, weight: float) -> None:
        """Set the weight of one sequence in losses that the module adds itself.

        By default there are none.
        """

    def init_buffers(self) -> None:
        """Fill the non-persistent buffers after ``to_empty``; by default there are none."""
