"""Small transformers models with random weights, built from their configurations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_VOCABULARY = 61
_TEXT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_IMAGE = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_labels": 3,
}
_BOTH = ("input_ids", "decoder_input_ids")

_TABLE: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    # name: (model class, configuration class, arguments, inputs)
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": _VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}, ("input_ids",)),
    "gpt_neo": ("GPTNeoForCausalLM", "GPTNeoConfig", {**_TEXT, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4}, ("input_ids",)),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _TEXT, ("input_ids",)),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4, "vocab_size": _VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}, ("input_ids",)),
    "opt": ("OPTForCausalLM", "OPTConfig", {**_TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}, ("input_ids",)),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**_TEXT, "n_layer": 2, "n_head": 4}, ("input_ids",)),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED, ("input_ids",)),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 5}, ("input_ids",)),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED, ("input_ids",)),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 8}, ("input_ids",)),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_GROUPED, "head_dim": 8}, ("input_ids",)),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_GROUPED, "head_dim": 8, "sliding_window": 5}, ("input_ids",)),
    "phi": ("PhiForCausalLM", "PhiConfig", _TEXT, ("input_ids",)),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", _GROUPED, ("input_ids",)),
    "falcon": ("FalconForCausalLM", "FalconConfig", _TEXT, ("input_ids",)),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", _TEXT, ("input_ids",)),
    "bert": ("BertForMaskedLM", "BertConfig", _TEXT, ("input_ids", "attention_mask")),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", _TEXT, ("input_ids",)),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**_TEXT, "embedding_size": 16}, ("input_ids", "attention_mask")),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**_TEXT, "embedding_size": 16}, ("input_ids",)),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", {"vocab_size": _VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}, ("input_ids",)),
    "deberta": ("DebertaV2ForMaskedLM", "DebertaV2Config", {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, ("input_ids",)),
    "t5": ("T5ForConditionalGeneration", "T5Config", {"vocab_size": _VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}, _BOTH),
    "bart": ("BartForConditionalGeneration", "BartConfig", {"vocab_size": _VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": 1}, _BOTH),
    "vit": ("ViTForImageClassification", "ViTConfig", _IMAGE, ("pixel_values",)),
    "deit": ("DeiTForImageClassification", "DeiTConfig", _IMAGE, ("pixel_values",)),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", _IMAGE, ("pixel_values",)),
    "beit": ("BeitForImageClassification", "BeitConfig", _IMAGE, ("pixel_values",)),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "num_labels": 3}, ("pixel_values",)),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3}, ("pixel_values",)),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", "MobileNetV2Config", {"image_size": 32, "num_labels": 3, "depth_multiplier": 0.35}, ("pixel_values",)),
    "poolformer": ("PoolFormerForImageClassification", "PoolFormerConfig", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": 3}, ("pixel_values",)),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"vocab_size": _VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}, ("input_ids",)),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4}, ("input_ids",)),
    "clip_text": ("CLIPTextModel", "CLIPTextConfig", _TEXT, ("input_ids",)),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", {**_TEXT, "conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}, ("input_values",)),
}  # fmt: skip

NAMES = tuple(_TABLE)


@dataclass(frozen=True)
class Built:
    """A module that takes positional tensors and returns its first floating-point result, with inputs."""

    model: nn.Module
    inputs: tuple[Tensor, ...]


def build(
    name: str,
    attention: str = "eager",
    batch: int = 2,
    length: int = 12,
    training: bool = True,
    **changes: Any,
) -> Built:
    """Build one of :data:`NAMES`.

    Args:
        name: the model's name.
        attention: the attention implementation in its configuration: ``"eager"`` or ``"sdpa"``.
        batch: the batch size of the inputs.
        length: the length of token sequences.
        training: whether dropout and batch statistics are on.
        changes: other arguments of the configuration.
    """
    import transformers

    model_class, config_class, arguments, inputs = _TABLE[name]
    config = getattr(transformers, config_class)(**{**arguments, **changes})
    config._attn_implementation = attention
    config.use_cache = False
    vocabulary = getattr(config, "vocab_size", None) or _VOCABULARY
    model = getattr(transformers, model_class)(config).train(training)
    made = tuple(_input(kind, batch, length, vocabulary) for kind in inputs)
    return Built(_Positional(model, inputs), made)


def _input(kind: str, batch: int, length: int, vocabulary: int) -> Tensor:
    if kind == "pixel_values":
        return torch.randn(batch, 3, 32, 32)
    if kind == "input_values":
        return torch.randn(batch, 40 * length)
    if kind == "attention_mask":
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[-1, -2:] = 0
        return mask
    return torch.randint(2, vocabulary, (batch, length))


class _Positional(nn.Module):
    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values: Tensor) -> Tensor:
        out = self.model(**dict(zip(self.names, values, strict=True)))
        leaves = tree_leaves(tuple(out.values()))
        return next(v for v in leaves if isinstance(v, Tensor) and v.is_floating_point())


Builder = Callable[[], Built]
