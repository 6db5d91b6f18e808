"""Graphs around calls that are compiled already: ``_foreach_sin`` and ``_foreach_mul`` play their part."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses import _torch
from fxpasses.compiling.compiled_segments import (
    MOST_SEGMENTS,
    Cut,
    Segment,
    changed_strides,
    cut_into_segments,
    segment_module,
    stitch_segments,
)

pytestmark = pytest.mark.usefixtures("old_objects_aside")

aten = torch.ops.aten
CALLS = (aten._foreach_sin.default, aten._foreach_mul.List)


def direct(node: fx.Node) -> Callable[..., Any] | None:
    if node.target not in CALLS:
        return None

    def run(*lists: list[torch.Tensor]) -> Any:
        results = node.target(*map(list, lists))  # type: ignore[operator]
        for given_list in lists:
            given_list.clear()
        return results

    return run


def compiled(found: Cut) -> Callable[[list[Any]], Any]:
    def segment(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
        def run(values: list[Any]) -> Any:
            taken = list(values)
            values.clear()
            return gm(*taken)

        return run

    return stitch_segments(found, [segment(segment_module(found.gm, s)) for s in found.segments])


def traced(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> fx.GraphModule:
    gm = make_fx(function, tracing_mode="symbolic" if dynamic else "fake", _allow_non_fake_inputs=True)(
        *inputs
    )
    gm.graph.eliminate_dead_code()
    (output,) = gm.graph.find_nodes(op="output")
    if not isinstance(output.args[0], (list, tuple)):
        output.args = ((output.args[0],),)
    gm.recompile()
    return gm


def stack(*inputs: torch.Tensor) -> Any:
    x, w = inputs
    x = x.cos() + 1
    for _ in range(5):
        x, extra = torch._foreach_mul([x, w], [w, w])
        x, extra = torch._foreach_sin([x, extra])
    return x.exp() + extra, extra


@pytest.mark.slow
def test_a_stack_is_two_segments() -> None:
    x, w = torch.randn(3), torch.randn(3)
    gm = traced(stack, x, w)
    found = cut_into_segments(gm, direct)
    assert found is not None
    assert [len(s.nodes) for s in found.segments] == [2, 2]
    call = compiled(found)
    values = [x, w]
    torch.testing.assert_close(call(values), stack(x, w), rtol=0, atol=0)
    assert values == []


def test_no_direct_calls_no_cut() -> None:
    assert cut_into_segments(traced(lambda x: x.sin() + 1, torch.ones(2)), direct) is None


def test_too_many_segments_stay_one_graph() -> None:
    def deep(x: torch.Tensor, layers: int) -> torch.Tensor:
        for _ in range(layers):
            (x,) = torch._foreach_sin([x.exp()])
        return x

    found = cut_into_segments(traced(lambda x: deep(x, MOST_SEGMENTS), torch.ones(2)), direct)
    assert found is not None
    assert len(found.segments) == MOST_SEGMENTS
    assert cut_into_segments(traced(lambda x: deep(x, MOST_SEGMENTS + 1), torch.ones(2)), direct) is None


def test_updates_of_inputs_come_last() -> None:
    def function(x: torch.Tensor, state: torch.Tensor) -> Any:
        new = state + 1
        (y,) = torch._foreach_sin([x + state])
        (z,) = torch._foreach_sin([state])
        state.copy_(new)
        return y, z

    gm = traced(function, torch.randn(3), torch.randn(3))
    found = cut_into_segments(gm, direct)
    assert found is not None
    x, state = torch.randn(3), torch.randn(3)
    wanted_state = state.clone()
    wanted = function(x, wanted_state)
    torch.testing.assert_close(compiled(found)([x, state]), wanted, rtol=0, atol=0)
    torch.testing.assert_close(state, wanted_state)


def test_a_graph_may_only_update_its_inputs() -> None:
    def function(x: torch.Tensor, state: torch.Tensor) -> Any:
        (y,) = torch._foreach_sin([x.exp()])
        state.copy_(y + state)
        return ()

    found = cut_into_segments(traced(function, torch.randn(3), torch.randn(3)), direct)
    assert found is not None
    x, state = torch.randn(3), torch.randn(3)
    wanted = x.exp().sin() + state
    assert compiled(found)([x, state]) == ()
    torch.testing.assert_close(state, wanted)


def test_other_writes_to_memory_are_left_alone() -> None:
    def function(x: torch.Tensor) -> Any:
        y = x + 1
        y.mul_(2)
        return torch._foreach_sin([y])[0]

    gm = traced(function, torch.ones(3))
    assert any(n.target is aten.mul_.Tensor for n in gm.graph.nodes)
    assert cut_into_segments(gm, direct) is None


def test_random_numbers_in_the_order_of_eager_are_left_alone() -> None:
    gm = traced(lambda x: torch._foreach_sin([torch.rand_like(x)])[0] + torch.rand_like(x), torch.ones(3))
    assert cut_into_segments(gm, direct) is not None
    with _torch.inductor_config.patch(fallback_random=True):
        assert cut_into_segments(gm, direct) is None


def test_a_constant_goes_along_with_its_segment() -> None:
    constant = torch.tensor([1.0, 2.0])
    gm = traced(lambda x: torch._foreach_sin([x + constant])[0] * constant, torch.ones(2))
    found = cut_into_segments(gm, direct)
    assert found is not None
    x = torch.randn(2)
    torch.testing.assert_close(compiled(found)([x])[0], gm(x)[0], rtol=0, atol=0)


def test_sizes_that_no_input_gives_as_a_number_are_left_alone() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        (y,) = torch._foreach_sin([x.view(-1)])
        return y.view(x.shape) + w.sum(), y.new_ones(x.shape[0] * 2)

    gm = traced(function, torch.ones(3, 4), torch.ones(2), dynamic=True)
    assert not any(isinstance(n.meta["val"], torch.SymInt) for n in gm.graph.find_nodes(op="placeholder"))
    assert cut_into_segments(gm, direct) is None


def test_what_nobody_needs_any_more_is_freed() -> None:
    """When the last step runs, only its own arguments are alive."""
    alive: list[int] = []
    seen: list[weakref.ref[torch.Tensor]] = []

    def watching(node: fx.Node) -> Callable[..., Any] | None:
        if node.target is not aten._foreach_sin.default:
            return None

        def run(tensors: list[torch.Tensor]) -> Any:
            given_now = tensors.pop()
            seen.append(weakref.ref(given_now))
            results = [given_now.sin()]
            del given_now
            gc.collect()
            alive.append(sum(ref() is not None for ref in seen))
            return results

        return run

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            (x,) = torch._foreach_sin([x])
        return x

    found = cut_into_segments(traced(function, torch.ones(3)), watching)
    assert found is not None
    assert found.segments == []
    stitch_segments(found, [])([torch.randn(3)])
    assert alive == [0, 0, 0, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_any_graph_gives_the_same(choices: list[tuple[int, int, int]]) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        values = [x, y]
        for kind, a, b in choices:
            left, right = values[a % len(values)], values[b % len(values)]
            if kind == 0:
                values += torch._foreach_sin([left, right])
            elif kind == 1:
                values += torch._foreach_mul([left], [right])
            elif kind == 2:
                values.append(left + right)
            elif kind == 3:
                values.append(left.view(2, 2).t().reshape(4))
            else:
                values.append(left.exp().clamp(max=2.0))
        return tuple(values[2:]) or (x,)

    x, y = torch.randn(4), torch.randn(4)
    gm = traced(function, x, y)
    found = cut_into_segments(gm, direct)
    if found is None:
        return
    assert sum(len(s.nodes) for s in found.segments) <= len(gm.graph.nodes)
    torch.testing.assert_close(compiled(found)([x, y]), tuple(gm(x, y)), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["self", "inputs", "given", "results"])
def test_names_of_values_do_not_clash_with_those_of_the_function(name: str) -> None:
    graph = fx.Graph()
    value = graph.placeholder(name)
    value.meta["val"] = torch.ones(2)
    call = graph.call_function(aten._foreach_sin.default, ([value],))
    result = graph.call_function(__import__("operator").getitem, (call, 0))
    graph.output((result, None, 3))
    found = cut_into_segments(fx.GraphModule({}, graph), direct)
    assert found is not None
    out = compiled(found)([torch.ones(2)])
    torch.testing.assert_close(out[0], torch.ones(2).sin())
    assert out[1:] == (None, 3)


def test_direct_calls_get_the_strides_that_were_traced():
    """A segment before a call gives another layout than the traced one: the call gets a copy, segments what there is."""

    def function(x):
        y = x * 2
        (a,) = aten._foreach_sin([y])
        return a + y

    x = torch.randn(3, 4)
    found = cut_into_segments(traced(function, x), direct)
    assert found is not None
    (node,) = found.segments[0].outputs
    assert changed_strides(found, {node: node.meta["val"]}) == {}
    other = node.meta["val"].as_strided((3, 4), (1, 3))
    changed = changed_strides(found, {node: other})
    assert changed == {node: (4, 1)}
    seen = []

    def watched(strides):
        def run(values):
            seen.append([v.stride() for v in values])
            (value,) = values if len(values) == 1 else (values[0] + values[1],)
            return [torch.empty_strided(value.shape, strides).copy_(value * (2 if len(values) == 1 else 1))]

        return run

    inner = found.direct
    for call, run in inner.items():
        inner[call] = lambda *lists, run=run: (seen.append([v.stride() for v in lists[0]]), run(*lists))[1]
    call = stitch_segments(found, [watched((1, 3)), watched((4, 1))], changed)
    (result,) = call([x])
    torch.testing.assert_close(result, function(x))
    assert seen[1] == [(4, 1)]
    assert (1, 3) in seen[2]


@pytest.fixture
def group() -> Iterator[str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_messages_that_travel_keep_their_places(group: str) -> None:
    sends = torch.ops._c10d_functional

    def gather(shard: torch.Tensor) -> torch.Tensor:
        return sends.all_gather_into_tensor(torch.cat([shard.view(-1)]), 1, group)

    def step(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = gather(a), gather(b)
        x = (x @ sends.wait_tensor(first).view(3, 3)).sin()
        total = sends.all_reduce(x, "sum", group)
        y = x @ x
        z = (y @ sends.wait_tensor(second).view(3, 3)).cos()
        return z, sends.wait_tensor(total)

    gm = traced(step, *(torch.randn(3, 3) for _ in range(3)))
    found = cut_into_segments(gm, direct)
    assert found is not None
    steps = [
        [n.target for n in step.nodes] if isinstance(step, Segment) else step.target for step in found.steps
    ]
    reads = [aten.view.default, sends.wait_tensor.default]
    assert [target for target in steps if target not in (*reads, aten.cat.default)] == [
        sends.all_gather_into_tensor.default,
        sends.all_gather_into_tensor.default,
        [aten.mm.default, aten.sin.default],
        sends.all_reduce.default,
        [aten.mm.default],
        [aten.mm.default, aten.cos.default],
    ]
    values = [torch.randn(3, 3) for _ in range(3)]
    torch.testing.assert_close(compiled(found)(list(values)), step(*values), rtol=0, atol=0)


def test_messages_that_are_waited_for_at_once_make_no_segments(group: str) -> None:
    sends = torch.ops._c10d_functional

    def step(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return x @ sends.wait_tensor(sends.all_gather_into_tensor(a, 1, group))

    assert cut_into_segments(traced(step, torch.randn(3, 3), torch.randn(3, 3)), direct) is None
