"""Structure on a process group that does nothing; results on two processes in one test."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

import torch.distributed._functional_collectives as collectives  # noqa: E402

from fxpasses.checking.execution.interpret import Run  # noqa: E402
from fxpasses.graphs.rewriting import copy_graph  # noqa: E402
from fxpasses.passes import BucketCollectives  # noqa: E402
from fxpasses.testing import prove  # noqa: E402
from tests import children  # noqa: E402
from tests.fxpasses.passes.support import assert_golden, assert_left_alone, captured, rewrite  # noqa: E402

pytestmark = pytest.mark.usefixtures("fake_group")

PASS = BucketCollectives()
X, Y, Z = torch.ones(3, 2), torch.ones(4), torch.ones(2, 2)


def reduce(x, kind="sum"):
    return collectives.all_reduce(x, kind, dist.group.WORLD)


def reductions(gm):
    return len(gm.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_reduce.default))


def test_golden():
    assert_golden(PASS, lambda x, y, z: (reduce(x.sin()) * 2, reduce(y.cos()), reduce(z) + 1), X, Y, Z)


def test_results_that_are_used_in_between():
    gm = captured(
        lambda x, y, z: (reduce(x.sin()).exp() + 1, reduce(y.cos()) * 2, reduce(z.tan()) - 1), X, Y, Z
    )
    assert rewrite(PASS, gm)
    assert reductions(gm) == 1


def test_in_place_reductions():
    def f(x, y, z):
        for gradient in (x, y, z):
            dist.all_reduce(gradient)

    gm = captured(f, X.clone(), Y.clone(), Z.clone())
    assert rewrite(
        PASS, gm
    )  # the structure check raises no alarm, though each result is part of one message now
    assert reductions(gm) == 1


def test_memory_that_is_written_to_before_is_left_alone():
    def f(x, y):
        dist.all_reduce(x)
        dist.all_reduce(y.copy_(x))

    assert_left_alone(PASS, f, X.clone(), X.clone())


def test_buckets_have_a_size():
    gm = captured(lambda x, y, z: (reduce(x) * 2, reduce(y) * 2, reduce(z) * 2), X, Y, Z)
    assert rewrite(BucketCollectives(max_bytes=40), gm)
    assert reductions(gm) == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, z: reduce(reduce(x).exp()) * 2,  # one depends on the other
        lambda x, y, z: (reduce(x) * 2, reduce(y, "max") * 2),  # different reductions
        lambda x, y, z: (reduce(x) * 2, reduce(y.double()) * 2),  # different types
        lambda x, y, z: (reduce(x.t()) * 2, y * 2),  # one only
    ],
)
def test_left_alone(function):
    assert_left_alone(PASS, function, X, Y, Z)


def gather(x):
    return collectives.all_gather_tensor(x, 0, dist.group.WORLD)


def scatter(x):
    return collectives.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)


X_ROWS, Y_ROWS = torch.randn(2, 3), torch.randn(4)


def messages(gm):
    return [n.target for n in gm.graph.nodes if "gather" in str(n.target) or "scatter" in str(n.target)]


def test_gathered_and_scattered():
    """Of three gathers and two scatters one of each is left; the checks make up what other ranks hold."""

    def f(x, y, z):
        a, b, c = gather(x), gather(y), gather(z)
        return a.sin(), b * 2, c + 1, scatter(a.cos()), scatter(b.tan())

    gm = captured(f, X, Y, Z)
    assert rewrite(PASS, gm)
    assert len(messages(gm)) == 2


def test_kinds_that_depend_on_each_other():
    def f(x, y, z):
        total = reduce(x) * 2
        return gather(total), scatter(gather(y) + 1), reduce(z) + total.sum()

    gm = captured(f, X, Y, Z)
    assert rewrite(PASS, gm)
    assert reductions(gm) == 1


@pytest.mark.slow
@given(
    st.lists(
        st.sampled_from(["reduce", "gather", "scatter", "gathered sum", "of the last"]),
        min_size=2,
        max_size=8,
    )
)
@settings(max_examples=15, deadline=None)
def test_any_sequence(kinds):
    """Collectives of all kinds, of inputs and of one another, in any order: what is computed stays."""
    makers = {
        "reduce": reduce,
        "gather": gather,
        "scatter": scatter,
        "gathered sum": lambda x: reduce(gather(x)),
    }

    def f(x, y):
        last, results = x, []
        for number, kind in enumerate(kinds):
            given = last if kind == "of the last" else (x, y)[number % 2] + number
            last = makers.get(kind, gather)(given).exp().sum() * torch.ones(2, 3)
            results.append(last)
        return tuple(results)

    gm = captured(f, torch.ones(2, 3), torch.ones(4))
    before = Run(copy_graph(gm))([X_ROWS, Y_ROWS])
    rewrite(PASS, gm)
    for one, other in zip(before, Run(gm)([X_ROWS, Y_ROWS]), strict=True):
        torch.testing.assert_close(one, other)


PROGRAM = """
import os
import sys
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from fxpasses.backend import fxpasses as backend
from fxpasses import stats

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
inputs = [torch.arange(n, dtype=torch.float32) * (rank + 1) for n in (3, 5, 2)]


def f(*tensors):
    gathered = [collectives.all_gather_tensor(t, 0, dist.group.WORLD) for t in tensors]
    scattered = [collectives.reduce_scatter_tensor(t * 2, "sum", 0, dist.group.WORLD) for t in gathered]
    sums = [collectives.all_reduce(t * 2, "sum", dist.group.WORLD) + 1 for t in tensors]
    return *sums, *[t + 0 for t in gathered], *[t + 0 for t in scattered]


options = {"passes": ["default", "bucket_collectives", "default"], "compiler": "eager"}
results = torch.compile(f, backend=backend, options=options)(*inputs)
assert stats().pass_changes["bucket_collectives"] == 1
for n, total, gathered, scattered in zip((3, 5, 2), results, results[3:], results[6:]):
    row = torch.arange(n, dtype=torch.float32)
    assert torch.equal(total, row * 6 + 1), total
    assert torch.equal(gathered, torch.cat([row, row * 2])), gathered
    assert torch.equal(scattered, row * (1 + rank) * 4), scattered
dist.barrier()
os._exit(0)  # destructors of process groups may wait for threads that want the GIL
"""


@pytest.mark.slow
def test_two_processes(tmp_path):
    script = tmp_path / "reduce.py"
    script.write_text(PROGRAM)
    root = Path(__file__).parents[3]
    running = [children.Child([script, rank, tmp_path / "store"], cwd=root) for rank in (0, 1)]
    done = [child.finish(timeout=120) for child in running]
    assert [rank.returncode for rank in done] == [0, 0], done


def test_buckets_are_proved():
    """The table of the pass's page."""
    proof = prove(PASS, lambda x, y, z: (reduce(x.sin()) * 2, reduce(y.cos()), reduce(z) + 1), X, Y, Z)
    assert "| the model | inference | EQUAL | as it is |" in proof.table(), proof
