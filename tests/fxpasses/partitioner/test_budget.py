"""Memory budgets on real joint graphs, and the report."""

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition

import fxpasses
from fxpasses.partitioner import META_KEY, PartitionError, PartitionOptionError, PartitionReport, partition
from fxpasses.partitioner.cost import CostModel
from tests.fxpasses.partitioner import models
from tests.fxpasses.partitioner.functions import checkpointed, random_noise
from tests.fxpasses.partitioner.support import Split, compile_split

BUDGETS = [k / 10 for k in range(11)]

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], bool]] = {
    "gpt": (lambda: models.GPT(2, 32, 2), lambda: (torch.randint(0, 256, (2, 24)),), False),
    "convnet": (lambda: models.ConvNet(2, 8), lambda: (torch.randn(2, 3, 16, 16),), False),
    "convnet, dynamic": (lambda: models.ConvNet(1, 8), lambda: (torch.randn(2, 3, 16, 16),), True),
    "encoder decoder": (
        lambda: models.EncoderDecoder(16, 1),
        lambda: (torch.randn(2, 6, 16), torch.randn(2, 5, 16)),
        False,
    ),
    "mixture of experts": (models.MixtureOfExperts, lambda: (torch.randn(6, 16),), False),
}


@pytest.fixture(scope="module", params=MODELS)
def split(request: pytest.FixtureRequest) -> Split:
    make, inputs, dynamic = MODELS[request.param]
    torch.manual_seed(0)
    compiled, splits = compile_split(make().train(), dynamic=dynamic)
    compiled(*inputs())
    return splits[0]


def again(split: Split, budget: float) -> tuple[fx.GraphModule, fx.GraphModule, PartitionReport]:
    forward, backward = partition(
        fx.GraphModule(split.joint, copy.deepcopy(split.joint.graph)),
        (),
        num_fwd_outputs=split.num_fwd_outputs,
        static_lifetime_input_indices=split.static_input_indices,
        memory_budget=budget,
    )
    return forward, backward, forward.meta[META_KEY]


@pytest.mark.slow
def test_bytes_and_flops_move_one_way_with_the_budget(split: Split) -> None:
    reports = [again(split, budget)[2] for budget in BUDGETS]
    zero, full = reports[0].saved_bytes, reports[-1].saved_bytes
    for less, more in itertools.pairwise(reports):
        assert less.saved_bytes <= more.saved_bytes
        assert less.recomputed_flops >= more.recomputed_flops
        assert {v.name for v in less.recomputed} >= {v.name for v in more.recomputed}
    for budget, report in zip(BUDGETS, reports, strict=True):
        assert report.memory_budget == budget
        assert report.saved_bytes <= zero + budget * (full - zero)
        assert report.bytes_at_full_budget == full
        assert report.bytes_at_zero_budget in (zero, None)
    assert zero < full
    assert reports[0].recomputed_flops > reports[-1].recomputed_flops


def test_at_zero_nothing_is_saved_that_may_run_twice(split: Split) -> None:
    saved = again(split, 0.0)[2].saved
    assert saved
    for value in saved:
        assert value.kind in ("input", "static input", "symbol") or value.name.endswith("_before"), value


def test_the_same_graph_is_split_the_same_way_each_time(split: Split) -> None:
    for budget in (1.0, 0.4):
        (one, other) = (again(split, budget) for _ in range(2))
        assert str(one[0].graph) == str(other[0].graph)
        assert str(one[1].graph) == str(other[1].graph)


def test_just_under_one_is_the_unpriced_cut(split: Split) -> None:
    """The chain of cuts starts where the cut at a budget of 1 is."""
    full, almost = again(split, 1.0)[2], again(split, 1 - 1e-12)[2]
    assert almost.bytes_at_full_budget == full.saved_bytes


def test_saves_no_more_than_torch(split: Split) -> None:
    theirs, _ = min_cut_rematerialization_partition(
        fx.GraphModule(split.joint, copy.deepcopy(split.joint.graph)),
        (),
        num_fwd_outputs=split.num_fwd_outputs,
        static_lifetime_input_indices=split.static_input_indices,
    )
    ours, _, report = again(split, 1.0)
    assert saved_bytes(ours, split) == report.saved_bytes
    assert saved_bytes(ours, split) <= saved_bytes(theirs, split)


def saved_bytes(forward: fx.GraphModule, split: Split) -> int:
    placeholders = forward.graph.find_nodes(op="placeholder")
    static = {placeholders[i].name for i in split.static_input_indices}
    (output,) = forward.graph.find_nodes(op="output")
    cost = CostModel()
    return sum(cost.bytes_of(n) for n in output.args[0][split.num_fwd_outputs :] if n.name not in static)


def test_report_agrees_with_the_graphs(split: Split) -> None:
    forward, backward, report = again(split, 0.5)
    (output,) = forward.graph.find_nodes(op="output")
    assert [v.name for v in report.saved] == [n.name for n in output.args[0][split.num_fwd_outputs :]]
    placeholders = [n.name for n in backward.graph.find_nodes(op="placeholder")]
    assert {v.name for v in report.saved} <= set(placeholders) | {
        f"{p.removesuffix('_before')}" for p in placeholders
    }
    in_both = {n.name for n in forward.graph.nodes if n.op == "call_function"} & {
        n.name for n in backward.graph.nodes if n.op == "call_function"
    }
    assert {v.name for v in report.recomputed} == in_both
    assert report.recomputed_flops == sum(v.flops for v in report.recomputed)
    assert set(report.seconds) == {"prepare", "classify", "cut", "extract", "total"}
    assert str(report.saved_bytes) in str(report).replace(",", "")


def test_joint_graph_stays_as_it_was(split: Split) -> None:
    joint = fx.GraphModule(split.joint, copy.deepcopy(split.joint.graph))
    before = str(joint.graph)
    partition(joint, (), num_fwd_outputs=split.num_fwd_outputs, memory_budget=0.3)
    assert str(joint.graph) == before


@pytest.mark.parametrize("budget", [-0.1, 1.5, "half", float("nan")])
def test_impossible_budget_is_refused_before_anything_happens(budget: Any) -> None:
    with pytest.raises(PartitionOptionError, match="memory_budget") as error:
        partition(None, (), num_fwd_outputs=1, memory_budget=budget)  # type: ignore[arg-type]
    assert error.value.option == "memory_budget"


def test_none_reads_the_setting_of_torch() -> None:
    compiled, splits = compile_split(torch.nn.Linear(3, 3), memory_budget=None)
    with torch._functorch.config.patch(activation_memory_budget=0.25):
        compiled(torch.randn(2, 3, requires_grad=True))
    assert splits[0].report.memory_budget == 0.25


def test_region_overrides_the_budget() -> None:
    region = getattr(torch.autograd.graph, "region_activation_memory_budget", None)
    if region is None:
        pytest.skip("this torch has no region_activation_memory_budget")

    def function(x: Tensor) -> Tensor:
        with region(0.125):
            return (x.exp() @ x).sin().sum()

    compiled, splits = compile_split(function, memory_budget=1.0)
    compiled(torch.randn(3, 3, requires_grad=True)).backward()
    assert splits[0].report.memory_budget == 0.125


def test_older_marker_on_one_node_sets_the_budget(split: Split) -> None:
    joint = fx.GraphModule(split.joint, copy.deepcopy(split.joint.graph))
    next(iter(joint.graph.nodes)).meta["memory_budget"] = 0.75
    forward, _ = partition(joint, (), num_fwd_outputs=split.num_fwd_outputs)
    assert forward.meta[META_KEY].memory_budget == 0.75


def test_value_that_can_be_had_neither_way_is_named() -> None:
    """A checkpointed region is recomputed, but what it draws from cannot be saved or drawn again."""
    graph = fx.Graph()
    x, grad = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    x.meta["val"] = grad.meta["val"] = torch.empty(3, device="meta")
    pair = graph.call_function(torch.ops.aten.native_dropout.default, (x, 0.5, True))
    pair.meta["val"] = (x.meta["val"], x.meta["val"])
    whole = graph.call_function(torch.ops.aten.stack.default, (pair,))
    backward = graph.call_function(torch.ops.aten.mul.Tensor, (pair, grad))
    for node in (whole, backward):
        node.meta["val"] = x.meta["val"]
    graph.output([whole, backward])
    with pytest.raises(PartitionError, match="calls the RNG") as error:
        partition(fx.GraphModule(torch.nn.Module(), graph), (), num_fwd_outputs=1)
    assert error.value.node == pair.name


def test_checkpointed_region_is_recomputed_whatever_the_budget() -> None:
    compiled, splits = compile_split(checkpointed, memory_budget=1.0)
    compiled(torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True))
    reasons = {value.reason for value in splits[0].report.recomputed}
    assert "in a checkpointed region" in reasons
    assert any(value.source.startswith("mm") for value in splits[0].report.recomputed)


def test_random_numbers_are_saved_at_a_budget_of_zero() -> None:
    compiled, splits = compile_split(random_noise, memory_budget=0.0)
    compiled(torch.randn(4, requires_grad=True))
    drawn = [v for v in splits[0].report.saved if v.reason == "calls the RNG"]
    assert "rand_like.default" in {v.source for v in drawn}
    assert not any(v.source.startswith("rand") for v in splits[0].report.recomputed)


def test_report_survives_a_copy_of_its_module_but_is_no_part_of_its_pickle() -> None:
    compiled, splits = compile_split(lambda x: x.sin().exp())
    compiled(torch.randn(3, requires_grad=True))
    forward = splits[0].forward
    assert copy.deepcopy(forward).meta[META_KEY] is splits[0].report
    assert pickle.loads(pickle.dumps(splits[0].report)).saved == ()


def test_attention_counts_its_two_matmuls() -> None:
    query = torch.randn(2, 2, 8, 4, requires_grad=True)
    captured = fxpasses.capture(torch.nn.functional.scaled_dot_product_attention, query, query, query)
    cost = CostModel()
    flops = {
        str(n.target): cost.flops_of(n) for g in (captured.forward, captured.backward) for n in g.graph.nodes
    }
    forward = 2 * 2 * (2 * 2 * 8 * 8 * 4)
    assert flops["aten._scaled_dot_product_flash_attention_for_cpu.default"] == forward
    assert flops["aten._scaled_dot_product_flash_attention_for_cpu_backward.default"] == 2.5 * forward
