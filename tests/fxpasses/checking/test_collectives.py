"""Collectives: made up, or left out of the running; none may wait for another process."""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch
import torch.distributed._symmetric_memory
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fake.dispatch.communication import NAMESPACES, communicates
from fxpasses.checking.comparison.values import Reference, compare
from fxpasses.checking.execution.collectives import (
    UnknownCollective,
    collectives,
    mark_parameters,
    refuse_unknown,
    simulate_collective,
)
from fxpasses.checking.execution.inputs import Unsupported
from fxpasses.checking.execution.interpret import ExactRun, Run
from fxpasses.checking.stages.lowered import differences
from fxpasses.checking.stages.staged import stage_repro

functional = torch.ops._c10d_functional
X = torch.tensor([1.0, -4.0])


def graph_of(*steps):
    """A graph of calls, each on the result of the one before, with other arguments."""
    graph = fx.Graph()
    value = first = graph.placeholder("x")
    first.meta["val"] = X
    for target, *rest in steps:
        value = graph.call_function(target, (value, *rest))
        value.meta["val"] = X
    graph.output((value,))
    return fx.GraphModule(torch.nn.Module(), graph)


def every_collective():
    """All operators of the namespaces in which torch speaks with other processes."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace in NAMESPACES:
            packet, _, overload = rest.partition(".")
            yield getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def answered(target, *values, **named):
    """What a collective answers to processes that each send a value."""
    rest = named.pop("rest", ())
    return simulate_collective(target, [((value, *rest), named) for value in values])


def test_each_process_is_answered_with_what_all_send():
    reduce, Y, Z = functional.all_reduce.default, torch.tensor([0.0, 3.0]), torch.tensor([2.0, 2.0])
    assert [v.tolist() for v in answered(reduce, X, Y, Z, rest=("sum", "0"))] == [[3.0, 1.0]] * 3
    assert answered(reduce, X, Y, Z, rest=("max", "0"))[0].tolist() == [2.0, 3.0]
    gathered = answered(functional.all_gather_into_tensor.default, X, Y, Z, rest=(2, "0"))
    assert [v.tolist() for v in gathered] == [[1.0, -4.0, 0.0, 3.0]] * 3
    scattered = answered(functional.reduce_scatter_tensor.default, X, Y, Z, rest=("avg", 2, "0"))
    assert [v.tolist() for v in scattered] == [[1.0], [torch.tensor(1 / 3).item()], [1.0]]
    assert answered(functional.wait_tensor.default, X)[0] is X
    written = [X.clone(), Y.clone()]
    assert answered(functional.all_reduce_.default, *written, rest=("min", "0"))[0] is written[0]
    assert [v.tolist() for v in written] == [[0.0, -4.0]] * 2
    with pytest.raises(Unsupported, match="bxor"):
        answered(reduce, X, Y, rest=("bxor", "0"))


def test_more_kinds():
    rows = torch.arange(6.0).view(3, 2)
    to_all = answered(functional.all_to_all_single.default, rows, rows * 10, rest=([1, 1], [1, 2], "0"))
    assert to_all[0].tolist() == [[0.0, 1.0], [0.0, 10.0]]  # the first row of each
    older = torch.ops.c10d_functional
    assert torch.equal(
        answered(older.all_reduce.default, X, rest=("sum", "", [0, 1], 2))[0],
        answered(functional.all_reduce.default, X, rest=("sum", "0"))[0],
    )
    even = answered(older.all_to_all_single.default, rows[:2], rows[1:], rest=(None, None, "", [0, 1], 2))
    assert [v.tolist() for v in even] == [[[0.0, 1.0], [2.0, 3.0]], [[2.0, 3.0], [4.0, 5.0]]]
    out = torch.empty(4)
    assert answered(functional.all_gather_into_tensor_out.default, X, rest=(2, "0"), out=out)[0] is out
    assert out.tolist() == [1.0, -4.0] * 2  # one stands for several
    pairs = [X.clone(), X.clone()], [X + 1, X + 2]
    both = answered(functional.all_reduce_coalesced_.default, *pairs, rest=("sum", "0"))
    assert [v.tolist() for v in both[0]] == [[3.0, -7.0], [4.0, -6.0]]
    receive = functional.irecv.default
    (one,), (other,) = (answered(receive, value, rest=(1, 0, "0")) for value in (X, X * 9))
    assert torch.equal(one, other)
    assert not torch.equal(one, answered(receive, X, rest=(2, 0, "0"))[0])


SUM, WAIT = (functional.all_reduce.default, "sum", "0"), (functional.wait_tensor.default,)


def reduced_and_scaled(is_scaled_first):
    """A sum over processes, with a factor before or after it."""
    graph = fx.Graph()
    value, factor = (graph.placeholder(name) for name in ("x", "factor"))
    calls = [SUM, WAIT, (torch.ops.aten.mul.Tensor, factor)]
    for target, *rest in calls[2:] + calls[:2] if is_scaled_first else calls:
        value = graph.call_function(target, (value, *rest))
    graph.output((value,))
    for node in graph.nodes:
        node.meta["val"] = X
    return fx.GraphModule(torch.nn.Module(), graph)


def test_processes_hold_values_of_their_own():
    """A factor that each process has another of is no factor of their sum; one that all have is: a result of a collective, or a parameter."""
    before, after = (reduced_and_scaled(is_first) for is_first in (True, False))
    given, names = [X, torch.tensor([2.0, 2.0])], ["output 0", "x after the run", "factor after the run"]
    assert compare(Reference(before, given), after, names)
    for gm in (before, after):
        mark_parameters(gm, [X, torch.nn.Parameter(X)])
    assert compare(Reference(before, given), after, names) == []
    linear = [
        graph_of(SUM, WAIT, (torch.ops.aten.mul.Tensor, 3)),
        graph_of((torch.ops.aten.mul.Tensor, 3), SUM, WAIT),
    ]
    assert compare(Reference(linear[0], [X]), linear[1], names[:2]) == []


def test_a_sum_that_is_scattered_and_gathered_is_the_sum():
    parts = (
        (functional.reduce_scatter_tensor.default, "sum", 2, "0"),
        (functional.all_gather_into_tensor.default, 2, "0"),
    )
    for first, other in ((graph_of(SUM), graph_of(*parts)), (graph_of(*parts), graph_of(SUM))):
        assert compare(Reference(first, [X]), other, ["output 0", "x after the run"]) == []


@pytest.mark.parametrize("target", list(every_collective()), ids=str)
def test_none_is_really_called(target, monkeypatch):
    assert communicates(target)
    monkeypatch.setattr(type(target), "__call__", lambda *args, **kwargs: pytest.fail("really called"))
    rows, numbers = torch.ones(4, 2), {"group_size": 2, "src": 0, "dst": 0, "tag": 0}
    arguments = []
    for a in target._schema.arguments:
        text = str(a.type)
        if text == "Tensor":
            arguments.append(rows.clone())
        elif text == "List[Tensor]":
            arguments.append([rows.clone()])
        elif "op_list" in a.name:
            arguments.append(["irecv"])
        elif a.name.endswith("_list"):
            arguments.append([0])
        elif "split_sizes" in a.name:
            arguments.append([2, 2])
        elif "educe" in a.name:
            arguments.append("sum")
        else:
            arguments.append(numbers.get(a.name, "0"))
    positional = [v for v, a in zip(arguments, target._schema.arguments, strict=True) if not a.kwarg_only]
    named = {a.name: v for v, a in zip(arguments, target._schema.arguments, strict=True) if a.kwarg_only}
    if named.get("out") is not None and "reduce_scatter" in str(target):
        named["out"] = rows[:2].clone()
    elif named.get("out") is not None:
        named["out"] = torch.ones(8, 2)
    # Made up, or refused by name; a real call would fail the test.
    with contextlib.suppress(UnknownCollective):
        simulate_collective(target, [(positional, named)] * 2)


def test_other_libraries_collectives_are_known_by_their_schema():
    with torch.library._scoped_library("collectives_test", "FRAGMENT") as library:
        library.define("exchange(Tensor x, str group_name) -> Tensor")
        library.impl("exchange", lambda x, group: pytest.fail("really called"), "CPU")
        target = torch.ops.collectives_test.exchange.default
        gm = graph_of((target, "0"))
        for run in (Run(gm), ExactRun(gm)):
            with pytest.raises(UnknownCollective, match=r"collectives_test\.exchange"):
                run([X.clone()])
        with pytest.raises(Unsupported):
            Reference(gm, [X]).native  # noqa: B018
        # A rewrite that brings one in is not called wrong: nobody knows.
        plain = graph_of((torch.ops.aten.sin.default,))
        with pytest.raises(Unsupported):
            compare(Reference(plain, [X]), gm, ["output 0", "input x after the run"])


def test_inside_of_graphs():
    inner = graph_of((functional.all_reduce.default, "sum", "0"))
    outer = make_fx(
        lambda x: torch.cond(x.sum() > 0, lambda y: (y.sin(),), lambda y: (y.cos(),), (x,)),
        tracing_mode="fake",
    )(X)
    names = [n.target for n in outer.graph.find_nodes(op="get_attr")]
    setattr(outer, names[0], inner)
    refuse_unknown(outer, {"cond"})
    assert [str(node.target) for node, _ in collectives(outer)] == ["cond"]
    with pytest.raises(UnknownCollective, match="all_reduce"):
        refuse_unknown(outer)  # run by the operator itself, it would be a real one


def test_parts_are_not_run_alone(tmp_path):
    gm = graph_of((functional.all_reduce.default, "sum", "0"))
    with pytest.raises(UnknownCollective):
        differences(gm, [X])
    assert stage_repro(gm, [X], "capture", tmp_path)[0] == ""
    assert communicates(torch.distributed._functional_collectives.all_reduce)
    assert inspect.isfunction(torch.distributed._functional_collectives.all_reduce)


def test_a_dropped_exchange_is_seen():
    exchange = (functional.all_to_all_single.default, [1, 1], [1, 1], "0")
    wait = (functional.wait_tensor.default,)
    before, same, dropped = graph_of(exchange, wait), graph_of(exchange, wait), graph_of(wait)
    names = ["output 0", "input x after the run"]
    assert compare(Reference(before, [X]), same, names) == []
    assert [m.position for m in compare(Reference(before, [X]), dropped, names)][:1] == [0]
