"""Order of calls on a process group that does nothing; values with made-up ranks."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

import torch.distributed._functional_collectives as collectives  # noqa: E402

from fxpasses.checking.execution.interpret import Run  # noqa: E402
from fxpasses.graphs.rewriting import copy_graph  # noqa: E402
from fxpasses.passes import BucketCollectives, OverlapCollectives  # noqa: E402
from fxpasses.testing import prove  # noqa: E402
from tests.fxpasses.passes.support import assert_golden, assert_left_alone, captured, rewrite  # noqa: E402

pytestmark = pytest.mark.usefixtures("fake_group")

PASS = OverlapCollectives()
SHARDS, X = torch.randn(6, 2, 4).unbind(), torch.randn(3, 4)  # gathered from two: 4 x 4 floats, 64 bytes
ROWS = SHARDS[0]


def gather(x):
    return collectives.all_gather_tensor(x, 0, dist.group.WORLD)


def layers(x, *shards):
    for shard in shards:
        x = (x @ gather(shard)).tanh()
    return x


def events(gm):
    """``start``, ``wait`` and ``mm`` calls, in order."""
    names = {
        "all_gather": "start",
        "reduce_scatter": "start",
        "all_reduce": "start",
        "wait": "wait",
        "mm": "mm",
    }
    found = []
    for node in gm.graph.nodes:
        target = str(node.target) if node.op == "call_function" else ""
        found += [short for name, short in names.items() if f".{name}" in target.replace("_tensor", "")][:1]
    return found


def test_golden():
    def f(x, a, b):
        return (x @ gather(a)) @ gather(b)

    assert_golden(PASS, f, X, *SHARDS[:2])


@pytest.mark.parametrize(
    ("max_bytes", "wanted"),
    [
        (1 << 20, "start start start wait mm wait mm wait mm"),
        (128, "start start wait start mm wait mm wait mm"),
        (64, "start wait start mm wait start mm wait mm"),
    ],
)
def test_gathers_start_as_far_ahead_as_memory_allows(max_bytes, wanted):
    gm = captured(lambda x, a, b, c: ((x @ gather(a)) @ gather(b)) @ gather(c), X, *SHARDS[:3])
    assert rewrite(OverlapCollectives(max_bytes=max_bytes), gm)
    assert events(gm) == wanted.split()
    assert not OverlapCollectives(max_bytes=max_bytes).apply(gm)


def test_reductions_are_waited_for_where_they_are_needed():
    def f(x, w, g):
        first = collectives.reduce_scatter_tensor(g * 2, "sum", 0, dist.group.WORLD).view(-1)
        y = x @ w
        second = collectives.reduce_scatter_tensor(y.t() @ y, "sum", 0, dist.group.WORLD)
        return first, second, y @ w

    gm = captured(f, X, torch.randn(4, 4), torch.randn(4, 4))
    assert rewrite(PASS, gm)
    assert events(gm) == ["start", "mm", "mm", "start", "mm", "wait", "wait"]
    gm = captured(f, X, torch.randn(4, 4), torch.randn(4, 4))
    assert rewrite(OverlapCollectives(max_bytes=64), gm)  # there is room for one
    assert events(gm) == ["start", "mm", "mm", "wait", "start", "mm", "wait"]


def test_with_buckets():
    gm = captured(lambda *given: layers(*given), X, *SHARDS)
    assert rewrite(BucketCollectives(max_bytes=128), gm)
    assert rewrite(OverlapCollectives(max_bytes=256), gm)
    assert events(gm)[:4] == ["start", "start", "wait", "start"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, a: x @ gather(a.t().contiguous().t()),  # nothing to do meanwhile
        lambda x, a: x.sin() + 1,
    ],
)
def test_left_alone(function):
    assert_left_alone(PASS, function, X, ROWS)


def test_memory_that_is_written_to_is_left_alone():
    def f(x, a):
        y = x @ x.t()
        a.copy_(y.sum() + a)
        return y, gather(a) * 2

    assert_left_alone(PASS, f, X, ROWS.clone())


@pytest.mark.slow
@given(
    st.lists(
        st.sampled_from(["gather", "reduce", "scatter", "gather of the last", "compute", "use"]),
        min_size=2,
        max_size=10,
    ),
    st.sampled_from([64, 160, 1 << 20]),
)
@settings(max_examples=15, deadline=None)
def test_any_sequence(kinds, max_bytes):
    """Values stay, collectives keep their order, and no more is on its way than allowed."""

    def f(x, rows):
        waiting, results = [], []
        for number, kind in enumerate(kinds):
            if kind == "compute":
                x = (x @ x.t() @ x).tanh()
            elif kind == "use" and waiting:
                results.append(waiting.pop(0).exp())
            elif kind == "reduce":
                waiting.append(collectives.all_reduce(x * number, "sum", dist.group.WORLD))
            elif kind == "scatter":
                waiting.append(collectives.reduce_scatter_tensor(x.t() @ x, "sum", 0, dist.group.WORLD))
            else:
                waiting.append(gather(rows + number if kind == "gather" else x.t()[:2]))
        return (*results, *waiting, x)

    gm = captured(f, X, ROWS)
    before, order = (
        copy_graph(gm),
        [n.name for n in gm.graph.nodes if "c10d" in str(n.target) and "wait" not in n.name],
    )
    rewrite(OverlapCollectives(max_bytes=max_bytes), gm)
    gm.graph.lint()
    assert [n.name for n in gm.graph.nodes if "c10d" in str(n.target) and "wait" not in n.name] == order
    for one, other in zip(Run(before)([X, ROWS]), Run(gm)([X, ROWS]), strict=True):
        assert torch.equal(one, other)


def test_other_places_of_messages_are_proved():
    """The table of the pass's page."""
    proof = prove(PASS, layers, X, *SHARDS[:3])
    assert "| the model | inference | EQUAL | as it is |" in proof.table(), proof
