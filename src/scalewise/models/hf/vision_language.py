"""Torch module of a Hugging Face vision-language model such as BLIP-2.

Shape suffixes: B batch, C color channels, H height, W width, Q image tokens, T text tokens, D
features, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from scalewise.compat.hugging_face import replaced_mask_checks
from scalewise.models.hf import encoder_decoder
from scalewise.models.hf.encoder_decoder import MultiStackModule
from scalewise.models.hf.model_info import VisionInfo

LANGUAGE_MODEL = "language_model"


class VisionLanguageModule(MultiStackModule):
    """Vision-language model: ``pixels_BCHW, labels_BT -> logits_BTV``, computed by transformers.

    Pixels are bytes, normalized with the constants of CLIP. The language model reads the image
    tokens and a BOS token. A decoder-only language model continues with the text. Of an
    encoder-decoder language model, the encoder reads both and the decoder writes the text.

    Attributes:
        tokens_by_layer: Image positions that a layer is applied to, for layers that read no text.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, find_stacks(model))
        self.tokens_by_layer: dict[str, float] = {}
        for name, values in (("mean", OPENAI_CLIP_MEAN), ("std", OPENAI_CLIP_STD)):
            scaled_C11 = 255 * torch.tensor(values).view(-1, 1, 1)
            self.register_buffer(name, scaled_C11, persistent=False)
            self.original_buffers[name] = scaled_C11.clone()

    def find_input_embedding(self) -> nn.Module:
        """Return the token embedding of the language model."""
        embedding: nn.Module = cast(Any, self.head).language_model.get_input_embeddings()
        return embedding

    def is_language_layer(self, name: str) -> bool:
        """Return whether a layer is part of the language model."""
        return self.hf_name(f"{name}.").startswith(LANGUAGE_MODEL)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the language model has an encoder and a decoder."""
        return bool(cast(Any, self.head).language_model.config.is_encoder_decoder)

    def forward(
        self, x: Tensor, labels_BT: Tensor | None = None, positions_BS: Tensor | None = None
    ) -> Tensor:
        """Return ``logits_BTV`` of the labels, which the model reads shifted by one position."""
        assert labels_BT is not None, "labels are required"
        assert positions_BS is None, "sequence packing is not supported"
        logits = self.decode_text(self.encode_images(x), labels_BT)
        return logits if self.loss is None else self.loss(lambda x: x, logits, labels_BT)

    def encode_images(self, pixels_BCHW: Tensor) -> Tensor:
        """Return ``tokens_BQD``, the image tokens that the language model reads."""
        normalized_BCHW = (pixels_BCHW - self.mean) / self.std
        with replaced_mask_checks(**MASKS):
            features = cast(Any, self.head).get_image_features(normalized_BCHW)
        tokens_BQD: Tensor = features.pooler_output
        return tokens_BQD

    def decode_text(self, tokens_BQD: Tensor, labels_BT: Tensor) -> Tensor:
        """Return ``logits_BTV`` of a text that follows the image tokens."""
        model = cast(Any, self.head).language_model
        bos_B1 = torch.full_like(labels_BT[:, :1], model.config.bos_token_id)
        if self.is_encoder_decoder:
            text_BT = bos_B1
            options = {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels_BT)}
        else:
            text_BT = torch.cat([bos_B1, labels_BT[:, :-1].clamp(min=0)], dim=1)
            options = {"logits_to_keep": labels_BT.shape[1]}
        text_BTD = self.find_input_embedding()(text_BT)
        inputs_BTD = torch.cat([tokens_BQD.to(text_BTD.dtype), text_BTD], dim=1)
        with replaced_mask_checks(**MASKS):
            logits: Tensor = model(inputs_embeds=inputs_BTD, use_cache=False, **options).logits
        return logits


MASKS: dict[str, Any] = {
    **encoder_decoder.MASKS,
    "ignore_bidirectional": lambda *_, **__: True,
    "find_packed": lambda *_, **__: None,
}
"""Replacements of transformers' checks for padding and packed sequences, neither of which occurs.
The checks would synchronize with the device."""


def find_stacks(model: PreTrainedModel) -> dict[str, int]:
    """Return the number of blocks of each stack, by name of the list, in execution order.

    Raises:
        ValueError: A part has no single outermost list of blocks of one class.
    """
    stacks: dict[str, int] = {}
    language_model = cast(Any, model).language_model
    has_encoder = language_model.config.is_encoder_decoder
    for part in ("vision_model", "qformer", *(() if has_encoder else (LANGUAGE_MODEL,))):
        lists = {
            name: module
            for name, module in model.named_modules()
            if name.startswith(f"{part}.") and isinstance(module, nn.ModuleList)
        }
        outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
        if len(outer) != 1 or len({type(block) for block in lists[outer[0]]}) != 1:
            raise ValueError(f"{part} has no single list of blocks of one class")
        stacks[outer[0]] = len(lists[outer[0]])
    language_stacks = encoder_decoder.find_stacks(language_model) if has_encoder else {}
    return stacks | {f"{LANGUAGE_MODEL}.{name}": count for name, count in language_stacks.items()}


def probe_token_counts(config: PretrainedConfig) -> tuple[int, int]:
    """Return the tokens of a probe forward pass that an encoder reads, and those of the text.

    The two counts differ, so that the layers of the encoder can be recognized.
    """
    encoder_tokens: int = config.num_query_tokens + 1
    return encoder_tokens, encoder_tokens + 1


def image_processor(side: int) -> dict[str, object]:
    """Return the ``AutoImageProcessor`` configuration that preprocesses images as the module."""
    return {
        "image_processor_type": "BlipImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": side, "width": side},
        "resample": 3,  # Pillow's Resampling.BICUBIC
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": OPENAI_CLIP_MEAN,
        "image_std": OPENAI_CLIP_STD,
    }


def vision_info(config: PretrainedConfig, tokens_by_layer: dict[str, float]) -> VisionInfo:
    """Return facts about the image input; ``tokens_by_layer``: image positions of each layer."""
    vision, qformer = config.vision_config, config.qformer_config
    patches = (vision.image_size // vision.patch_size) ** 2 + 1
    tokens: int = config.num_query_tokens
    cross_layers = len(range(0, qformer.num_hidden_layers, qformer.cross_attention_frequency))
    qformer_pairs = qformer.num_hidden_layers * tokens**2 + cross_layers * tokens * patches
    pairs = (
        vision.num_hidden_layers * patches**2 * vision.hidden_size
        + qformer_pairs * qformer.hidden_size
    )
    token_counts = (
        (0, probe_token_counts(config)[0]) if config.text_config.is_encoder_decoder else (tokens, 0)
    )
    return VisionInfo(vision.image_size, *token_counts, tokens_by_layer, pairs)
