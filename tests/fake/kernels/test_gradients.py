"""Strides of gradients where autograd's formulas go another way for tensors without data."""

import pytest
import torch

import fake
from benchmarks.conformance.observe import observe
from benchmarks.conformance.sweep import Options, sweep


def _laid_out(order, *, sliced=False):
    shape = (4, 3, 5)
    base = torch.rand([shape[d] for d in order]) + 0.5
    if sliced:
        base = torch.rand([2 * shape[d] for d in order])[::2, ::2, ::2] + 0.5
    inverse = [order.index(d) for d in range(3)]
    return base.permute(inverse)


INPUTS = {
    "row-major": lambda: _laid_out((0, 1, 2)),
    "column-major": lambda: _laid_out((2, 1, 0)),
    "permuted": lambda: _laid_out((1, 2, 0)),
    "sliced": lambda: _laid_out((2, 0, 1), sliced=True),
}
FUNCTIONS = {
    "max": torch.max,
    "min": torch.min,
    "median": torch.median,
    "nanmedian": torch.nanmedian,
    "prod": torch.prod,
    "prod of a dimension": lambda x: torch.prod(x, 1),
    "prod of the last, kept": lambda x: torch.prod(x, -1, keepdim=True),
    "prod of one element": lambda x: torch.prod(x[:, :1], 1),
    "householder_product": lambda x: torch.linalg.householder_product(x.mT, x[:, 0, :3]),
    "ormqr": lambda x: torch.ormqr(x.mT, x[:, 0, :3], x.mT),
}


def _gradients(function, x, *, create_graph, of_sum):
    x = x.detach().requires_grad_()
    result = function(x)
    incoming = torch.ones_like(result)
    incoming = incoming.new_ones(()).expand(result.shape) if of_sum else incoming
    return observe(torch.autograd.grad(result, x, incoming, create_graph=create_graph), [x])


@pytest.mark.parametrize("create_graph", [False, True], ids=["", "create_graph"])
@pytest.mark.parametrize("of_sum", [False, True], ids=["dense", "expanded"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("layout", INPUTS)
def test_strides_are_eagers(name, layout, of_sum, create_graph):
    if create_graph and name == "prod of one element":
        pytest.skip("the other way passes the incoming gradient on, which nothing can be derived from")
    function, x = FUNCTIONS[name], INPUTS[layout]()
    options = {"create_graph": create_graph, "of_sum": of_sum}
    eager = _gradients(function, x, **options)
    mode = fake.FakeTensorMode()
    for _ in range(2):  # the second run finds the cache filled
        given = mode.from_tensor(x)
        with mode:
            assert _gradients(function, given, **options) == eager


def test_the_same_operators_outside_of_a_formula_are_not_changed():
    x = INPUTS["column-major"]()
    mode = fake.FakeTensorMode()
    given = mode.from_tensor(x)
    expected = ((x == 0) * torch.ones(())).stride()
    with mode:
        for _ in range(2):
            _gradients(torch.max, given, create_graph=False, of_sum=False)
            assert ((given == 0) * torch.ones(())).stride() == expected


def test_graphs_that_are_traced_keep_the_strides_of_their_operators():
    from torch.fx.experimental.proxy_tensor import make_fx

    x = INPUTS["column-major"]()
    mode = fake.FakeTensorMode()
    given = mode.from_tensor(x)

    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.max(), x)[0]

    with mode:
        graph = make_fx(gradient)(given)
    (result,) = graph.graph.find_nodes(op="output")[0].all_input_nodes
    assert result.meta["val"].stride() == graph(x).stride()


def test_hooks_of_saved_tensors_run_once():
    mode = fake.FakeTensorMode()
    x = mode.from_tensor(INPUTS["column-major"]())
    seen = []
    with mode, torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: seen.append(t) or t):
        result = x.detach().requires_grad_().prod(1)
        result.sum().backward()
    assert len(seen) == 2


def test_one_hot_is_row_major():
    index = torch.zeros(4, 3, dtype=torch.int64).t()
    mode = fake.FakeTensorMode()
    given = mode.from_tensor(index)
    for context in (torch.no_grad, torch.inference_mode):
        with mode, context():
            assert torch.nn.functional.one_hot(given, 7).stride() == (28, 7, 1)
            with pytest.raises(fake.DataDependentOutputException):
                torch.nn.functional.one_hot(given)


VIEWS = {
    "reshape": lambda x: x.reshape(3, 2),
    "flatten": lambda x: x.flatten(),
    "movedim": lambda x: x.movedim(0, 1),
    "mT": lambda x: x.mT,
    "narrow": lambda x: x.narrow(0, 0, 1),
    "chunk": lambda x: x.chunk(2),
    "unsafe_chunk": lambda x: x.unsafe_chunk(2),
    "expand_as": lambda x: x.expand_as(x),
    "unflatten": lambda x: x.unflatten(0, (2, 1)),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij"),
    "contiguous": lambda x: x.contiguous(),
    "dropout in evaluation": lambda x: torch.nn.functional.dropout(x, 0.5, training=False),
    "linear": lambda x: torch.nn.functional.linear(x, x),
}


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("name", VIEWS)
def test_composites_in_inference_mode(name, requires_grad):
    x = torch.randn(2, 3, requires_grad=requires_grad)
    mode = fake.FakeTensorMode()
    given = mode.from_tensor(x)
    with torch.inference_mode():
        eager = observe(VIEWS[name](x), [x])
        for _ in range(2):
            with mode:
                assert observe(VIEWS[name](given), [given]) == eager


def test_a_layout_that_depends_on_values_is_no_mismatch():
    tally = sweep(
        Options(
            engine="fake", patterns=("prod",), tables=("backward",), layouts=("column-major",), samples=12
        )
    )
    from benchmarks.conformance.compare import Verdict

    assert tally.count(Verdict.MISMATCH, Verdict.ERROR, Verdict.UNSUPPORTED) == 0
    assert tally.count(Verdict.OK) > 0


@pytest.mark.parametrize(
    "function", [lambda x: x.prod(), lambda x: x.prod(0), lambda x: x.amax(), lambda x: x.median()]
)
def test_transforms_differentiate(function):
    """What a node of a transform has saved is a tensor of the transform, of use inside alone."""
    mode = fake.FakeTensorMode(allow_non_fake_inputs=True)
    x = mode.from_tensor(torch.randn(3))
    with mode:
        gradient = torch.func.grad(function)(x)
        twice = torch.func.hessian(function)(x)
    assert (gradient.shape, twice.shape) == ((3,), (3, 3))
