"""Helpers for passes that the structure check has to reject, or accept."""

from __future__ import annotations

import pytest
import torch

from fxpasses import PassManager, StructureError, graph_pass

aten = torch.ops.aten
X = torch.linspace(-1, 1, 12).reshape(3, 4)


def find(gm, target, index=0):
    return gm.graph.find_nodes(op="call_function", target=target)[index]


def rejected(rewrite, gm, kind="inference", **contract):
    """Run a pass that has to be rejected; returns the error."""
    item = graph_pass(rewrite, graphs="any", **contract)
    with pytest.raises(StructureError) as caught:
        PassManager([item]).run(gm, kind)
    assert caught.value.pass_name == rewrite.__name__
    assert rewrite.__name__ in str(caught.value)
    return caught.value


def accepted(rewrite, gm, kind="inference", **contract):
    (run,) = PassManager([graph_pass(rewrite, graphs="any", **contract)]).run(gm, kind)
    assert run.changed
    return run


def writes_between(x):
    y = x * 2
    copied = x.clone()
    x.add_(1)
    return y, copied * 3, x.sin()


def draws(x):
    a = torch.rand_like(x)
    b = torch.rand_like(x)
    return a * x, b + x
