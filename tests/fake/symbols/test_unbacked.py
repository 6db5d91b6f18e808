"""Sizes that data decides: facts, checks that become part of graphs, and questions without an answer."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    guard_or_false,
    guard_or_true,
    statically_known_true,
)

import fake


def fresh_mode():
    return fake.FakeTensorMode(shape_env=fake.ShapeEnv())


SOURCES = {
    "nonzero": lambda x: x.nonzero().shape[0],
    "item": lambda x: x.to(torch.int64).sum().item(),
    "unique": lambda x: torch.unique(x).shape[0],
    "mask": lambda x: x[x > 0].shape[0],
    "masked_select": lambda x: torch.masked_select(x, x > 0).shape[0],
    "tolist": lambda x: x.to(torch.int64).sum(0).tolist()[0],
}


@pytest.mark.parametrize("name", SOURCES)
def test_an_operator_makes_a_symbol_without_a_value(name):
    mode = fresh_mode()
    with mode:
        made = SOURCES[name](torch.ones(4, 3))
    facts = fake.facts_of(made)
    assert facts.unbacked
    assert facts.size_like is (name not in ("item", "tolist"))
    if facts.size_like:
        assert facts.min == 0
        assert facts.max is None or facts.max == 12
    with pytest.raises(GuardOnDataDependentSymNode):
        bool(made == 7)
    assert not mode.shape_env.guards
    assert guard_or_false(made == 7) is False
    assert guard_or_true(made == 7) is True
    assert not statically_known_true(made == 7)


def test_checks_become_facts_and_assertions():
    mode = fresh_mode()
    with mode:
        number = torch.ones(3, dtype=torch.int64).sum().item()
        torch._check(number >= 2)
        torch._check(number <= 10)
        torch._check(number % 2 == 0)
    facts = fake.facts_of(number)
    assert (facts.min, facts.max, facts.divisors) == (2, 10, (2,))
    assert statically_known_true(number != 1)
    assert statically_known_true(number % 2 == 0)
    told = fake.runtime_assertions(mode.shape_env)
    assert len(told) == 3
    assert all(assertion.reason.where.file == __file__ for assertion in told)
    assert {assertion.reason.kind for assertion in told} == {"assertion"}
    assert "test_unbacked.py" in str(told[0])


def test_an_operator_that_asserts_is_named():
    mode = fresh_mode()
    with mode:
        number = torch.ones(3, dtype=torch.int64).sum().item()
        torch._check(number >= 0)
        torch.zeros(12).view(number, -1, 2)
    assert any("view" in str(a.reason.asked_by) for a in fake.runtime_assertions(mode.shape_env))


def pick(x):
    count = x.sum().item()
    torch._check(count >= 2)
    torch._check(count < 8)
    return torch.zeros(count, 3) + 1


def test_assertions_are_written_into_the_graph():
    mode = fresh_mode()
    with mode:
        x = mode.from_tensor(torch.ones(3, dtype=torch.int64), static_shapes=True)
        graph = make_fx(pick)(x)
    fake.insert_runtime_assertions(graph, mode.shape_env)
    asserted = [n for n in graph.graph.nodes if "assert" in str(n.target)]
    assert asserted
    assert torch.equal(graph(torch.ones(3, dtype=torch.int64)), torch.ones(3, 3))
    for wrong in (0, 4):
        with pytest.raises(RuntimeError, match=r"u0|Runtime assertion"):
            graph(torch.full((3,), wrong, dtype=torch.int64))


def test_two_data_dependent_sizes_that_are_checked_equal():
    mode = fresh_mode()
    with mode:
        a = torch.ones(4).nonzero()
        b = torch.ones(5).nonzero()
        torch._check(a.shape[0] == b.shape[0])
        total = a + b
    assert fake.facts_of(total.shape[0]).unbacked
    assert any("Eq" in repr(t.condition) or "==" in str(t) for t in fake.runtime_assertions(mode.shape_env))


@pytest.mark.parametrize("ours", [True, False])
def test_compiled_with_data_dependent_sizes(ours):
    def f(x):
        chosen = x[x > 0]
        return chosen * 2, chosen.shape[0]

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        if ours:
            with fake.using_shape_env():
                compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
                results = [compiled(torch.arange(-2.0, n)) for n in (3, 5)]
        else:
            compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
            results = [compiled(torch.arange(-2.0, n)) for n in (3, 5)]
    torch._dynamo.reset()
    assert [r[1] for r in results] == [2, 4]
    assert torch.equal(results[1][0], torch.tensor([2.0, 4.0, 6.0, 8.0]))


@pytest.fixture
def library():
    made = torch.library.Library("fake_symbols_test", "FRAGMENT")
    yield made
    made._destroy()


def test_custom_operators_with_symbolic_and_data_dependent_sizes(library):
    from fake.library import custom_op

    @custom_op("fake_symbols_test::interleave", mutates_args=())
    def interleave(x: torch.Tensor, times: int) -> torch.Tensor:
        return x.repeat_interleave(times, 0)

    @interleave.register_fake
    def _(x, times):
        return x.new_empty(x.shape[0] * times, *x.shape[1:])

    @custom_op("fake_symbols_test::positive_rows", mutates_args=())
    def positive_rows(x: torch.Tensor) -> torch.Tensor:
        return x[x.sum(1) > 0].clone()

    @positive_rows.register_fake
    def _(x):
        rows = torch.library.get_ctx().new_dynamic_size()
        return x.new_empty(rows, x.shape[1])

    def f(x):
        many = torch.ops.fake_symbols_test.interleave(x, 3)
        rows = torch.ops.fake_symbols_test.positive_rows(many)
        return rows.sum(0) + many[0], rows.shape[0]

    mode = fresh_mode()
    x = mode.from_tensor(torch.ones(4, 6), name="x")
    with mode:
        total, rows = f(x)
    assert total.shape[0].node.expr == x.shape[1].node.expr
    facts = fake.facts_of(rows)
    assert facts.unbacked
    assert facts.size_like
    assert [guard.kind for guard in mode.shape_env.guards.minimal()] == ["layout", "range", "range"]
    torch._dynamo.reset()
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        fake.using_shape_env(contracts={"x": {0: fake.Dim("rows", max=100), 1: "dynamic"}}),
    ):
        compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
        for size in ((4, 6), (9, 3)):
            real = torch.randn(size)
            assert torch.equal(compiled(real)[0], f(real)[0])
            assert compiled(real)[1] == f(real)[1]
    torch._dynamo.reset()
