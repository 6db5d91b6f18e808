"""``prove``: run a pass on the graphs of a model, and decide for each match site whether the graph is the same function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.compiling.capture import Captured, capture
from fxpasses.errors import FxPassesError, Location
from fxpasses.exact import Original, Verdict
from fxpasses.graphs.rewriting import copy_graph, value_of
from fxpasses.pass_manager.contract import GraphKind, Pass
from fxpasses.pass_manager.manager import PassManager
from fxpasses.pass_manager.sites import collect_sites

__all__ = ["NoSiteError", "PassProof", "SiteProof", "WrongPassError", "prove"]


class NoSiteError(FxPassesError):
    """The pass changes nothing in any graph of the model: there is nothing to prove."""


class WrongPassError(FxPassesError):
    """A pass computes something else; its message names each wrong match site."""


@dataclass(frozen=True)
class SiteProof:
    """The verdict on one rewrite.

    Attributes:
        graph: the kind of graph.
        site: position among the sites that the pass claims there; ``None`` for a pass that claims none, whose whole run is judged.
        location: the node and the user's line, where a site was claimed.
        verdict: of the graphs before and after this rewrite alone.
    """

    graph: GraphKind
    site: int | None
    location: Location | None
    verdict: Verdict

    def __str__(self) -> str:
        where = "whole run" if self.site is None else f"site {self.site}: {self.location}"
        return f"{self.graph} graph, {where}: {self.verdict}"


@dataclass(frozen=True)
class PassProof:
    """The result of :func:`prove`.

    Attributes:
        name: of the pass.
        sites: one verdict for each match site, and one for all of them together.
    """

    name: str
    sites: tuple[SiteProof, ...]

    @property
    def ok(self) -> bool:
        """Whether every rewrite is the same function."""
        return all(site.verdict.kind == "EQUAL" for site in self.sites)

    def raise_if_wrong(self) -> None:
        """Raise unless no rewrite is another function.

        Raises:
            WrongPassError: naming the sites that are.
        """
        wrong = [str(site) for site in self.sites if site.verdict.kind == "DIFFERENT"]
        if wrong:
            raise WrongPassError(f"pass '{self.name}' computes something else:\n" + "\n".join(wrong))

    def __str__(self) -> str:
        return "\n".join([f"pass '{self.name}'", *(f"  {site}" for site in self.sites)])


def prove(
    item: Pass,
    model: Callable[..., Any],
    *inputs: Any,
    dynamic: bool | None = None,
    decompose: bool = True,
    samples: int = 2,
    **keywords: Any,
) -> PassProof:
    """Decide in exact arithmetic whether a pass leaves the graphs of a model the functions that they are.

    Each match site is rewritten alone and judged alone; then all are, together. A pass that claims no sites is judged as a whole.

    Args:
        item: the pass.
        model: a function or module; it is captured, forward and backward, and not changed.
        *inputs: its positional arguments.
        dynamic: whether sizes are symbolic, as for ``torch.compile``; other sizes are then tried as well.
        decompose: whether the pass sees the operators that it sees under ``torch.compile``, or those of ATen.
        samples: how many random samples of the inputs.
        **keywords: keyword arguments of the model.

    Returns:
        The verdicts; see :class:`PassProof`.

    Raises:
        NoSiteError: if the pass changes no graph that it takes.
        CaptureError: if the model cannot be captured as one graph.
        PassError: if the pass fails.

    >>> import torch, fxpasses
    >>> from fxpasses.passes import EliminateCommonSubexpressions
    >>> from fxpasses.testing import prove
    >>> proof = prove(EliminateCommonSubexpressions(), lambda x: torch.exp(x) + torch.exp(x), torch.randn(3, requires_grad=True))
    >>> proof.ok
    True
    """
    found: list[SiteProof] = []
    kinds: set[str] = set()
    for kind, gm, values in _graphs(item, model, inputs, keywords, dynamic, decompose):
        kinds.add(kind)
        found += _proofs(item, kind, gm, values, samples)
    if not found:
        looked_at = ", ".join(sorted(kinds)) or f"none of the kinds {', '.join(sorted(item.contract.graphs))}"
        raise NoSiteError(
            f"pass '{item.name}' changes nothing in the graphs of this model ({looked_at}): give a model in which it has "
            "something to rewrite, or look at the graphs with fxpasses.capture(..., decompose=True)"
        )
    return PassProof(item.name, tuple(found))


def _proofs(
    item: Pass, kind: GraphKind, gm: fx.GraphModule, inputs: Sequence[Any], samples: int
) -> Iterator[SiteProof]:
    whole = copy_graph(gm)
    manager = PassManager([item])
    with collect_sites() as sites:
        runs = manager.run(whole, kind)
    if not any(run.changed for run in runs):
        return
    claimed = [site for run in runs for site in run.sites] or sites.claimed
    original = Original(gm, inputs)
    if len(claimed) > 1:
        for site in claimed:
            alone = copy_graph(gm)
            if _rewrite_one(item, alone, site.index):
                verdict = original.equivalent(alone, samples=samples, edges=(), overflow=False)
                yield SiteProof(kind, site.index, site.location, verdict)
    one = claimed[0] if len(claimed) == 1 else None
    verdict = original.equivalent(whole, samples=samples)
    yield SiteProof(kind, one.index if one else None, one.location if one else None, verdict)


def _rewrite_one(item: Pass, gm: fx.GraphModule, index: int) -> bool:
    with collect_sites(lambda i: i == index):
        changed = item.apply(gm)
    gm.recompile()
    return bool(changed)


def _graphs(
    item: Pass,
    model: Callable[..., Any],
    inputs: Sequence[Any],
    keywords: dict[str, Any],
    dynamic: bool | None,
    decompose: bool,
) -> Iterator[tuple[GraphKind, fx.GraphModule, list[Any]]]:
    """The graphs of the model that the pass takes, with real inputs."""
    wanted = set(item.contract.graphs)
    if wanted & {"joint", "forward", "backward"}:
        captured = capture(model, *inputs, dynamic=dynamic, decompose=decompose, **keywords)
        if captured.joint is not None:
            if "joint" in wanted:
                yield "joint", captured.joint, _joint_inputs(captured, captured.joint)
            if "forward" in wanted:
                yield "forward", captured.forward, list(captured.inputs)
            if "backward" in wanted and captured.backward is not None:
                yield "backward", captured.backward, _backward_inputs(captured, captured.backward)
    if "inference" in wanted:
        with torch.no_grad():
            captured = capture(model, *inputs, dynamic=dynamic, decompose=decompose, **keywords)
        yield "inference", captured.forward, list(captured.inputs)


def _joint_inputs(captured: Captured, joint: fx.GraphModule) -> list[Any]:
    given = {
        node.name: value
        for node, value in zip(
            captured.forward.graph.find_nodes(op="placeholder"), captured.inputs, strict=True
        )
    }
    return [
        given[node.name] if node.name in given else _made_up(node)
        for node in joint.graph.find_nodes(op="placeholder")
    ]


def _backward_inputs(captured: Captured, backward: fx.GraphModule) -> list[Any]:
    with torch.no_grad():
        values = fx.Interpreter(captured.forward).run(*captured.inputs)
    saved = dict(zip((value.name for value in captured.saved), values[captured.num_outputs :], strict=True))
    return [
        saved[node.name] if node.name in saved else _made_up(node)
        for node in backward.graph.find_nodes(op="placeholder")
    ]


def _made_up(node: fx.Node) -> Any:
    """A gradient of an output: any value will do."""
    value = value_of(node)
    if not isinstance(value, Tensor):
        return value
    size = [int(s) for s in value.shape]
    return (
        torch.randn(size).to(value.dtype)
        if value.is_floating_point()
        else torch.zeros(size, dtype=value.dtype)
    )
