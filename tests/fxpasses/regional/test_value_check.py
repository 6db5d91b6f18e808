"""The value check with regions: each region's graphs are compared once, and those of the graph around."""

import copy

import pytest
import torch

import fxpasses
from fxpasses import ValueMismatchError
from tests.fxpasses.regional.support import Block, Stack, check, compiled, copies, step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

aten = torch.ops.aten


def replacing(target, other, graphs):
    """A pass that is wrong on every layer, or, for ``tanh``, around them: it calls another operator."""

    @fxpasses.graph_pass(name=f"replaces_{target.__name__.partition('.')[0]}", graphs=graphs)
    def replace(gm):
        "Wrong."
        if target is not aten.tanh.default and any("region" in str(n.target) for n in gm.graph.nodes):
            return False
        for node in gm.graph.find_nodes(op="call_function", target=target):
            node.target = other
            return True
        return False

    return replace


wrong_inside = replacing(aten.rsqrt.default, aten.sqrt.default, ["joint", "inference"])
wrong_forward = replacing(aten.erf.default, aten.tanh.default, ["forward", "inference"])
wrong_backward = replacing(aten.sum.dim_IntList, aten.mean.dim, ["backward"])
wrong_around = replacing(aten.tanh.default, aten.sin.default, ["joint", "inference"])


class Around(Stack):
    """Layers, and an operator that they have not."""

    def forward(self, x):
        return super().forward(x).tanh()


def model():
    return Around([Block() for _ in range(4)])


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize(("compiler", "dynamic"), [("eager", False), ("eager", True), ("inductor", True)])
def test_what_is_right_is_found_right(compiler, dynamic):
    assert check(model(), [X], check="values", compiler=compiler, dynamic=dynamic, tolerance=1e-4) == [4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "compiler"),
    [
        *((wrong, "eager") for wrong in (wrong_inside, wrong_forward, wrong_backward, wrong_around)),
        (wrong_backward, "inductor"),
    ],
    ids=lambda p: getattr(p, "name", p),
)
def test_a_wrong_pass_is_named(wrong, compiler, tmp_path):
    net = model()
    call = compiled(net, passes=[wrong, "default"], check="values", compiler=compiler, report=str(tmp_path))
    with pytest.raises(ValueMismatchError) as caught:
        step(call, net, [X])
    assert copies() == [4]
    assert caught.value.pass_name == wrong.name
    file = "test_value_check.py" if wrong is wrong_around else "support.py"
    assert file in str(caught.value.location)
    assert caught.value.repro


def test_a_wrong_pass_is_named_in_inference(tmp_path):
    net = model().eval()
    call = compiled(net, passes=[wrong_forward], check="values", report=str(tmp_path))
    with torch.no_grad(), pytest.raises(ValueMismatchError, match="replaces_erf"):
        call(X)


@pytest.mark.parametrize("wrong", [wrong_inside, wrong_backward, wrong_around], ids=lambda p: p.name)
def test_eager_instead(wrong, tmp_path):
    net = model()
    wanted = copy.deepcopy(net)
    options = {"passes": [wrong], "check": "values", "on_failure": "eager", "report": str(tmp_path)}
    call = compiled(net, **options)
    for _ in range(2):
        torch.testing.assert_close(step(call, net, [X]), step(wanted, wanted, [X]))
    assert copies() == [4]
    assert {fallback.stage for fallback in fxpasses.stats().fallbacks} == {"check"}


def test_a_region_is_compared_once_not_once_for_each_copy(monkeypatch):
    from fxpasses.checking.checked_calls import Trial

    seen = []
    inner = Trial.mismatches
    monkeypatch.setattr(
        Trial, "mismatches", lambda trial, rewrite: seen.append(trial.reference.gm) or inner(trial, rewrite)
    )
    # Of layers that no other test has: a region that is still in use was compared when it was compiled.
    layers = Around([Block(eps=0.125) for _ in range(4)])
    call = compiled(layers, passes=["default"], check="values")
    call(X).sum().backward()
    operators = [[n.target for n in gm.graph.nodes] for gm in seen]
    in_layer = [found.count(aten.erf.default) for found in operators if aten.erf.default in found]
    assert in_layer
    assert max(in_layer) == 2  # of a joint graph: one layer, forward and again in the backward pass
