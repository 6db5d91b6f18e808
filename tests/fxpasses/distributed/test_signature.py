"""Signatures say what a graph sends in words that every rank shares."""

import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxpasses import compile_frame
from fxpasses.compiling.history import describe_compilation
from fxpasses.compiling.options import Options
from fxpasses.distributed.signature import CollectiveCall, first_difference, signatures

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
