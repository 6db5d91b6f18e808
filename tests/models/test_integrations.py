"""Packages that train models, given one that is compiled here; each is skipped where it is not installed."""

import copy
import importlib

import pytest
import torch

import fxpasses
from fxpasses.integrations.accelerate import register_backend

OPTIONS = {"compiler": "eager"}


def package(name):
    """The package; the test is skipped where it is not installed, or one that it needs was built for another torch."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"needs the package {name}: {error}")


def gradients(model, *inputs):
    model(*inputs).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    fxpasses.reset_stats()


@pytest.mark.slow
def test_trainer_of_transformers(tmp_path):
    package("accelerate")
    transformers = package("transformers")

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
    accelerate = package("accelerate")

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


def test_accelerate_takes_the_name_of_this_backend_and_refuses_others(monkeypatch):
    accelerate = package("accelerate")
    backends = accelerate.utils.DynamoBackend
    monkeypatch.setattr(backends, "_missing_", backends._missing_)  # taken back after the test
    register_backend()
    plugin = accelerate.utils.TorchDynamoPlugin(backend="fxpasses", options=OPTIONS)
    assert plugin.to_kwargs() == {"backend": "fxpasses", "options": OPTIONS}
    x = torch.randn(2, 4)
    model = torch.nn.Linear(4, 4)
    compiled = torch.compile(
        model, **plugin.to_kwargs()
    )  # as accelerate does; its state is one for the process
    torch.testing.assert_close(compiled(x), model(x))
    assert fxpasses.stats().forward == 1
    with pytest.raises(ValueError, match="'FXPASSED' is not a valid DynamoBackend"):
        accelerate.utils.TorchDynamoPlugin(backend="fxpassed")


def test_lightning():
    lightning = package("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def trained(compiled):
        torch.manual_seed(0)
        module = Module()
        batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(6, 4)), batch_size=3)
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, **quiet).fit(compiled(module), batches)
        return dict(module.named_parameters())

    in_eager = trained(lambda module: module)
    torch.testing.assert_close(
        trained(lambda module: torch.compile(module, backend="fxpasses", options=OPTIONS)), in_eager
    )
    before = fxpasses.stats().backward
    assert before > 0
    torch.testing.assert_close(
        trained(lambda module: fxpasses.compile(module, cache="off", **OPTIONS)), in_eager
    )
    assert fxpasses.stats().backward > before


def test_a_model_of_timm():
    timm = package("timm")
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    model, images = timm.models.VisionTransformer(**sizes), torch.randn(2, 3, 16, 16)
    expected = gradients(copy.deepcopy(model), images)
    compiled = torch.compile(model, backend="fxpasses", options=OPTIONS)
    compiled(images).square().mean().backward()
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, expected)
    assert fxpasses.stats().backward == 1
    assert not fxpasses.stats().fallbacks


@pytest.mark.slow
def test_a_pipeline_of_diffusers():
    diffusers = package("diffusers")
    torch.manual_seed(0)
    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    unet = diffusers.UNet2DModel(
        8, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, attention_head_dim=4, **blocks
    )
    pipe = diffusers.DDPMPipeline(unet.eval(), diffusers.DDPMScheduler(4))
    pipe.set_progress_bar_config(disable=True)

    def images():
        generator = torch.Generator().manual_seed(0)
        return torch.as_tensor(pipe(1, generator, num_inference_steps=2, output_type="np").images)

    expected = images()
    pipe.unet = torch.compile(unet, backend="fxpasses", options=OPTIONS)
    torch.testing.assert_close(images(), expected)
    assert fxpasses.stats().forward + fxpasses.stats().inference > 0
    assert not fxpasses.stats().fallbacks
