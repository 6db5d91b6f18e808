"""Dead code elimination that respects mutation, effects and the order of random numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fake.seam.dispatch import OpOverload
from fake.seam.fx import has_effects
from fxpasses.graphs.aliasing import is_mutating, is_random
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim


@dataclass(frozen=True)
class EliminateDeadCode(Pass):
    """Erase calls whose results are unused.

    Unused calls are kept if they write to an argument, have an effect (printing, collectives, assertions),
    use the RNG (removing one would shift all later samples), or nothing is known about them.

    Before::

        sin = aten.sin(x)
        unused = aten.cos(x)
        return sin

    After::

        sin = aten.sin(x)
        return sin
    """

    name: ClassVar[str] = "eliminate_dead_code"
    contract: ClassVar[Contract] = Contract(
        "any", provides="no_dead_code", numerics="bitwise", metadata="exact"
    )

    def apply(self, gm: fx.GraphModule) -> bool:
        changed = False
        for node in reversed(gm.graph.nodes):
            if not node.users and _may_be_erased(node) and claim(node):
                gm.graph.erase_node(node)
                changed = True
        return changed


def _may_be_erased(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or node.is_impure():
        return False
    target = node.target
    if not isinstance(target, OpOverload):
        # Built-in functions (getitem, arithmetic on sizes) are pure; others may have any effect.
        return getattr(target, "__module__", None) in ("_operator", "builtins", "math", "torch.sym")
    if is_mutating(node) or is_random(node) or has_effects(target):
        return False
    return bool(target._schema.returns)
