"""Transformers models on which library passes are measured: two to four layers, random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._library_models import Case
from benchmarks._transformers import build


class NextToken(nn.Module):
    """The logits of the last position, as one step of generation needs them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)[:, -1]


class LanguageLoss(nn.Module):
    """The loss over all positions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())


class Logits(nn.Module):
    """The logits for images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model(pixel_values=pixels).logits


class PaddedLoss(nn.Module):
    """The loss of a batch whose last sequence is padded."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, attention_mask=mask).logits
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class CachedToken(nn.Module):
    """The logits of one more token, given cached keys and values: a step of generation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor, *cached: Tensor) -> Tensor:
        from transformers import DynamicCache

        cache = DynamicCache(zip(cached[::2], cached[1::2], strict=True))
        return self.model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True).logits


_GPT2: dict[str, Any] = {"n_embd": 256, "n_head": 4, "n_positions": 256, "vocab_size": 8000}
_LLAMA: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 1000,
}
_BERT: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
_BERT_BASE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "vocab_size": 8000,
    "max_position_embeddings": 512,
}
_VIT: dict[str, Any] = {
    "image_size": 112,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_attention_heads": 3,
    "num_hidden_layers": 3,
}


def _next_token() -> tuple[nn.Module, tuple[Tensor, ...]]:
    built = build("gpt2", "sdpa", batch=1, length=256, training=False, **_GPT2)
    return NextToken(built.model), built.inputs


def _loss(name: str, **how: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    built = build(name, "sdpa", **how)
    return LanguageLoss(built.model), built.inputs


def _padded_llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    built = build("llama", "sdpa", length=256, **_LLAMA)
    mask = torch.ones_like(built.inputs[0])
    mask[-1, 200:] = 0
    return PaddedLoss(built.model.model), (*built.inputs, mask)


def _cached_llama(length: int = 1024) -> tuple[nn.Module, tuple[Tensor, ...]]:
    built = build("llama", "sdpa", training=False, **{**_LLAMA, "max_position_embeddings": 2048})
    mask = torch.ones(2, length + 1, dtype=torch.int64)
    mask[-1, :200] = 0
    cached = (torch.randn(2, 2, length, 32) for _ in range(4))
    return CachedToken(built.model.model), (torch.randint(1000, (2, 1)), mask, *cached)


def _vit(training: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    built = build("vit", "sdpa", training=training, **_VIT)
    return built.model, (torch.randn(4, 3, 112, 112),)


def _bert() -> tuple[nn.Module, tuple[Tensor, ...]]:
    built = build("bert", "eager", batch=4, length=64, **_BERT)
    return built.model, built.inputs


def _t5() -> tuple[nn.Module, tuple[Tensor, ...]]:
    built = build("t5", batch=4, length=128, d_model=256, d_ff=1024, d_kv=64)
    return built.model, built.inputs


def _dropout(name: str, **how: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Build a model with the width of its smallest published version and a reduced vocabulary."""
    built = build(name, "sdpa", **how)
    return built.model, built.inputs


def _segformer(size: int = 256) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Build the smallest published version, B0, whose sizes are the default ones."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    model = SegformerForSemanticSegmentation(SegformerConfig(num_labels=150)).eval()
    return Logits(model), (torch.randn(1, 3, size, size),)


def _written_attention(name: str, length: int, **how: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Build a model with the attention that its code writes out, without ``scaled_dot_product_attention``."""
    built = build(name, "eager", batch=2, length=length, training=False, **how)
    return built.model, built.inputs


REAL_CASES: dict[str, tuple[Case, ...]] = {
    "hoist_slices": (
        Case("gpt2, 2 layers, next token after 256", _next_token, training=False),
        Case("vit, 3 layers, 4 images", lambda: _vit(False), training=False),
    ),
    "move_matmul_before_gather": (
        Case("SegFormer B0, an image of 256, inference", _segformer, training=False),
    ),
    "skip_zero_rows": (
        Case("vit, 3 layers, 4 images, training", lambda: _vit(True), partner="hoist_slices"),
    ),
    "remove_repeat_kv": (
        Case("llama, 2 layers, 2 x 256 tokens, one padded, training", _padded_llama),
        Case("llama, 2 layers, one token after 2 x 1024, one padded", _cached_llama, training=False),
    ),
    "fuse_attention": (
        Case(
            "bert, 2 layers, 2 x 512 tokens, inference",
            lambda: _written_attention("bert", 512, max_position_embeddings=512, **_BERT),
            training=False,
        ),
        Case(
            "gpt2, 2 layers, 2 x 256 tokens, inference",
            lambda: _written_attention("gpt2", 256, **_GPT2),
            training=False,
        ),
        Case(
            "gpt_neox, 2 layers, 2 x 1024 tokens, inference",
            lambda: _written_attention("gpt_neox", 1024, max_position_embeddings=1024, **_BERT),
            training=False,
        ),
    ),
    "pack_saved_masks": (
        Case("bert, 2 layers, 4 x 64 tokens, dropout, training", _bert),
        Case("t5, 2 + 2 layers, 4 x 128 tokens, dropout, training", _t5),
    ),
    "pack_dropout_rng": (
        Case(
            "bert, 2 layers of 768, 4 x 128 tokens, training",
            lambda: _dropout("bert", batch=4, length=128, **_BERT_BASE),
        ),
        Case(
            "gpt2, 2 layers of 768, 2 x 256 tokens, training",
            lambda: _dropout("gpt2", length=256, **{**_GPT2, "n_embd": 768, "n_head": 12}),
        ),
        Case(
            "t5, 2 + 2 layers of 512, 2 x 256 tokens, training",
            lambda: _dropout("t5", length=256, d_model=512, d_ff=2048, d_kv=64, num_heads=8, vocab_size=4000),
        ),
    ),
    "downcast_saved_activations": (
        Case("llama, 2 layers, 2 x 256 tokens, training", lambda: _loss("llama", length=256, **_LLAMA)),
    ),
    "chunk_logits": (
        Case(
            "gpt2, 2 layers, 2 x 256 tokens, vocabulary 16000, training",
            lambda: _loss("gpt2", length=256, **{**_GPT2, "vocab_size": 16000}),
        ),
    ),
}
