"""A model of transformers that reads pictures and writes of them, as BLIP-2.

Shape suffixes: B rows, C colours, H and W pixels, Q tokens of a picture, T of a text, D width,
V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, masking_utils
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from scalewise.models.hf import encoder_decoder
from scalewise.models.hf.model_info import VisionInfo
from scalewise.models.hf.multi_stack import MultiStackModule

WRITER = "language_model"


class VisionLanguageModule(MultiStackModule):
    """``pixels_BCHW, labels_BT -> logits_BTV``, by transformers' own code.

    Pixels are bytes, of which the model reads what CLIP does. A token that begins a text follows
    those of the picture: a language model without an encoder writes on, one with an encoder reads
    so much, and its decoder writes. ``tokens_by_layer`` are the places of a picture that layers
    multiply which read no text.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, find_stacks(model))
        self.tokens_by_layer: dict[str, float] = {}
        for name, numbers in (("mean", OPENAI_CLIP_MEAN), ("std", OPENAI_CLIP_STD)):
            found_C11 = 255 * torch.tensor(numbers).view(-1, 1, 1)
            self.register_buffer(name, found_C11, persistent=False)
            self.original_buffers[name] = found_C11.clone()

    def find_input_embedding(self) -> nn.Module:
        """Returns what embeds tokens."""
        found: nn.Module = cast(Any, self.head).language_model.get_input_embeddings()
        return found

    def is_language_layer(self, name: str) -> bool:
        """Returns whether a layer is of the language model."""
        return self.hf_name(f"{name}.").startswith(WRITER)

    @property
    def is_encoder_decoder(self) -> bool:
        """Returns whether its language model is an encoder with a decoder."""
        return bool(cast(Any, self.head).language_model.config.is_encoder_decoder)

    def forward(
        self, x: Tensor, labels_BT: Tensor | None = None, places_BS: Tensor | None = None
    ) -> Tensor:
        """Returns ``logits_BTV`` of a text, which the language model reads one place on."""
        assert labels_BT is not None, "a picture is told in words"
        assert places_BS is None, "packed rows are refused"
        logits = self.decode_text(self.encode_images(x), labels_BT)
        return logits if self.loss is None else self.loss(lambda each: each, logits, labels_BT)

    def encode_images(self, pixels_BCHW: Tensor) -> Tensor:
        """Returns ``tokens_BQD``, what the language model reads of pictures."""
        found_BCHW = (pixels_BCHW - self.mean) / self.std
        with patch.multiple(masking_utils, **MASKS):
            found: Tensor = cast(Any, self.head).get_image_features(found_BCHW).pooler_output
        return found

    def decode_text(self, tokens_BQD: Tensor, labels_BT: Tensor) -> Tensor:
        """Returns ``logits_BTV`` of a text behind what was seen."""
        model = cast(Any, self.head).language_model
        first_B1 = torch.full_like(labels_BT[:, :1], model.config.bos_token_id)
        if self.is_encoder_decoder:
            text_BT = first_B1
            how = {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels_BT)}
        else:
            text_BT = torch.cat([first_B1, labels_BT[:, :-1].clamp(min=0)], dim=1)
            how = {"logits_to_keep": labels_BT.shape[1]}
        text_BTD = self.find_input_embedding()(text_BT)
        read_BTD = torch.cat([tokens_BQD.to(text_BTD.dtype), text_BTD], dim=1)
        with patch.multiple(masking_utils, **MASKS):
            logits: Tensor = model(inputs_embeds=read_BTD, use_cache=False, **how).logits
        return logits


MASKS: dict[str, Any] = {
    **encoder_decoder.MASKS,
    "_ignore_bidirectional_mask_sdpa": lambda *_, **__: True,
    "find_packed_sequence_indices": lambda *_, **__: None,
}
"""What is known here: all of a picture is there, and rows hold one text each. transformers would
wait for the device to see so."""


def find_stacks(model: PreTrainedModel) -> dict[str, int]:
    """Returns the names of the lists of blocks, in the order of the model, and how many each has.

    Raises ``ValueError`` where a part has not one outermost list of blocks of one kind.
    """
    found: dict[str, int] = {}
    writer = cast(Any, model).language_model
    encodes = writer.config.is_encoder_decoder
    for part in ("vision_model", "qformer", *(() if encodes else (WRITER,))):
        lists = {
            name: held
            for name, held in model.named_modules()
            if name.startswith(f"{part}.") and isinstance(held, nn.ModuleList)
        }
        outer = [name for name in lists if not any(name.startswith(f"{it}.") for it in lists)]
        if len(outer) != 1 or len({type(block) for block in lists[outer[0]]}) != 1:
            raise ValueError(f"its {part} has not one list of blocks of one kind")
        found[outer[0]] = len(lists[outer[0]])
    both = encoder_decoder.find_stacks(writer) if encodes else {}
    return found | {f"{WRITER}.{name}": blocks for name, blocks in both.items()}


def probe_token_counts(config: PretrainedConfig) -> tuple[int, int]:
    """Returns the tokens that an encoder reads of a picture, and those of a text told from them."""
    read: int = config.num_query_tokens + 1
    return read, read + 1


def image_processor(side: int) -> dict[str, object]:
    """Returns what transformers' ``AutoImageProcessor`` does with pictures, as the module does."""
    return {
        "image_processor_type": "BlipImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": side, "width": side},
        "resample": 3,  # Pillow's number of bicubic
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": OPENAI_CLIP_MEAN,
        "image_std": OPENAI_CLIP_STD,
    }


def vision_info(config: PretrainedConfig, tokens_by_layer: dict[str, float]) -> VisionInfo:
    """Returns what a model does with a picture; ``tokens_by_layer``: tokens of it that layers
    multiply."""
    sees, asks = config.vision_config, config.qformer_config
    patches = (sees.image_size // sees.patch_size) ** 2 + 1
    tokens: int = config.num_query_tokens
    crossing = len(range(0, asks.num_hidden_layers, asks.cross_attention_frequency))
    asked = asks.num_hidden_layers * tokens**2 + crossing * tokens * patches
    pairs = sees.num_hidden_layers * patches**2 * sees.hidden_size + asked * asks.hidden_size
    read = (
        (0, probe_token_counts(config)[0]) if config.text_config.is_encoder_decoder else (tokens, 0)
    )
    return VisionInfo(sees.image_size, *read, tokens_by_layer, pairs)
