"""What make_fx notes on nodes, from interned metadata, against torch's own answer."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode as TorchMode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.multiprocessing.reductions import StorageWeakRef

import fake
from fake.tracing.snapshots import extract_tensor_metadata, snapshot_fake

SNAPSHOT, EXTRACT = proxy_tensor.snapshot_fake, proxy_tensor._extract_tensor_metadata


def values(mode: TorchMode) -> dict[str, torch.Tensor]:
    with mode:
        image = torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
        volume = torch.empty(2, 3, 4, 5, 2).contiguous(memory_format=torch.channels_last_3d)
        plain = torch.empty(4, 6) + 1
        return {
            "contiguous": plain,
            "transposed": plain.t(),
            "a part": plain[1:, 2:4],
            "expanded": torch.empty(3, 1).expand(3, 4),
            "channels last": image + 1,
            "channels last, 3 dimensions": volume + 1,
            "integers": torch.arange(3) + 1,
            "empty": torch.empty(0, 3) + 1,
            "a number": torch.empty(()) + 1,
            "requires a gradient": (torch.empty(2, 3) + 1).requires_grad_(),
            "conjugate": torch.empty(2, 2, dtype=torch.complex64).conj(),
            "negative": torch.empty(2, dtype=torch.complex64).conj().imag,
            "other device": torch.empty(2, 3, device="meta") + 1,
            "not made by the cache": mode.from_tensor(torch.rand(2, 3)),
            "constant": torch.tensor(3.0),
        }


def test_a_snapshot_is_a_detached_alias_with_the_same_metadata() -> None:
    mode = TorchMode(allow_non_fake_inputs=True)
    with fake.accelerate():
        for name, value in values(mode).items():
            ours, theirs = snapshot_fake(value), SNAPSHOT(value)
            assert type(ours) is type(theirs), name
            assert ours is not value, name
            assert fake.extract_tensor_metadata(ours) == fake.extract_tensor_metadata(theirs), name
            assert (ours.fake_mode, ours.device) == (mode, value.device), name
            assert not ours.requires_grad, name
            storages = {StorageWeakRef(t.untyped_storage()) for t in (ours, value)}
            assert len(storages) == 1, name


def test_a_snapshot_keeps_the_layout_when_the_tensor_changes_in_place() -> None:
    mode = TorchMode()
    with fake.accelerate(), mode:
        value = torch.empty(4, 6) + 1
        snapshot_fake(value)
        value.t_()
        assert snapshot_fake(value).shape == (6, 4) == SNAPSHOT(value).shape
        before = snapshot_fake(value)
        value.unsqueeze_(0)
        assert before.shape == (6, 4)
        assert snapshot_fake(value).stride() == SNAPSHOT(value).stride()


@pytest.mark.parametrize("contiguity", [True, False])
def test_the_layout_is_that_of_torch(contiguity: bool) -> None:
    with fake.accelerate():
        for name, value in values(TorchMode(allow_non_fake_inputs=True)).items():
            for _ in range(2):
                layout = extract_tensor_metadata(value, contiguity)
                assert layout == EXTRACT(value, contiguity), name
                layout.qparams["changed"] = True  # by one reader, for nobody else


def test_symbolic_sizes_are_left_to_torch() -> None:
    mode = TorchMode(shape_env=ShapeEnv())
    real = torch.rand(4, 6)
    torch._dynamo.mark_dynamic(real, 0)
    with fake.accelerate():
        value = mode.from_tensor(real) + 1
        assert str(snapshot_fake(value).shape) == str(value.shape)
        assert str(extract_tensor_metadata(value)) == str(EXTRACT(value))


def test_a_traced_graph_carries_the_same_metadata() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w.t()).view(2, -1).softmax(-1)[:, ::2]

    def traced() -> list[object]:
        inputs = torch.rand(4, 6), torch.rand(8, 6)
        gm = proxy_tensor.make_fx(program, tracing_mode="fake")(*inputs)
        return [
            (n.name, str(n.target), n.meta.get("tensor_meta"), str(n.meta.get("val"))) for n in gm.graph.nodes
        ]

    expected = traced()
    with fake.accelerate():
        assert traced() == expected
