"""``fxpasses.testing.prove``: right and wrong passes, by match site."""

import operator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from fxpasses import Contract, Pass, claim, pattern_pass
from fxpasses.passes import EliminateCommonSubexpressions
from fxpasses.testing import NoSiteError, WrongPassError, prove
from fxpasses.testing.plugin import prove_pass  # noqa: F401  (a fixture)

aten = torch.ops.aten


def model(x):
    return torch.exp(x) + torch.exp(x).sin() + torch.exp(2 * x) + torch.exp(2 * x).cos()


def test_a_library_pass_is_proved_site_by_site():
    proof = prove(EliminateCommonSubexpressions(), model, torch.randn(3, 4, requires_grad=True))
    assert proof.ok
    assert {site.graph for site in proof.sites} >= {"joint"}
    proof.raise_if_wrong()


@dataclass(frozen=True)
class HalfRight(Pass):
    """Doubles by adding; of a product with three it takes the double, too."""

    name: ClassVar[str] = "half_right"
    contract: ClassVar[Contract] = Contract(graphs="inference")

    def apply(self, gm):
        changed = False
        for node in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            if node.args[1] in (2, 3) and claim(node):
                node.target, node.args = aten.add.Tensor, (node.args[0], node.args[0])
                changed = True
        return changed


def test_the_wrong_site_is_named():
    proof = prove(HalfRight(), lambda x: (x * 2, x * 3), torch.randn(4))
    kinds = [site.verdict.kind for site in proof.sites]
    assert kinds == ["EQUAL", "DIFFERENT", "DIFFERENT"]  # each site alone, then all
    with pytest.raises(WrongPassError, match=r"site 1: node 'mul_1'"):
        proof.raise_if_wrong()


def test_pattern_passes_and_modules():
    fuse = pattern_pass(
        lambda x, y: torch.sigmoid(x) * x + y,
        lambda x, y: nn.functional.silu(x) + y,
        (torch.randn(2, 2),) * 2,
        name="silu",
    )

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            h = self.linear(x)
            return torch.sigmoid(h) * h + x

    proof = prove(fuse, Gate(), torch.randn(3, 4), decompose=False)
    assert proof.ok, proof


def test_a_pass_that_rewrites_nothing_is_no_proof():
    with pytest.raises(NoSiteError, match="changes nothing"):
        prove(HalfRight(), operator.neg, torch.randn(3))


def test_without_a_model_a_pattern_is_proved_on_itself():
    right = pattern_pass(
        lambda x, y: torch.sigmoid(x) * x + y,
        lambda x, y: nn.functional.silu(x) + y,
        (torch.randn(2, 3),) * 2,
        name="silu",
    )
    proof = prove(right, decompose=False)
    assert proof.ok, proof
    assert {site.setting for site in proof.sites} >= {
        "as it is",
        "bfloat16",
        "not contiguous",
        "symbolic sizes",
        "1 for 3",
    }
    assert "| its pattern | inference | EQUAL | as it is, bfloat16, float16," in proof.table()


def test_conditions_under_which_a_pass_is_right_are_found():
    flips = pattern_pass(
        lambda x: x.exp().sum(-1),
        lambda x: x.exp()[..., : x.shape[-1] // 2 * 2].sum(-1),
        (torch.randn(2, 4),),
        name="pairs",
    )
    proof = prove(flips, decompose=False)
    assert [c for c in proof.conditions if "DIFFERENT where: odd sizes" in c], proof
    with pytest.raises(WrongPassError, match="odd sizes"):
        proof.raise_if_wrong()


def test_the_plugin_fails_the_tests_of_wrong_passes(prove_pass):  # noqa: F811
    def times(number):
        return pattern_pass(lambda x: x.exp() * 2, lambda x: x.exp() * number, [torch.ones(2)], name="p")

    assert prove_pass(times(2.0), lambda x: x.exp() * 2, torch.randn(2)).ok
    with pytest.raises(WrongPassError, match="computes something else"):
        prove_pass(times(3), lambda x: x.exp() * 2, torch.randn(2))
