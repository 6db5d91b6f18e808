"""Models of the transformers library, tiny, trained through the backend against eager."""

import pytest
import torch

from tests.models.support import assert_agrees

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

transformers = pytest.importorskip("transformers", reason="needs the 'models' extra: pip install .[models]")

VOCABULARY = 61


def ids(n, length):
    return torch.randint(2, VOCABULARY, (n, length))


def images(n):
    return {"pixel_values": torch.randn(n, 3, 32, 32), "labels": torch.randint(0, 2, (n,))}


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}

MODELS = {
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
            )
        ),
        lambda n: {"input_ids": ids(n, 9), "labels": ids(n, 9)},
    ),
    "bert": (
        lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **SMALL, **NO_DROPOUT)
        ),
        lambda n: {"input_ids": ids(n, 9), "attention_mask": torch.ones(n, 9, dtype=torch.int64), "labels": ids(n, 9)},
    ),
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        ),
        lambda n: {"input_ids": ids(n, 9), "labels": ids(n, 6)},
    ),
    "llama": (
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCABULARY, num_key_value_heads=1, max_position_embeddings=32, **SMALL
            )
        ),
        lambda n: {"input_ids": ids(n, 9), "labels": ids(n, 9)},
    ),
    "vit": (
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(image_size=32, patch_size=8, **SMALL, **NO_DROPOUT)
        ),
        images,
    ),
    "resnet": (
        lambda: transformers.ResNetForImageClassification(
            transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
        ),
        images,
    ),
}  # fmt: skip


class LossAndLogits(torch.nn.Module):
    """The model with positional tensors in and tensors out, and without what a cache would add."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values):
        out = self.model(**dict(zip(self.names, values, strict=True)))
        return out.loss, out.logits


def check(name, sizes, **how):
    build, inputs = MODELS[name]
    batches = [inputs(size) for size in sizes]
    model = LossAndLogits(build().train(), tuple(batches[0]))
    assert_agrees(
        model,
        lambda m: torch.compile(m, backend="fxpasses", **how),
        [tuple(batch.values()) for batch in batches],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_static(name):
    check(name, [2], dynamic=False, options={"compiler": "eager"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "resnet"])
def test_dynamic(name):
    check(name, [2, 3], dynamic=True, options={"compiler": "eager"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama"])
def test_inductor(name):
    check(name, [2], dynamic=False)
