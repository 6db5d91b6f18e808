"""Signatures say what a graph sends in words that every rank shares."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch import fx, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_reduce
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxpasses import compile_frame
from fxpasses.compiling.history import describe_compilation
from fxpasses.compiling.options import Options
from fxpasses.distributed import agreement
from fxpasses.distributed.collective_call import CollectiveCall, first_difference
from fxpasses.distributed.signature import signatures

_C10D = torch.ops._c10d_functional


def graph_of(order, sizes=((4,), (4,))):
    """Sums of ``2 * a`` and ``3 * b`` over two groups or one, in an order."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "ab"]
    for node, size in zip(inputs, sizes, strict=True):
        node.meta["val"] = torch.empty(size, device="meta")
    results = {}
    for number, group in order:
        made = graph.call_function(torch.ops.aten.mul.Scalar, (inputs[number], 2 + number))
        made.meta["val"] = inputs[number].meta["val"]
        total = graph.call_function(_C10D.all_reduce.default, (made, "sum", group))
        total.meta["val"] = made.meta["val"]
        results[number] = graph.call_function(_C10D.wait_tensor.default, (total,))
    graph.output(tuple(results[number] for number in sorted(results)))
    return graph


NAMES = {"a": "a", "b": "b", "output 0": "out 0", "output 1": "out 1"}


def test_collectives_in_order_with_what_they_carry():
    (calls,) = signatures(graph_of([(1, "0"), (0, "0")]), NAMES).values()
    assert [str(call) for call in calls] == [
        "all_reduce(float32[4], 'sum') of b -> out 1",
        "all_reduce(float32[4], 'sum') of a -> out 0",
    ]


def test_groups_have_signatures_of_their_own():
    found = signatures(graph_of([(0, "tp"), (1, "dp")]), NAMES)
    assert {group: len(calls) for group, calls in found.items()} == {"tp": 1, "dp": 1}


def test_a_value_of_this_ranks_partition_says_nothing():
    """The same sum, of a value that was saved here and computed again there."""
    saved = signatures(graph_of([(0, "0")]), {"output 0": "out 0"})["0"]
    assert saved[0].carries == "out 0"


def test_a_graph_without_collectives_has_no_signature():
    assert signatures(graph_of([]), NAMES) == {}


def test_names_of_inputs_are_those_of_tensors():
    """Which layer's hooks Dynamo found the mesh in is another one on ranks that call layers in another order; it says nothing about the tensors."""
    gm = fx.symbolic_trace(lambda w, mesh: w)
    made = describe_compilation(gm, [torch.ones(2), object()], Options())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        agreement = compile_frame._rank_check(Options(), made, gm, [torch.ones(2), object()])
    finally:
        dist.destroy_process_group()
    assert agreement._inputs == ["w", ""]


_CALLS = st.builds(
    CollectiveCall,
    st.sampled_from(["all_reduce", "all_gather_into_tensor"]),
    st.sampled_from(["'sum'", "'avg'"]),
    st.lists(st.sampled_from(["float32[4]", "float32[?]", "float32[5]", "int64[]"]), max_size=2).map(tuple),
    st.sampled_from(["a", "b"]),
)


@given(st.lists(_CALLS, max_size=4), st.lists(_CALLS, max_size=4))
def test_difference_is_symmetric_and_absent_between_equals(ours, theirs):
    assert first_difference(ours, ours) is None
    assert first_difference(ours, theirs) == first_difference(theirs, ours)


@pytest.fixture
def two_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def total(value):
    return all_reduce(value, "sum", dist.group.WORLD)


def in_order(order, *calls):
    """The results of calls that are made in an order."""
    made = {number: calls[number]() for number in order}
    return [made[number] for number in range(len(calls))]


def operators(rank, order, x, state, other):
    mean, square = in_order(order, lambda: total(x.mean(0)), lambda: total(x.square().mean(0)))
    return (x - mean) * torch.rsqrt(square - mean.square())


def parts(rank, order, x, state, other):
    a, b = x.chunk(2)
    return torch.cat(in_order(order, lambda: total(a + 0), lambda: total(b + 0)))


def constants(rank, order, x, state, other):
    a, b = in_order(order, lambda: total(x * 2.0), lambda: total(x * 3.0))
    return a - b.sin()


def states(rank, order, x, state, other):
    in_order(order, lambda: state.copy_(total(x.sin())), lambda: other.lerp_(total(x.cos()), 0.5))
    return x + 1


def uneven_shards(rank, order, x, state, other):
    """The other rank has a row less, and pads it."""
    own = nn.functional.pad(x[: 4 - rank], (0, 0, 0, rank))
    a, b = in_order(
        order,
        lambda: all_gather_tensor_autograd(own.sin(), 0, dist.group.WORLD),
        lambda: all_gather_tensor_autograd(own.cos() / (4 - rank), 0, dist.group.WORLD),
    )
    return (a - b.sin())[:7]


def a_third_one_of_its_own(rank, order, x, state, other):
    a, b, c = in_order(
        [*order, 2],
        lambda: total(x.sin()),
        lambda: total(x.cos()),
        lambda: total(x.tanh() * (rank + 0.5) if rank else x.exp()),
    )
    return a - b.sin() + c.cos()


def each_has_its_turn(rank, order, x, state, other):
    """Each rank tells the others its own value: nothing is in another order."""
    a, b = (total(x * float(turn == rank)) for turn in (0, 1))
    return a - b.sin()


def its_own_sign(rank, order, x, state, other):
    a, b = total(x.sin()), total(x.cos())
    return b - a if rank else a - b


def logged_on_one(rank, order, x, state, other):
    a, b = total(x.sin()), total(x.cos())
    if rank:
        state.copy_(a)
    return a - b.sin()


_PROGRAMS = (operators, parts, constants, states, uneven_shards, a_third_one_of_its_own)
_NAMES = {"x_1": "x", "state_1": "state", "other_1": "other", "output 0": "out"}


def signature_of(program, rank, order):
    def step(x, state, other):
        return program(rank, order, x, state, other)

    gm = make_fx(step, tracing_mode="fake")(*(torch.ones(4, 2) for _ in range(3)))
    (calls,) = signatures(gm.graph, _NAMES).values()
    return calls


@pytest.mark.parametrize("program", _PROGRAMS, ids=lambda program: program.__name__)
def test_sums_that_swap_are_told_apart_by_what_they_are_computed_from(two_ranks, program):
    ours, theirs = signature_of(program, 0, [0, 1]), signature_of(program, 1, [1, 0])
    assert [first_difference(ours, theirs), first_difference(theirs, ours)] == [0, 0]
    assert str(ours[0]) != str(theirs[0]) or program is constants


@pytest.mark.parametrize("program", [*_PROGRAMS, each_has_its_turn, its_own_sign, logged_on_one])
def test_what_is_each_ranks_own_is_no_other_order(two_ranks, program):
    ours, theirs = (signature_of(program, rank, [0, 1]) for rank in (0, 1))
    assert first_difference(ours, theirs) is None


def test_what_is_written_in_place_is_told(two_ranks):
    first, second = signature_of(states, 0, [0, 1])
    assert str(first).endswith("= sin(x) -> state in place of x")
    assert str(second).endswith("= cos(x) -> other in place of x")


class _Norm(nn.Module):
    def forward(self, value):
        return total(value.detach()) - value


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), _Norm()

    def forward(self, x):
        return x + self.norm(self.a(x)) * self.norm(self.b(x)).tanh()


def test_collectives_of_regions_that_lie_in_regions(two_ranks, monkeypatch):
    told = []

    def seen(*arguments):
        told.append(signatures(*arguments))
        return told[-1]

    monkeypatch.setattr(agreement, "signatures", seen)
    options = {"compiler": "eager", "regions": "always", "ranks": "check"}
    torch._dynamo.reset()
    with torch.no_grad():
        model = nn.Sequential(*(_Layer() for _ in range(3)))
        torch.compile(model, backend="fxpasses", options=options)(torch.ones(2, 4))
    (calls,) = told[0].values()
    assert len(calls) == 6
    assert [call.carries.partition(",")[0] for call in calls[:2]] == ["args_0"] * 2
