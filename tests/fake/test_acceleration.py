"""accelerate(): torch.compile gives the same graphs and guards on our cache, and torch is as before afterwards."""

import contextlib
import threading

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import fake
from fake import acceleration
from fake.acceleration import engine
from fake.seam.patches import LEDGER
from fake.symbols.node import OPERATORS
from tests import children
from tests.fake.support import structure


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.inner = torch.nn.Linear(16, 48)
        self.outer = torch.nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        q, k, v = self.inner(self.norm(x)).chunk(3, -1)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        y = self.outer(y).view(-1, 4, 4).transpose(1, 2).reshape(x.shape)
        return (x + y * x.shape[0]).sum(-1).relu()


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    fake.accelerate.cache_clear()
    yield
    torch._dynamo.reset()
    assert not fake.accelerate.is_enabled()


def capture(accelerated, dynamic, sizes):
    """Graphs, guards, outputs and gradients of a compiled model, and how often it was compiled."""
    torch._dynamo.reset()
    graphs, guards = [], []

    def compiler(graph, inputs):
        graphs.append(structure(graph))
        return graph

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    torch.manual_seed(0)
    model = Model()
    with fake.accelerate() if accelerated else contextlib.nullcontext():
        compiled = torch._dynamo.optimize(
            backend,
            dynamic=dynamic,
            guard_export_fn=lambda g: guards.extend(sorted(str(x.code_list) for x in g)),
        )(model)
        results = []
        for size in sizes:
            x = torch.randn(size, 3, 16)
            y = compiled(x)
            y.sum().backward()
            results.append(y.detach().clone())
    return graphs, guards, results, [p.grad.clone() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True, None], ids=["static", "dynamic", "automatic"])
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_same_graphs_and_guards(dynamic):
    sizes = [2, 2] if dynamic is False else [5, 6]
    capture(False, dynamic, sizes)  # torch's own first and second compile of a model differ
    graphs, guards, results, grads = capture(False, dynamic, sizes)
    for _ in range(2):
        ours = capture(True, dynamic, sizes)
        assert ours[0] == graphs
        assert ours[1] == guards
        for a, b in zip(results + grads, ours[2] + ours[3], strict=True):
            torch.testing.assert_close(a, b)
    assert engine().store.info().hits > 0


def test_other_subjects_of_compile():
    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False).sum()

    def branches(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)).sum()

    for function in (checkpointed, branches):
        x = torch.ones(3, requires_grad=True)
        expected = torch.autograd.grad(function(x), x)
        with fake.accelerate():
            actual = torch.autograd.grad(torch.compile(function, backend="aot_eager")(x), x)
        torch.testing.assert_close(actual, expected)
    with fake.accelerate():
        y = torch.compile(lambda x: x * 2 + 1, backend="aot_eager")(TwoTensor(torch.ones(2), torch.ones(2)))
        assert type(y) is TwoTensor
        exported = torch.export.export(Model(), (torch.randn(2, 3, 16),))
    assert exported.module()(torch.ones(2, 3, 16)).shape == (2, 3)


def test_off_without_a_trace():
    owners = (FakeTensor, FakeTensorMode, FakeTensorConverter)
    with fake.accelerate():
        pass  # leaves class-level values of the attributes of tensors, see the next test
    before = [dict(vars(owner)) for owner in owners]
    with fake.accelerate():
        assert fake.accelerate.is_enabled()
        with fake.accelerate():
            pass
        assert fake.accelerate.is_enabled()
        assert FakeTensorMode.dispatch is not before[1]["dispatch"]
    assert [dict(vars(owner)) for owner in owners] == before
    fake.accelerate.enable()
    fake.accelerate.disable()
    assert [dict(vars(owner)) for owner in owners] == before
    with pytest.raises(fake.AccelerateError, match="already off"):
        fake.accelerate.disable()


TENSORS_OUTLIVE = """
import torch, fake
from torch._subclasses.fake_tensor import FakeTensorMode

with fake.accelerate(), FakeTensorMode() as mode:
    x = torch.ones(3)
    made = [x + 1 for _ in range(3)]
plain = FakeTensorMode().from_tensor(torch.ones(3))
for tensor in made:
    missing = [name for name in vars(plain) if not hasattr(tensor, name)]
    assert not missing, missing
with mode:
    assert (made[-1] * 2).shape == (3,)
assert FakeTensorMode.dispatch.__module__ == "torch._subclasses.fake_tensor"
"""


@pytest.mark.slow
def test_tensors_made_meanwhile_outlive_it():
    # In a process of its own: here, an earlier test may have left the class-level values.
    done = children.run("-c", TENSORS_OUTLIVE)
    assert done.returncode == 0, done.stderr


def test_off_after_an_error_inside():
    with pytest.raises(ZeroDivisionError), fake.accelerate():
        raise ZeroDivisionError
    assert not fake.accelerate.is_enabled()


def test_an_unknown_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    with pytest.raises(fake.UnsupportedTorchVersionError, match=r"found 9\.9\.0.*refuses") as caught:
        fake.accelerate().__enter__()
    assert caught.value.found == "9.9.0"
    assert not fake.accelerate.is_enabled()


def test_another_tools_patch_is_not_undone(monkeypatch):
    context = fake.accelerate()
    context.__enter__()
    ours = FakeTensorMode.dispatch
    FakeTensorMode.dispatch = lambda *a: None
    with pytest.raises(fake.AccelerateError, match="undo that first"):
        context.__exit__(None, None, None)
    FakeTensorMode.dispatch = ours
    context.__exit__(None, None, None)


def test_tensors_that_changed_while_it_was_off():
    mode = FakeTensorMode()
    with fake.accelerate(), mode:
        x = torch.ones(4)
        y = x + x
    with mode:
        x.resize_(2, 3)
    with fake.accelerate(), mode:
        assert (x + x).shape == (2, 3)
        assert x.view(6).untyped_storage()._cdata == x.untyped_storage()._cdata
    assert y.shape == (4,)


def test_in_place_changes_while_it_is_on():
    with fake.accelerate(), FakeTensorMode():
        x = torch.ones(4)
        assert (x + x).shape == (4,)
        x.resize_(2, 3)
        assert (x + x).shape == (2, 3)
        x.data = torch.ones(5)
        assert (x + x).shape == (5,)
        assert x.view(5, 1).untyped_storage()._cdata == x.untyped_storage()._cdata


def test_both_kinds_of_tensors_side_by_side():
    with fake.accelerate():
        with FakeTensorMode():
            theirs = torch.ones(3) + 1
        with fake.FakeTensorMode():
            ours = torch.ones(3) + 1
    assert type(theirs) is FakeTensor
    assert type(ours) is fake.FakeTensor


def test_two_threads_switch_it():
    def work():
        for _ in range(50):
            with fake.accelerate(), FakeTensorMode():
                assert (torch.ones(3) + 1).shape == (3,)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert acceleration._SWITCH.depth == 0
    assert not any(map(LEDGER.is_in_force, set(acceleration.PATCHES) - set(OPERATORS)))


@pytest.mark.parametrize("log", [None, "aot_joint_graph", "aot_graphs"])
def test_texts_of_graphs_are_made_only_if_they_are_read(log, monkeypatch):
    made = []
    original = torch.fx.GraphModule.print_readable

    def print_readable(self, *args, **kwargs):
        made.append(kwargs)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.fx.GraphModule, "print_readable", print_readable)
    monkeypatch.setattr(torch._logging._internal.trace_log, "handlers", [])  # pytest listens to it
    torch._logging.set_logs(**({log: True} if log else {}))
    try:
        with fake.accelerate():
            torch.compile(Model(), backend="aot_eager")(torch.randn(2, 16, 16)).sum().backward()
    finally:
        torch._logging.set_logs()
    assert bool(made) == (log is not None)


def test_a_transposition_in_place_meets_the_size_of_a_storage():
    """The size of a storage, a product of three that no trace has met, is asked for when strides change."""

    def program(x):
        y = x.clone()
        y.t_()
        return y, y.transpose(0, 1).contiguous().view(-1)

    x = torch.randn(3, 4)
    with fake.accelerate():
        result = torch.compile(program, backend="aot_eager", dynamic=True)(x)
    for found, expected in zip(result, program(x), strict=True):
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected)


def _computed_sizes(a, b, c):
    rows = b.shape[0] + c.shape[0]
    wide = a.expand(rows, a.shape[0])
    again = (a + 1).expand(rows, a.shape[0])
    made = torch.zeros(rows * 2, a.shape[0])
    return torch.cat([wide, b, c]), again.shape[0] * made.shape[0], torch.cat([again, made])


def test_sizes_that_the_program_computed_are_not_read_off_results():
    """A second time, too: what the cache rebuilds has the numbers that the call gave."""
    inputs = torch.ones(10), torch.ones(3, 10), torch.ones(2, 10)

    def traced():
        return make_fx(_computed_sizes, tracing_mode="symbolic")(*inputs).code

    expected = traced()
    assert expected.count("aten.sym_size.int") == 3
    with fake.accelerate():
        for _ in range(3):
            assert traced() == expected
