"""The optional function in C++: the same tensors with it as without, and nothing if it is not there."""

import importlib
import shutil

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fake
from fake import FakeTensorMode, native
from fake.cache import symbolic_recipe
from fake.errors import NativeBuildError
from tests.fake.support import dynamic


@pytest.fixture(scope="module")
def like(tmp_path_factory):
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("native")))
        patch.delenv("FAKE_NATIVE", raising=False)
        assert native.load() is None
        assert native.build() == native.library()
        return native.load()


@pytest.fixture(params=[False, True], ids=["without", "with"])
def function(request, like, monkeypatch):
    monkeypatch.setattr(symbolic_recipe, "NATIVE", like if request.param else None)
    FakeTensorMode.cache_clear()
    yield request.param
    FakeTensorMode.cache_clear()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.inner = torch.nn.Linear(16, 48)
        self.outer = torch.nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.inner(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return torch.nn.functional.gelu(self.outer(y)) + x


def described(tensors):
    """Sizes, strides, offsets, storages (numbered in order of appearance), versions and answers about layout."""
    storages = {}
    return [
        (
            str(tuple(t.shape)), str(t.stride()), str(t.storage_offset()), t.dtype, str(t.untyped_storage().nbytes()),
            storages.setdefault(t.untyped_storage()._cdata, len(storages)), t.is_inference() or t._version, t.is_contiguous(), str(t.numel()),
            t.is_inference(), t.is_conj(), t._is_view(),
        )
        for t in tensors
    ]  # fmt: skip


def steps_of(run):
    """The same calls three times in one mode: found, cached, cached."""
    environment = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=environment)
    x = dynamic(mode, torch.ones(3, 5, 16))
    with mode:
        results = [described(run(x)) for _ in range(3)]
    return results, [str(guard.expr) for guard in environment.guards]


def train(mode_free_model):
    def run(x):
        kept = []
        model = mode_free_model()
        x = x.detach().requires_grad_()
        kept += [model(x)]
        kept[0].sum().backward()
        return [*kept, x, x.grad, *(p.grad for p in model.parameters())]

    return run


def views(x):
    y = x * 2
    z = y.transpose(0, 1)
    w = y.view(-1, 16)
    w.add_(1)
    y.detach().zero_()
    return [
        y,
        z,
        w,
        z[1:],
        y[:, ::2],
        y.expand(2, *y.shape),
        w.t(),
        z.unsqueeze(0),
        y.detach(),
        torch.cat([w, w]),
        w.t().clone(),
    ]


def in_inference_mode(x):
    y = x + 1
    with torch.inference_mode():
        z = y.view(-1, 16)
        return [y, z, z + 1, (z + 1).t(), y.transpose(0, 1)]


def conjugated(x):
    y = torch.complex(x, x)
    return [y, y.conj(), y.conj().transpose(0, 1), y.conj().view(-1, 16), y.conj() * 1, torch.view_as_real(y)]


RUNS = {
    "train": train(Model),
    "views": views,
    "in inference mode": in_inference_mode,
    "conjugated": conjugated,
}
_WITHOUT = {}


@pytest.mark.parametrize("name", RUNS)
def test_the_same_tensors_and_guards(name, function):
    found = steps_of(RUNS[name])
    if not function:
        _WITHOUT[name] = found
    assert found == _WITHOUT[name]


def test_storages_are_the_tensors_own(function):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = dynamic(mode, torch.ones(3, 5))
    with mode:
        for _ in range(3):
            first, second = x + 1, x + 1
            part = first.view(-1)
            assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
            assert first.untyped_storage()._cdata == part.untyped_storage()._cdata
            before = str(second.untyped_storage().nbytes())
            first.untyped_storage().resize_(0)
            assert part.untyped_storage().nbytes() == 0
            assert str(second.untyped_storage().nbytes()) == before
            version = second._version
            second.view(-1).add_(1)
            assert second._version == version + 1


def test_sizes_that_may_be_zero_are_not_asked_ahead(function):
    environment = fake.ShapeEnv(specialize_zero_one=False, duck_shape=False)
    mode = FakeTensorMode(shape_env=environment)
    x = dynamic(mode, torch.ones(3, 5))
    before = len(environment.guards)
    with mode:
        for _ in range(3):
            x.detach()
            torch.empty_like(x.detach())
    guards = [str(guard.expr) for guard in environment.guards[before:]]
    if not function:
        _WITHOUT["zero"] = guards
    assert guards == _WITHOUT["zero"]


def test_it_can_be_left_alone(like, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert native.load() is None
    native.library().parent.mkdir()
    native.library().write_text("no library")
    with pytest.warns(UserWarning, match=r"python -m fake\.native"):
        assert native.load() is None
    monkeypatch.setenv("FAKE_NATIVE", "0")
    assert native.load() is None


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_nothing_changes(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(NativeBuildError, match="Everything works without it"):
        native.build()
    assert not native.library().exists()
    assert importlib.import_module("fake.native").load() is None
