import pytest
import torch

from fxpasses.passes import RemoveNoOps
from tests.fxpasses.support import assert_same_results, run_pass, text, traced

aten = torch.ops.aten
X = torch.linspace(-2, 2, 6).reshape(2, 3)
PASS = RemoveNoOps()


@pytest.mark.parametrize(
    "no_op",
    [
        lambda x: aten.view.default(x, [2, 3]),
        lambda x: aten.expand.default(x, [2, 3]),
        lambda x: aten.permute.default(x, [0, 1]),
        lambda x: aten.slice.Tensor(x, 0, 0, 9),
        lambda x: aten.clone.default(x),
        lambda x: aten._to_copy.default(x, dtype=torch.float32),
        lambda x: aten._to_copy.default(aten._to_copy.default(x, dtype=torch.float64), dtype=torch.float32),
    ],
)
def test_removed(no_op):
    gm = assert_same_results(PASS, lambda x: no_op(x).sin(), X)
    calls = [n.target for n in gm.graph.nodes if n.op == "call_function" and n.users]
    assert calls == [aten.sin.default]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: aten.view.default(x, [3, 2]),
        lambda x: aten.permute.default(x, [1, 0]),
        lambda x: aten.slice.Tensor(x, 0, 1, 2),
        lambda x: aten._to_copy.default(x, dtype=torch.float64),
        lambda x: aten._to_copy.default(aten._to_copy.default(x, dtype=torch.bfloat16), dtype=torch.float32),
        lambda x: aten._to_copy.default(aten._to_copy.default(x, dtype=torch.int64), dtype=torch.float32),
    ],
)
def test_kept(change):
    gm = traced(lambda x: change(x).sin(), X)
    before = text(gm)
    run_pass(PASS, gm)
    assert text(gm) == before


_FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
_NUMBERS = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.int64, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


def _edges(dtype):
    """Every value of a type of one or two bytes that is a number; the largest, and some with as many digits as there are, of others."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype.itemsize <= 2:
        bits = torch.arange(-(2**15), 2**15).to(torch.int16)
        values = (bits if dtype.itemsize == 2 else torch.arange(256).to(torch.uint8)).view(dtype)
        return values[~values.double().isnan()] if dtype.is_floating_point else values
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        return torch.tensor([1 + info.eps, info.max, info.smallest_normal * info.eps], dtype=dtype)
    return torch.tensor([torch.iinfo(dtype).max, torch.iinfo(dtype).min], dtype=dtype)


def _wraps(narrow, wide):
    """Integers that come back although they do not fit: modulo a power of two."""
    if {narrow, wide} - {dtype for dtype in _NUMBERS if "int" in str(dtype)}:
        return False
    return torch.iinfo(wide).min > torch.iinfo(narrow).min or torch.iinfo(wide).max < torch.iinfo(narrow).max


@pytest.mark.parametrize("narrow", [*_NUMBERS, *_FLOAT8], ids=str)
def test_casts_there_and_back_go_where_every_value_survives_them(narrow):
    values = _edges(narrow)
    for wide in _NUMBERS:
        if wide is narrow:
            continue

        def there_and_back(x, wide=wide):
            return aten._to_copy.default(aten._to_copy.default(x, dtype=wide), dtype=narrow)

        survives = torch.equal(there_and_back(values).view(torch.uint8), values.view(torch.uint8))
        gm = traced(lambda x: aten.cat.default([there_and_back(x)]), values)
        run_pass(PASS, gm)
        (used,) = gm.graph.find_nodes(op="call_function", target=aten.cat.default)
        removed = used.args[0][0].op == "placeholder"
        assert survives or not removed, wide
        assert removed or not survives or _wraps(narrow, wide), wide


def test_chain_of_views_becomes_one():
    gm = assert_same_results(PASS, lambda x: x.view(6).view(3, 2).view(1, 6).sin(), X)
    views = gm.graph.find_nodes(op="call_function", target=aten.view.default)
    assert [str(v.args[0]) for v in views if any(u.target is aten.sin.default for u in v.users)] == ["x_1"]


def test_a_permutation_and_its_inverse_cancel():
    gm = assert_same_results(PASS, lambda x: x.permute(1, 0).permute(1, 0).sin(), X)
    sin = gm.graph.find_nodes(op="call_function", target=aten.sin.default)[0]
    assert str(sin.args[0]) == "x_1"


def test_clone_of_a_transpose_changes_the_strides_and_stays():
    gm = assert_same_results(
        PASS, lambda x: x.t().clone(memory_format=torch.contiguous_format).view(6).sin(), X
    )
    assert "aten.clone" in text(gm)


@pytest.mark.parametrize("lazily", [torch.conj, torch._neg_view])
def test_a_copy_of_what_is_conjugated_or_negated_lazily_stays(lazily):
    z = torch.view_as_complex(torch.randn(3, 2))
    gm = assert_same_results(
        PASS, lambda z: torch.view_as_real(aten.clone.default(lazily(z)).resolve_conj().resolve_neg()), z
    )
    assert "aten.clone" in text(gm)


def test_a_returned_copy_stays_a_copy():
    gm = traced(lambda x: (x.clone(), x.clone().view(6)), X)
    run_pass(PASS, gm)
    out, viewed = gm(X)
    assert out.data_ptr() != X.data_ptr()
    assert viewed.data_ptr() != X.data_ptr()


def test_a_copy_made_before_a_write_stays():
    def f(x):
        old = x.clone()
        x.mul_(2)
        return old + 1

    gm = traced(f, X)
    run_pass(PASS, gm)
    assert torch.equal(gm(X.clone())[0], f(X.clone()))


def test_symbolic_sizes_are_compared_without_a_guard():
    gm = traced(lambda x: x.view(x.shape[0], x.shape[1]).sin(), X, dynamic=True)
    shape_env = gm.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0].node.shape_env
    guards = len(shape_env.guards)
    assert run_pass(PASS, gm)
    assert len(shape_env.guards) == guards
    assert torch.equal(gm(torch.ones(5, 4))[0], torch.ones(5, 4).sin())


@pytest.mark.parametrize(
    ("function", "views"),
    [
        (lambda x: x.sin().view(2, 3), 0),
        (lambda x: x.view(2, 3), 1),
        (lambda x: [(y := x.sin()), y.view(2, 3)], 1),
        (lambda x: [(y := x.sin()).view(2, 3), y.view(6)], 2),
    ],
)
def test_returned_views_stay_where_memory_is_shared(function, views):
    gm = assert_same_results(PASS, function, X)
    left = gm.graph.find_nodes(op="call_function", target=aten.view.default)
    assert sum(bool(node.users) for node in left) == views
