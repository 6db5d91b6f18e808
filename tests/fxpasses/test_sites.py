"""Match sites: what a pass claims is recorded by the manager, and can be refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses import PassManager, graph_pass
from fxpasses.pass_manager.manager import Check
from fxpasses.pass_manager.pass_base import Pass
from fxpasses.pass_manager.sites import MatchSite, claim, collect_sites


@graph_pass(graphs=["inference"])
def sin_to_cos(gm: fx.GraphModule) -> bool:
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        if claim(node):
            node.target = torch.ops.aten.cos.default
            changed = True
    return changed


def three_sines() -> fx.GraphModule:
    return make_fx(lambda x: x.sin().sin().sin())(torch.ones(2))


def test_the_manager_records_every_site() -> None:
    (run,) = PassManager([sin_to_cos]).run(three_sines(), "inference")
    assert [(site.index, site.location.node, site.applied) for site in run.sites] == [
        (0, "sin", True),
        (1, "sin_1", True),
        (2, "sin_2", True),
    ]


def test_a_refused_site_is_left_as_it_was() -> None:
    gm = three_sines()
    with collect_sites(lambda index: index == 1) as sites:
        sin_to_cos.apply(gm)
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [
        torch.ops.aten.sin.default,
        torch.ops.aten.cos.default,
        torch.ops.aten.sin.default,
    ]
    assert sites.applied == 1
    assert len(sites.claimed) == 3


def test_a_check_sees_each_changing_pass_with_its_sites() -> None:
    seen: list[Any] = []

    class Watch(Check):
        def before(self, item: Pass, gm: fx.GraphModule, kind: Any) -> int:
            return len(gm.graph.nodes)

        def after(
            self, item: Pass, gm: fx.GraphModule, kind: Any, remembered: Any, sites: tuple[MatchSite, ...]
        ) -> None:
            seen.append((item.name, kind, remembered, len(sites)))

    PassManager([sin_to_cos, sin_to_cos], [Watch()]).run(three_sines(), "inference")
    assert seen == [("sin_to_cos", "inference", 5, 3)]
