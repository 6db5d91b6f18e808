import torch
from torch.nn import functional as F

from fxpasses.backend import fxpasses as backend
from fxpasses.passes import EliminateCommonSubexpressions
from tests.fxpasses.support import assert_same_results, run_pass, text, traced

X = torch.linspace(-1, 1, 6).reshape(2, 3)
CSE = EliminateCommonSubexpressions()


def test_equal_calls_are_merged_with_all_that_follows():
    gm = assert_same_results(CSE, lambda x: (x.exp() + 1) * (x.exp() + 1), X)
    assert text(gm) == (
        "exp = aten.exp.default(x_1)\nadd = aten.add.Tensor(exp, 1)\nmul = aten.mul.Tensor(add, add)\nreturn mul"
    )


def test_constants_of_different_type_differ():
    def f(x):
        return (
            torch.ops.aten.add.Tensor(x, 1),
            torch.ops.aten.add.Tensor(x, 1.0),
            torch.ops.aten.add.Tensor(x, True),
        )

    gm = traced(f, torch.arange(3))
    assert not run_pass(CSE, gm)


def test_signed_zeros_differ():
    def f(x):
        return torch.full_like(x, 0.0).sum() + torch.full_like(x, -0.0).sum()

    assert not run_pass(CSE, traced(f, X))


def test_two_returned_values_do_not_become_one():
    gm = assert_same_results(CSE, lambda x: (x.exp(), x.exp()), X)
    first, second = gm(X)
    first.add_(1)
    assert not torch.equal(first, second)


def test_views_of_equal_values_that_are_returned_do_not_become_aliases():
    gm = assert_same_results(CSE, lambda x: (x.exp().view(6), x.exp().view(3, 2)), X)
    first, second = gm(X)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_random_draws_differ():
    assert not run_pass(CSE, traced(lambda x: x + torch.rand(3) * torch.rand(3), X))


def test_reads_around_a_write_differ():
    def f(x):
        before = x + 1
        x.copy_(x * 2)
        return before * (x + 1)

    gm = traced(f, X)
    run_pass(CSE, gm)
    wanted = f(X.clone())
    assert torch.equal(gm(X.clone())[0], wanted)


def test_checkpointing_decisions_are_kept_apart():
    gm = traced(lambda x: x.exp() * x.exp(), X)
    first, second = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)
    first.meta["recompute"], second.meta["recompute"] = 1, 2
    assert not run_pass(CSE, gm)


def test_results_of_equal_calls_that_are_returned_have_memory_of_their_own():
    def f(x):
        return F.max_pool1d(x[None], 2), F.max_pool1d(x[None], 2), F.max_pool1d(x[None], 2).sum()

    compiled = torch.compile(
        f, backend=backend, options={"passes": [EliminateCommonSubexpressions()], "compiler": "eager"}
    )
    first, second, total = compiled(torch.arange(6.0)[None])
    first.zero_()
    assert torch.equal(second, torch.tensor([[[1.0, 3.0, 5.0]]]))
    assert total == 9


def test_a_graph_that_two_calls_run_is_no_memory_of_their_results():
    @torch.compiler.nested_compile_region
    def layer(x, y):
        return (x * y).sin() + x.sum(0, keepdim=True)

    def f(x, y):
        for _ in range(3):
            x = layer(x, y)
        return layer(x, y * 2), x

    torch.manual_seed(0)
    inputs = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    compiled = torch.compile(f, backend=backend, options={"compiler": "eager"})
    wanted, got = (torch.autograd.grad(sum(r.sum() for r in g(*inputs)), inputs) for g in (f, compiled))
    torch.testing.assert_close(got, wanted)
