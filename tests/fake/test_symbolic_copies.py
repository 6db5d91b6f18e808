"""Tensors that the cache makes like a pattern with symbolic sizes: what the mode makes without its cache."""

import pytest
import torch
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fake
from fake import FakeTensorMode
from fake.seam import dispatch, proxy_tensor
from tests.fake.support import dynamic


@pytest.fixture(params=[False, True], ids=["sizes written", "copied"])
def copied(request, monkeypatch):
    """Whether outputs are copies of patterns, or made as where copies would count changes together."""
    if not request.param:
        monkeypatch.setattr(dispatch, "is_view_tracking_off", lambda: False)
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
    """Sizes, strides, offsets, storages (numbered in order of appearance), versions, keys and answers about layout."""
    storages = {}
    return [
        (
            str(tuple(t.shape)), str(t.stride()), str(t.storage_offset()), t.dtype, t.device, t.requires_grad,
            str(t.untyped_storage().nbytes()), storages.setdefault(t.untyped_storage()._cdata, len(storages)),
            t.is_inference() or t._version, t.is_contiguous(), str(t.numel()), t.is_inference(), t.is_conj(), t.is_neg(),
            t._is_view(), str(dispatch.dispatch_key_set(t)),
        )
        for t in tensors
    ]  # fmt: skip


def steps_of(run, cached=True):
    """The same calls three times in one mode: found, cached, cached."""
    environment = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=environment)
    mode.cache_enabled = cached
    x = dynamic(mode, torch.ones(3, 5, 16))
    with mode:
        results = [described(run(x)) for _ in range(3)]
    return results, {str(guard.expr) for guard in environment.guards}


def train(x):
    model = Model()
    x = x.detach().requires_grad_()
    y = model(x)
    y.sum().backward()
    return [y, x, x.grad, *(p.grad for p in model.parameters())]


def views(x):
    y = x * 2
    z = y.transpose(0, 1)
    w = y.view(-1, 16)
    w.add_(1)
    y.detach().zero_()
    parts = [z[1:], y[:, ::2], y[:, -1], y[:, x.shape[1] - 2 :], y.expand(2, *y.shape), w.t(), z.unsqueeze(0)]
    return [y, z, w, *parts, y.detach(), y[:2], y[:2].view(-1), torch.cat([w, w]), w.t().clone()]


def in_inference_mode(x):
    y = x + 1
    with torch.inference_mode():
        z = y.view(-1, 16)
        return [y, z, z + 1, (z + 1).t(), y.transpose(0, 1)]


def after_inference_mode(x):
    with torch.inference_mode():
        y = x + 1
    return [
        y,
        y + 1,
        y.view(-1, 16),
        y.transpose(0, 1),
        y.transpose(0, 1).transpose(0, 1).view(-1, 16),
        x + 1,
    ]


def conjugated(x):
    y = torch.complex(x, x)
    twice = y.conj().conj()
    turned = [y.conj().transpose(0, 1), y.conj().view(-1, 16), twice, twice.transpose(0, 1), twice[:2]]
    turned += [twice[:, x.shape[1] - 2 :], twice.as_strided((2, 2), (2, 1))]
    return [y, y.conj(), *turned, y.conj() * 1, torch.view_as_real(y), y.conj().imag, y.real]


def written_below_autograd(x):
    with torch._C._AutoDispatchBelowAutograd():
        y = x + 1
        z, w = x + 1, y.view(-1, 16)
        y.add_(1)
        w.t().mul_(2)
    return [y, z, w]


def on_other_devices(x):
    fake.allow_cuda()
    y = x.to("cuda")
    return [y, y + 1, (y + 1).transpose(0, 1), y.view(-1), y.cpu() + 1]


RUNS = [
    train, views, in_inference_mode, after_inference_mode, conjugated, written_below_autograd, on_other_devices,
]  # fmt: skip


@pytest.mark.parametrize("run", [in_inference_mode, after_inference_mode])
def test_inference_tensors_are_cached(run):
    FakeTensorMode.cache_clear()
    steps_of(run)
    assert not FakeTensorMode.cache_info().bypasses


@pytest.mark.parametrize("run", RUNS)
def test_the_same_tensors_and_guards(run, copied):
    assert steps_of(run) == steps_of(run, cached=False)


def test_storages_and_changes_are_the_tensors_own(copied):
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
            second.view(-1).add_(1)
            assert (first._version, part._version, second._version) == (0, 0, 1)
            part.add_(1)
            assert (first._version, part._version, second._version) == (1, 1, 1)


def test_called_outside_of_a_dispatch():
    """Where autograd's keys are not out of the way, a copy would count its changes together with the pattern."""
    add, view = torch.ops.aten.add.Tensor, torch.ops.aten.view.default
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = dynamic(mode, torch.ones(3, 5))
    with mode:
        for _ in range(3):
            first, second = x + 1, x + 1
            first.view(-1)
    hits = FakeTensorMode.cache_info().hits
    made = [mode.dispatch(add, (), (x, 1)) for _ in range(2)]
    parts = [mode.dispatch(view, (), (y, [-1])) for y in made]
    assert FakeTensorMode.cache_info().hits >= hits + 4
    torch._C._autograd._unsafe_set_version_counter((made[0],), (7,))
    assert (made[1]._version, first._version, second._version) == (0, 0, 0)
    assert parts[0].untyped_storage()._cdata == made[0].untyped_storage()._cdata
    assert str(parts[0].shape) == str(first.view(-1).shape)


def test_nodes_matter_in_a_trace_and_under_functionalization_only(monkeypatch):
    FakeTensorMode.cache_clear()
    matter, answers = proxy_tensor.nodes_are_observable, []
    monkeypatch.setattr(proxy_tensor, "nodes_are_observable", lambda: answers.append(matter()) or answers[-1])
    x = dynamic(FakeTensorMode(shape_env=ShapeEnv()), torch.ones(3, 5))
    for _ in range(3):
        x.exp()
    assert set(answers) == {False}
    answers.clear()
    with FunctionalTensorMode():
        FunctionalTensor.to_functional(x).exp()
    assert set(answers) == {True}
    answers.clear()
    make_fx(torch.exp)(x)
    assert True in answers
    FakeTensorMode.cache_clear()


@pytest.mark.parametrize("run", [views, train])
def test_sizes_that_may_be_zero_are_not_asked_ahead(run):
    def guards(cached):
        environment = fake.ShapeEnv(specialize_zero_one=False, duck_shape=False)
        mode = FakeTensorMode(shape_env=environment)
        mode.cache_enabled = cached
        x = dynamic(mode, torch.ones(3, 5, 16))
        before = len(environment.guards)
        with mode:
            for _ in range(3):
                run(x)
                torch.empty_like(x.detach())
        return {str(guard.expr) for guard in environment.guards[before:]}

    assert guards(True) <= guards(False)


@pytest.mark.parametrize("symbolic", [False, True])
def test_views_of_inference_tensors_whose_plain_tensor_is_gone(symbolic):
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
    x = dynamic(mode, torch.ones(3, 5)) if symbolic else mode.from_tensor(torch.ones(3, 5))
    with mode:
        with torch.inference_mode():
            y = x + 1
            y = x + 1
        for _ in range(2):
            assert y.t().is_inference()
        y._plain = None
        assert y.t().is_inference()
        with torch.inference_mode():
            x._plain = None
            assert not x.t().is_inference()
