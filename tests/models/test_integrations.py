"""Packages that train models, given one that is compiled here; each is skipped where it is not installed."""

import pytest
import torch

import fxpasses

OPTIONS = {"compiler": "eager"}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    fxpasses.reset_stats()


def test_trainer_of_transformers(tmp_path):
    pytest.importorskip("accelerate", reason="needs the package accelerate")
    transformers = pytest.importorskip("transformers", reason="needs the extra 'models'")

    def trained(compiled):
        torch.manual_seed(0)
        sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 8}
        dropout = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
        config = transformers.GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0)
        model = transformers.GPT2LMHeadModel(config)
        if compiled:
            model.compile(backend="fxpasses", options=OPTIONS)
        tokens = [torch.randint(0, 32, (8,)) for _ in range(8)]
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
        )  # fmt: skip
        data = [{"input_ids": ids, "labels": ids} for ids in tokens]
        return transformers.Trainer(model, arguments, train_dataset=data).train().training_loss

    assert trained(compiled=True) == pytest.approx(trained(compiled=False), rel=1e-5)
    assert fxpasses.stats().backward > 0


def test_accelerator():
    accelerate = pytest.importorskip("accelerate", reason="needs the package accelerate")

    def trained(compiled):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        if compiled:
            model = torch.compile(model, backend="fxpasses", options=OPTIONS)
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for _ in range(2):
            loss = model(torch.randn(3, 4)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    assert trained(compiled=True) == pytest.approx(trained(compiled=False), rel=1e-5)
    assert fxpasses.stats().backward == 1
