import torch

from fxpasses.passes import EliminateDeadCode
from tests.fxpasses.support import run_pass, text, traced

X = torch.ones(3)


def test_erases_what_nobody_uses():
    def f(x):
        x.cos().exp()
        return x.sin()

    gm = traced(f, X)
    assert run_pass(EliminateDeadCode(), gm)
    assert text(gm) == "sin = aten.sin.default(x_1)\nreturn sin"
    assert not run_pass(EliminateDeadCode(), gm)


def test_keeps_writes_to_inputs():
    def f(x):
        x.copy_(x + 1)
        return x.sin()

    gm = traced(f, X)
    before = text(gm)
    assert not run_pass(EliminateDeadCode(), gm)
    assert "aten.copy_" in before
    assert text(gm) == before


def test_keeps_random_draws_so_that_later_ones_stay_the_same():
    def f(x):
        torch.rand(3)
        return x + torch.rand(3)

    gm = traced(f, X)
    assert not run_pass(EliminateDeadCode(), gm)
    assert text(gm).count("aten.rand") == 2


def test_keeps_assertions():
    def f(x):
        torch.ops.aten._assert_async.msg(x.sum() > 0, "positive")
        return x.sin()

    gm = traced(f, X)
    assert not run_pass(EliminateDeadCode(), gm)


def test_erases_unused_outputs_of_a_tuple_one_by_one():
    def f(x):
        values, _ = torch.sort(x)
        return values

    gm = traced(f, X)
    run_pass(EliminateDeadCode(), gm)
    assert len([n for n in gm.graph.nodes if n.name.startswith("getitem")]) == 1
