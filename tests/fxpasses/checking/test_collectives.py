"""Collectives: made up, or left out of the running; none may wait for another process."""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch
import torch.distributed._symmetric_memory
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses.checking.collectives import (
    UnknownCollective,
    collectives,
    refuse_unknown,
    simulated,
)
from fxpasses.checking.inputs import Unsupported
from fxpasses.checking.interpret import ExactRun, Run
from fxpasses.checking.lowered import differences
from fxpasses.checking.staged import stage_repro
from fxpasses.checking.values import Reference, compare
from fxpasses.graphs.communication import NAMESPACES, communicates

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


def test_as_of_three_processes():
    reduce = simulated(functional.all_reduce.default)
    assert reduce(X, "sum", "0").tolist() == [-0.5, 2.0]
    assert reduce(X, "max", "0").tolist() == [1.0, 8.0]
    # A sum of parts is the part of a sum: what bucketing relies on.
    assert torch.equal(reduce(X[:1], "sum", "0"), reduce(X, "sum", "0")[:1])
    assert simulated(functional.all_gather_into_tensor.default)(X, 2, "0").shape == (4,)
    assert simulated(functional.reduce_scatter_tensor.default)(X, "avg", 2, "0").shape == (1,)
    assert simulated(functional.wait_tensor.default)(X) is X
    written = X.clone()
    assert simulated(functional.all_reduce_.default)(written, "min", "0") is written
    assert written.tolist() == [-2.0, -4.0]
    with pytest.raises(Unsupported, match="bxor"):
        reduce(X, "bxor", "0")
    assert simulated(torch.ops.aten.sin.default) is torch.ops.aten.sin.default


def test_more_kinds():
    rows = torch.arange(6.0).view(3, 2)
    to_all = simulated(functional.all_to_all_single.default)(rows, [1, 2], [2, 1], "0")
    assert to_all.tolist() == [[0.0, 1.0], [0.0, 2.0], [4.0, 6.0]]
    older = torch.ops.c10d_functional
    assert torch.equal(
        simulated(older.all_reduce.default)(X, "sum", "", [0, 1], 2),
        simulated(functional.all_reduce.default)(X, "sum", "0"),
    )
    assert simulated(older.all_to_all_single.default)(rows[:2], None, None, "", [0, 1], 2).shape == (2, 2)
    out = torch.empty(4)
    assert simulated(functional.all_gather_into_tensor_out.default)(X, 2, "0", out=out) is out
    assert out.tolist() == [1.0, -4.0, 2.0, -8.0]
    both = simulated(functional.all_reduce_coalesced_.default)([X.clone(), X.clone()], "sum", "0")
    assert [v.tolist() for v in both] == [[-0.5, 2.0]] * 2
    receive = simulated(functional.irecv.default)
    assert torch.equal(receive(X, 1, 0, "0"), receive(X * 9, 1, 0, "0"))
    assert not torch.equal(receive(X, 1, 0, "0"), receive(X, 2, 0, "0"))


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
        simulated(target)(*positional, **named)


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
