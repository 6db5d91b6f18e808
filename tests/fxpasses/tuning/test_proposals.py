"""Which steps are tried, and in which order."""

import time

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxpasses
import fxpasses.passes
from fxpasses.compiling.options import Options
from fxpasses.graphs.onednn import onednn_matmul
from fxpasses.passes import UseOnednnMatmuls
from fxpasses.tuning import choice, proposals
from fxpasses.tuning.choice import PLAIN, Choice
from fxpasses.tuning.freezing import FREEZING
from fxpasses.tuning.kernels import KernelTimes
from fxpasses.tuning.proposals import Proposals

aten = torch.ops.aten


def captured(model, *inputs, training=False):
    found = []

    def keep(gm, given):
        found.extend([gm, given])
        return gm.forward

    with torch.set_grad_enabled(training):
        torch._dynamo.reset()
        torch.compile(model, backend=keep)(*inputs)
    return found


def names(model, x, **more):
    gm, inputs = captured(model, x)
    with torch.no_grad():
        steps = Proposals(gm, inputs, Options(**more), "time", None, (), False)
        return [step.name for step, _ in steps(Choice())]


def test_freezing_is_tried_first_where_weights_are_laid_out():
    net = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.Flatten(), torch.nn.Linear(16 * 36, 64))
    tried = names(net.eval(), torch.randn(1, 8, 8, 8))
    assert tried[0] == FREEZING.name
    assert PLAIN.name not in tried, "the default passes change nothing"


def test_plain_is_tried_where_the_default_passes_change_the_graph():
    assert PLAIN.name in names(lambda x: (x.expand(8) * 1).sin() + x.clone().sin(), torch.randn(8))


@fxpasses.graph_pass(graphs=["inference"], numerics="bitwise")
def slow_default(gm):
    """Stands for a default pass that costs time."""
    changed = False
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.aten.sin.default:
            with gm.graph.inserting_after(node):
                value, users = node, list(node.users)
                for _ in range(8):
                    with gm.graph.inserting_after(value):
                        value = gm.graph.call_function(torch.ops.aten.neg.default, (value,))
            for user in users:
                user.replace_input_with(node, value)
            changed = True
    return changed


def test_tuning_never_loses_against_the_graph_without_the_default_passes(tmp_path, monkeypatch):
    given = lambda: (slow_default,)  # noqa: E731
    for module in (choice, proposals, fxpasses.compiling.options):
        monkeypatch.setattr(module, "default_passes", given)
    model, x = torch.sin, torch.randn(400, 400)
    how = {"options": {"compiler": "eager"}, "cache": tmp_path, "clock": time.process_time, "show": False}
    with torch.no_grad():
        tuned = fxpasses.tune(lambda x: model(x), x, passes=[], **how)
        assert tuned.steps == (PLAIN.name,), str(tuned)
        torch.testing.assert_close(tuned(x), x.sin())


def joint_names(**more):
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.randn(4, 8)
    gm, inputs = captured(model, x, training=True)
    return {
        step.name: step
        for step, _ in Proposals(gm, inputs, Options(**more), "time", None, (), False)(Choice())
    }


def test_the_partition_of_torch_is_tried_where_there_is_one():
    assert next(iter(joint_names())) == "partition=torch", "nothing else should gain more"
    assert "partition=torch" not in joint_names(partition="torch")
    assert "partition=torch" not in names(torch.sin, torch.randn(8))


@fxpasses.graph_pass(graphs=["joint"], numerics="bitwise")
def many_calls(gm):
    """Makes a graph several times as large."""
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor, sort=True)[:1]
    last = list(gm.graph.nodes)[-1]
    with gm.graph.inserting_before(last):
        for _ in range(3 * len(gm.graph.nodes)):
            node = gm.graph.call_function(aten.neg.default, (node,))
    last.args = ([node, *last.args[0][1:]],)
    return True


def test_steps_tell_by_how_much_the_graph_grows():
    found = joint_names(passes=())
    assert all(step.growth == 1.0 for step in found.values() if step.item is None)
    gm, inputs = captured(torch.nn.GELU(), torch.randn(4, 8, requires_grad=True), training=True)
    grown = Proposals(gm, inputs, Options(), "time", [many_calls], (), False)(Choice())
    (step,) = [step for step, _ in grown if step.item is not None]
    assert step.growth > 2


class MadeUpTimes(KernelTimes):
    """Kernels take what is said: no clock is read."""

    def __init__(self, seconds_of):
        super().__init__(0.0)
        self.seconds_of = seconds_of

    def seconds(self, node):
        return self.seconds_of.get(node.target)


@pytest.mark.parametrize(
    ("taken", "expected"),
    [({aten.addmm.default: 1.0, onednn_matmul: 1.4}, 1.4), ({aten.addmm.default: 1.0}, 1.0), ({}, 1.0)],
)
def test_a_pass_that_has_another_kernel_called_is_weighed_by_what_that_takes(taken, expected):
    gm, inputs = captured(torch.nn.Linear(256, 256), torch.randn(256, 256))
    with torch.no_grad():
        found = Proposals(
            gm, inputs, Options(), "time", [UseOnednnMatmuls()], (), False, kernels=MadeUpTimes(taken)
        )
        (step,) = [step for step, _ in found(Choice()) if step.item is not None]
    assert step.predicted == pytest.approx(expected, abs=0.05)


def test_images_of_convolutions_are_measured_as_inductor_lays_them_out():
    gm = make_fx(lambda x, w: aten.convolution(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), tracing_mode="fake")(
        torch.empty(2, 3, 4, 4), torch.empty(5, 3, 1, 1)
    )  # fmt: skip
    (call,) = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    seen = []

    class Seen(KernelTimes):
        def _measure(self, node, values):
            seen.extend(values[0][:2])

    Seen(1.0).seconds(call)
    assert [value.stride for value in seen] == [[48, 1, 12, 3], [3, 1, 3, 3]]


def test_kernels_are_measured_once_each_and_within_the_time_for_it():
    gm = make_fx(lambda x: ((x @ x) @ x).relu(), tracing_mode="fake")(torch.empty(8, 8))
    calls = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
    ticks = iter(range(100))
    times = KernelTimes(10.0, lambda: float(next(ticks)))
    assert [times.seconds(node) for node in calls] == [1.0] * len(calls)
    assert next(ticks) == 2, "one call ran, once, as it took a second"
    assert times.has_all_times(gm)
    assert KernelTimes(0.0).seconds(calls[0]) is None
    (relu,) = gm.graph.find_nodes(op="call_function", target=aten.relu.default)
    assert times.seconds(relu) is None


def test_what_cannot_be_run_has_no_time():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3)
    call = graph.call_function(aten.mm.default, (x, x))
    assert KernelTimes(10.0).seconds(call) is None


def test_the_default_that_is_kept_is_called_as_without_tuning(tmp_path, monkeypatch):
    given, compile = [], torch.compile

    def recorded(model, *, backend, options, **more):
        given.append(options)
        return compile(model, backend=backend, options=options, **more)

    monkeypatch.setattr(torch, "compile", recorded)
    own = {"compiler": "eager"}
    with torch.no_grad():
        tuned = fxpasses.tune(torch.sin, torch.randn(8), seconds=0, options=own, cache=tmp_path, show=False)
        assert not tuned.steps
        told = "with the passes of a session it has no plan until it is tuned"
        assert given[-1] == {**own, "cache": str(tmp_path)}, told
        torch.testing.assert_close(tuned(torch.ones(8)), torch.ones(8).sin())


def training_steps(model, x, *passes, choice=Choice()):  # noqa: B008
    found = []

    def keep(gm, given):
        found.extend([gm, given])
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=keep)(x)
    steps = Proposals(*found, Options(compiler="eager"), "time", passes, (), False)
    return [step.name for step, _ in steps(choice) if step.item is not None]


def swapped(gm):
    found = [n for n in gm.graph.nodes if n.target is aten.mul.Tensor and n.args[0].name > n.args[1].name]
    for node in found:
        node.args = (node.args[1], node.args[0])
    return bool(found)


@fxpasses.graph_pass(graphs=["backward"], numerics="bitwise")
def swap_factors(gm):
    """Change what only backward graphs have."""
    return swapped(gm)


@fxpasses.graph_pass(graphs=["backward"], numerics="bitwise")
def swap_them_too(gm):
    """Change what ``swap_factors`` leaves nothing of."""
    return swapped(gm)


@fxpasses.graph_pass(graphs=["joint"], numerics="bitwise")
def negate_twice(gm):
    """The sine is odd."""
    found = [
        n for n in gm.graph.nodes if n.target is aten.sin.default and n.args[0].target != aten.neg.default
    ]
    for node in found:
        with gm.graph.inserting_after(node):
            result = gm.graph.call_function(aten.neg.default, (node,))
        node.replace_all_uses_with(result, delete_user_cb=lambda user, kept=result: user is not kept)
        with gm.graph.inserting_before(node):
            node.args = (gm.graph.call_function(aten.neg.default, node.args),)
    return bool(found)


@fxpasses.graph_pass(graphs=["forward"], numerics="bitwise")
def multiply_to_negate(gm):
    """Change what is there after ``negate_twice`` alone."""
    found = [n for n in gm.graph.nodes if n.target is aten.neg.default]
    for node in found:
        node.target, node.args = aten.mul.Tensor, (node.args[0], -1)
    return bool(found)


def test_passes_for_backward_graphs_alone_are_proposed():
    x = torch.randn(8, requires_grad=True)
    assert training_steps(lambda x: x.sin(), x, swap_factors) == ["swap_factors"]
    assert training_steps(lambda x: x + 1, x, swap_factors) == [], "it changes nothing there"


def test_what_steps_change_is_asked_of_the_graphs_behind_those_taken():
    x = torch.randn(8, requires_grad=True)

    def sine(x):
        return x.sin()

    passes = (negate_twice, multiply_to_negate, swap_factors, swap_them_too)
    first = ["negate_twice", "swap_factors", "swap_them_too"]
    assert sorted(training_steps(sine, x, *passes)) == first
    after = Choice((choice.Step.of_pass(swap_factors),))
    assert training_steps(sine, x, *passes, choice=after) == ["negate_twice"]
    after = Choice((choice.Step.of_pass(negate_twice),))
    assert "multiply_to_negate" in training_steps(sine, x, *passes, choice=after)
