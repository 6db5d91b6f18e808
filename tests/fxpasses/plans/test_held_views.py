"""Views of weights are made once, and again where a weight may have moved."""

import ast
import types

import pytest
import torch

from fxpasses.plans._torch import prelude
from fxpasses.plans.tensors.held_views import HeldViews, cache_views
from fxpasses.plans.tensors.same_tensors import SameTensors

CODE = """
def call(args):
    weight, x, n, again = args
    args.clear()
    out = torch.empty(2, 3)
    again = again
    extern_kernels.mm(x, reinterpret_tensor(weight, (4, 3), (1, 4), 0), out=out)
    extern_kernels.mm(x, reinterpret_tensor(weight, (n, 3), (1, 4), 0), out=out)
    extern_kernels.mm(x, reinterpret_tensor(again, (4, 3), (1, 4), 0), out=out)
    extern_kernels.mm(reinterpret_tensor(out, (2, 3), (3, 1), 0), reinterpret_tensor(weight, (3, 4), (4, 1), 0))
    return (out, reinterpret_tensor(weight, (4, 3), (1, 4), 0))
"""


def _run(held):
    tree = ast.parse(CODE)
    places = cache_views(tree.body)
    tree.body = [*places, *tree.body]
    given = prelude() | {"held_views": held, "extern_kernels": types.SimpleNamespace(mm=torch.mm)}
    exec(ast.unparse(ast.fix_missing_locations(tree)), given)
    assert list(given["views_0"]) == []
    return len(places), given


def test_views_that_only_a_kernel_reads_are_held():
    weight, x = torch.randn(3, 4), torch.randn(2, 4)
    held = HeldViews()
    places, given = _run(held)
    assert places == 1
    for _ in range(2):
        given["call"]([weight, x, 4, weight])
    assert not given["views_0"]  # it is no weight
    held.add_weights([weight])
    for _ in range(2):
        out, view = given["call"]([weight, x, 4, weight])
        torch.testing.assert_close(out, x @ weight.t())
    (kept,) = given["views_0"].values()
    assert kept is not view
    weight.mul_(2)
    torch.testing.assert_close(given["call"]([weight, x, 4, weight])[0], x @ weight.t())
    held.forget()
    assert not given["views_0"]


MOVES = {
    "values": (lambda t: t.mul_(2), True),
    "other memory": (lambda t: setattr(t, "data", t.data * 2), False),
    "another tensor": (lambda t: torch.utils.swap_tensors(t, torch.nn.Parameter(t * 2)), False),
    "memory of another": (lambda t: t.set_(torch.ones(12), 0, (3, 4)), False),
    "a larger memory": (lambda t: t.untyped_storage().resize_(4800), False),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_weight_that_moves(checks, move):
    change, stays = MOVES[move]
    weight, x, held = torch.nn.Parameter(torch.randn(3, 4)), torch.randn(2, 4), HeldViews()
    same = SameTensors([torch.ones(2), weight])
    same.allow_view_caching(held)
    _, given = _run(held)
    with torch.no_grad():
        for _ in range(3):
            assert same.hold()
            given["call"]([weight, x, 4, weight])
        assert bool(given["views_0"]) == (checks == "memory")
        change(weight)
        assert same.hold()
        assert bool(given["views_0"]) == (checks == "memory" and stays)
        torch.testing.assert_close(given["call"]([weight, x, 4, weight])[0], x @ weight.t())
