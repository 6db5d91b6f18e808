"""``on_failure="isolate"``: what Inductor cannot lower runs in eager between compiled parts."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import fx
from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides
from torch._inductor.lowering import lowerings
from torch.fx.experimental.proxy_tensor import make_fx

import fxpasses
from fxpasses import HandoverError, _torch
from fxpasses.compiling import _torch_inductor
from fxpasses.compiling.isolation import Isolation, NotIsolated

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    fxpasses.reset_stats()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
    torch._dynamo.reset()


# --- the search, with a compiler that fails on demand


class Stub:
    """Runs graphs as they are; refuses those that ``refuses`` says."""

    def __init__(self, refuses: Callable[[fx.GraphModule], Any]) -> None:
        self.refuses, self.graphs = refuses, 0

    def __call__(self, gm: fx.GraphModule, inputs: Any, how: Any, generated: Callable[[], None]) -> Any:
        self.graphs += 1
        assert len(inputs) == len(gm.graph.find_nodes(op="placeholder"))
        if self.refuses(gm):
            raise NotImplementedError("planted\nand more")
        generated()
        return _torch.make_boxed_func(gm.forward)


def targets(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def isolate(function: Any, inputs: Any, refuses: Any, directory: Any) -> tuple[list[str], Any, Any]:
    """The isolated nodes, what the result computes, and the graph itself computes."""
    fxpasses.reset_stats()
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    call = Isolation(gm, fakes, {"is_inference": True}, Stub(refuses), directory).compiled(
        NotImplementedError("planted"), late=False
    )
    mine, theirs = ([x.clone() for x in inputs] for _ in range(2))
    want = [*gm(*theirs), *theirs]
    given = list(mine)
    got = [*call(given), *mine]
    assert not given
    assert [x.stride() for x in got] == [x.stride() for x in want]
    torch.testing.assert_close(got, want)
    return [found.node for found in fxpasses.stats().isolated], call, gm


X = torch.linspace(-1, 1, 12).view(3, 4)
Y = X.cos()


def test_calls_that_fail_alone(tmp_path):
    def f(x, y):
        z = x.sin() + y
        w = z.tanh() * 2
        return w.erf(), w.tanh() + z

    names, call, _ = isolate(
        f, [X, Y], lambda gm: {aten.tanh.default, aten.erf.default} & set(targets(gm)), tmp_path
    )
    assert sorted(names) == ["erf", "tanh", "tanh_1"]
    assert {found.reason for found in fxpasses.stats().isolated} == {"NotImplementedError: planted"}
    # What follows upon each other in eager is one part.
    assert call.source.count("run_") == 5


def test_a_call_that_fails_only_next_to_another(tmp_path):
    def both(gm):
        return {aten.sin.default, aten.exp.default} <= set(targets(gm))

    names, _, _ = isolate(lambda x, y: ((x.sin() * y + 1).exp() - 2,), [X, Y], both, tmp_path)
    assert len(names) == 1
    assert names[0] in ("sin", "exp")


def test_results_taken_apart_stay_with_their_call(tmp_path):
    def f(x, y):
        values, order = x.sort()
        most, where = (values + y).max(1)
        return order + 1, most.exp(), where

    names, _, _ = isolate(f, [X, Y], lambda gm: aten.max.dim in targets(gm), tmp_path)
    assert names == ["max_1"]


def test_updates_of_inputs_come_last_and_in_order(tmp_path):
    def f(x, y):
        old = x + 1
        wide = x.view(-1).tanh()
        x.copy_(y.sin())
        y.copy_(old)
        return x.view(-1), wide, old

    names, _, _ = isolate(f, [X, Y], lambda gm: aten.tanh.default in targets(gm), tmp_path)
    assert names == ["tanh"]


@pytest.mark.parametrize(
    ("function", "why"),
    [(lambda x, y: (x.add_(y).tanh(),), "writes"), (lambda x, y: (x.tanh().tanh(),), "nothing")],
)
def test_what_cannot_be_cut_says_so(function, why, tmp_path):
    with pytest.raises(NotIsolated, match=why):
        isolate(function, [X, Y], lambda gm: aten.tanh.default in targets(gm), tmp_path)


OPERATORS = [torch.sin, torch.cos, torch.tanh, torch.neg, torch.t, torch.relu]


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(range(len(OPERATORS))), st.integers(0, 99), st.integers(0, 99)),
        min_size=2,
        max_size=12,
    ),
    st.sets(
        st.sampled_from([aten.sin.default, aten.tanh.default, aten.t.default, aten.mul.Tensor]),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 3),
)
def test_any_graph_computes_what_it_did(tmp_path_factory, program, refused, least):
    """Fails wherever ``least`` calls of the refused operators meet."""

    def f(x, y):
        values = [x, y]
        for number, first, second in program:
            value = OPERATORS[number](values[first % len(values)])
            other = values[second % len(values)]
            values.append(value * other if value.shape == other.shape else value)
        return tuple(values[2:])

    def refuses(gm):
        return sum(target in refused for target in targets(gm)) >= least

    gm = make_fx(f, tracing_mode="fake")(X[:, :3], Y[:, :3])
    if not refuses(gm):
        return
    try:
        names, _, _ = isolate(f, [X[:, :3], Y[:, :3]], refuses, tmp_path_factory.mktemp("repros"))
    except NotIsolated:
        assert all(target in refused for target in targets(gm))
        return
    assert names
    kinds = {node.name: node.target for node in gm.graph.nodes}
    assert all(kinds[name] in refused for name in names)


# --- with Inductor


@contextlib.contextmanager
def refused(*operators: Any, when: Callable[..., bool] = lambda *_: True) -> Iterator[None]:
    """Inductor fails to lower these."""
    before = {op: lowerings[op] for op in operators}

    def refusing(op: Any) -> Any:
        def lower(*args: Any, **kwargs: Any) -> Any:
            if when(*args):
                raise NotImplementedError(f"planted for {op}")
            return before[op](*args, **kwargs)

        return lower

    lowerings.update({op: refusing(op) for op in operators})
    try:
        yield
    finally:
        lowerings.update(before)


def step(function: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    given = [x.clone().requires_grad_() for x in inputs]
    results = function(*given)
    sum(r.square().sum() for r in results).backward()
    return [*(r.detach() for r in results), *(x.grad for x in given)]


def isolating(function: Any, tmp_path: Any, **how: Any) -> Any:
    options = {"on_failure": "isolate", "report": str(tmp_path)}
    return torch.compile(function, backend="fxpasses", options=options, **how)


def two_halves(x, y):
    z = (x @ y.t()).relu() + 1
    w = torch.tanh(z)
    return torch.erf(w * z).sum(1), w.exp()


@pytest.mark.slow
def test_forward_and_backward_with_a_repro_and_one_message(tmp_path, caplog):
    with refused(aten.tanh.default), caplog.at_level(logging.WARNING, "fxpasses"):
        got = step(isolating(two_halves, tmp_path), X, Y)
    torch.testing.assert_close(got, step(two_halves, X, Y))
    forward, backward = fxpasses.stats().isolated
    assert (forward.graph, backward.graph) == ("forward", "backward")
    assert forward.target == "aten.tanh.default"
    assert f"{__file__}:" in forward.source
    assert "w = torch.tanh(z)" in forward.source
    assert "planted for aten.tanh" in forward.reason
    assert forward.repro == backward.repro
    text = Path(forward.repro).read_text()
    compile(text, forward.repro, "exec")
    assert "aten.tanh.default" in text
    assert "import fxpasses" not in text
    assert "from fxpasses" not in text
    messages = [r.getMessage() for r in caplog.records if "cannot lower" in r.getMessage()]
    assert len(messages) == 2  # one a graph
    assert forward.node in messages[0]
    assert forward.repro in messages[0]
    assert not fxpasses.stats().fallbacks


@pytest.mark.slow
@pytest.mark.parametrize("breaks", ["code", "compiler"])
def test_a_failure_behind_the_lowering(breaks, tmp_path, monkeypatch):
    def broken(x):
        if breaks == "code":
            raise RuntimeError("planted")
        return f"there_is_no_such_function({x})"

    for overrides in (CppOverrides, CppVecOverrides):
        monkeypatch.setattr(overrides, "sinh", staticmethod(broken))

    def f(x, y):
        z = (x + y).exp()
        return torch.sinh(z * 0.1) * 2, z.sum(1)

    with torch.no_grad():
        torch.testing.assert_close(isolating(f, tmp_path)(X, Y), f(X, Y))
    (found,) = fxpasses.stats().isolated
    assert found.target == "aten.sinh.default"


@pytest.mark.slow
def test_a_failure_with_symbolic_sizes_only(tmp_path):
    def symbolic(value):
        return any(not isinstance(size, int) and size.free_symbols for size in value.get_size())

    call, wide = isolating(two_halves, tmp_path, dynamic=True), torch.randn(5, 4)
    with refused(aten.tanh.default, when=symbolic), torch.no_grad():
        for rows in (3, 2):
            torch.testing.assert_close(call(X[:rows], wide), two_halves(X[:rows], wide))
    assert [found.target for found in fxpasses.stats().isolated] == ["aten.tanh.default"]
    assert fxpasses.stats().graphs == 1


def test_in_a_region(tmp_path):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x):
            return x + torch.tanh(self.linear(x)).relu()

    model = torch.nn.Sequential(*(Block() for _ in range(3)))
    options = {"on_failure": "isolate", "report": str(tmp_path), "regions": "always"}
    x = torch.randn(2, 8)
    with refused(aten.tanh.default), torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="fxpasses", options=options)(x), model(x))
    assert fxpasses.stats().region_calls == 3
    assert [found.target for found in fxpasses.stats().isolated] == ["aten.tanh.default"]


def test_the_backward_graph_draws_what_the_forward_graph_drew(tmp_path, monkeypatch):
    def f(x):
        return F.dropout(torch.tanh(x), 0.5)

    x = torch.randn(64, 8, requires_grad=True)
    options = {"on_failure": "isolate", "report": str(tmp_path), "memory_budget": 0.0}  # so it draws again
    with monkeypatch.context() as broken:
        broken.setattr(_torch, "compile_fx_forward", operator.itemgetter("nothing"))
        y = torch.compile(f, backend="fxpasses", options=options)(x)
    assert fxpasses.stats().fallbacks
    y.sum().backward()
    torch.testing.assert_close(x.grad, (y != 0) * 2 * (1 - x.tanh().square()))
    assert 0.3 < (y != 0).float().mean() < 0.7


@pytest.mark.slow
def test_a_draw_that_cannot_be_compiled_is_never_made_up(tmp_path):
    with refused(_torch_inductor.INDUCTOR_RANDOM), pytest.raises(HandoverError, match="fallback_random"):
        isolating(lambda x: F.dropout(torch.tanh(x), 0.5), tmp_path)(X.clone().requires_grad_())


@pytest.mark.slow
def test_a_graph_of_which_nothing_can_be_lowered_with_symbolic_sizes(tmp_path, monkeypatch, caplog):
    inner = _torch.compile_fx_inner

    def static_only(gm, inputs, **how):
        if _torch.shape_env_of(inputs) is not None:
            raise NotImplementedError("planted for symbols")
        return inner(gm, inputs, **how)

    def f(x, y, number):
        return torch.tanh(x @ y.t()) * number, (x.view(-1) * 2)[:number]

    monkeypatch.setattr(_torch, "compile_fx_inner", static_only)
    monkeypatch.setattr("fxpasses.compiling.fixed_sizes.MOST_SIZES", 2)
    call, wide = isolating(f, tmp_path, dynamic=True), torch.randn(7, 4)
    with caplog.at_level(logging.WARNING, "fxpasses"):
        for rows, number in ((3, 5), (5, 2), (3, 5), (6, 3)):
            for grad in (False, True):
                # Small: the gradients of exp round more than assert_close allows elsewhere.
                x = (torch.randn(rows, 4) / 8).requires_grad_(grad)
                got, want = call(x, wide, number), f(x, wide, number)
                torch.testing.assert_close(got, want)
                if grad:
                    mine, theirs = (
                        torch.autograd.grad(sum(r.exp().sum() for r in z), x) for z in (got, want)
                    )
                    torch.testing.assert_close(mine, theirs)
    assert fxpasses.stats().fixed_sizes == 3  # inference, forward, backward
    assert fxpasses.stats().graphs == 2
    assert not fxpasses.stats().fallbacks
    assert not fxpasses.stats().isolated
    assert sum("runs in eager for others" in r.getMessage() for r in caplog.records) == 3
