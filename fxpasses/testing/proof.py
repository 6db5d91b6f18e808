"""``prove``: run a pass on graphs of a model or of many programs, and decide at each site if it is right."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fake.notebook import as_html
from fake.seam.pytree import tree_leaves
from fake.wrong_arguments import check_type
from fxpasses.checking.checked_calls import Rewrite
from fxpasses.checking.comparison.side_by_side import SideBySide
from fxpasses.checking.comparison.unreachable import unreachable
from fxpasses.checking.comparison.values import Reference, value_names
from fxpasses.checking.execution.collectives import mark_parameters
from fxpasses.checking.execution.inputs import inputs_from_hints
from fxpasses.checking.findings import Finding, findings
from fxpasses.errors import CaptureError, FxPassesError, Location
from fxpasses.exact import Verdict
from fxpasses.exact.samples import sort_inputs
from fxpasses.graphs.rewriting import copy_graph
from fxpasses.graphs.threads import few_threads
from fxpasses.pass_manager.manager import PassManager
from fxpasses.pass_manager.pass_base import GraphKind, Pass
from fxpasses.pass_manager.runs import PassRun
from fxpasses.pass_manager.sites import MatchSite, collect_sites
from fxpasses.passes import default_passes
from fxpasses.patterns.pattern_pass import NoMatchWarning, PatternPass
from fxpasses.patterns.pattern_tracing import ExampleTensor
from fxpasses.pipeline.capture_graphs import Captured, capture
from fxpasses.testing.programs import PROGRAMS, Program, Setting, settings, with_setting


class NoSiteError(FxPassesError):
    """The pass changes nothing in any graph of the model, so there is nothing to prove.

    Args:
        text: the message.
        left_alone: near misses of the pass's pattern, each with the reason why it was not replaced.
    """

    def __init__(self, text: str, left_alone: Sequence[str] = ()) -> None:
        near = (
            f"; what looks like its pattern was left alone at {'; at '.join(left_alone[:3])}"
            if left_alone
            else ""
        )
        super().__init__(text + near)
        self.left_alone = tuple(left_alone)


class WrongPassError(FxPassesError):
    """A pass computes something else. The message names each wrong match site."""


@dataclass(frozen=True)
class SiteProof:
    """The verdict on one rewrite.

    Attributes:
        graph: the kind of graph.
        program: the captured program, if :func:`prove` was given no model.
        setting: its setting in words: dtypes, sizes, strides.
        site: position among the sites that the pass claims there; ``None``: the whole run of one without.
        location: the node and the user's line, if a site was claimed.
        verdict: compares the graphs before and after this rewrite alone.
        findings: faults that ``check="values"`` finds anyway: values that no random sample reaches, rounding.
        is_checked: whether such faults were looked for: in a whole run that nothing else shows to be wrong.
        notes: what could not be examined, and differences that no input shows (see
            :func:`~fxpasses.checking.comparison.unreachable.unreachable`).
    """

    graph: GraphKind
    site: int | None
    location: Location | None
    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    is_checked: bool = False
    notes: tuple[str, ...] = ()
    program: str = ""
    setting: str = ""

    @property
    def said(self) -> str:
        """The verdict in one or two words."""
        if not self.findings or self.verdict.kind not in ("EQUAL", "UNPROVED"):
            return self.verdict.kind
        return "LESS PRECISE" if self.findings[0].rounds else "DIFFERENT"

    def __str__(self) -> str:
        where = "whole run" if self.site is None else f"site {self.site}: {self.location}"
        made = f"{self.program}, {self.setting}: " if self.program else ""
        said = str(self.verdict)
        if self.said != self.verdict.kind:
            said = f"{self.said}, though on random inputs {said}"
        found = list(map(str, self.findings))
        if self.is_checked and not found:
            found = ["no other value at edges, and no digits lost"]
        return "\n  ".join([f"{made}{self.graph} graph, {where}: {said}", *found, *self.notes])


@dataclass(frozen=True)
class PassProof:
    """The result of :func:`prove`.

    Attributes:
        name: the name of the pass.
        sites: one verdict for each match site, and one for all of them together.
        idle: programs and settings that the pass does not change, though it changes the program in others.
        numerics: the numerics of the pass's contract. With ``"none"``, the pass may approximate results.
        uncaptured: programs and settings that cannot be captured. Nothing is claimed about them.
    """

    name: str
    sites: tuple[SiteProof, ...]
    idle: tuple[tuple[str, str], ...] = ()
    numerics: str = "tolerance"
    uncaptured: tuple[tuple[str, str], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every rewrite is the same function or an allowed approximation, within rounding limits."""
        right = ("EQUAL", "APPROXIMATE") if self.numerics == "none" else ("EQUAL",)
        return all(site.said in right for site in self.sites)

    @property
    def conditions(self) -> list[str]:
        """What has to hold: settings in which a pass that is otherwise right fails, or changes nothing."""
        by_setting: dict[tuple[str, str], set[str]] = {}
        for site in self.sites:
            by_setting.setdefault((site.program, site.setting), set()).add(site.said)
        right = {program for (program, _), said in by_setting.items() if said == {"EQUAL"}}
        found = [
            f"{program}: {', '.join(sorted(said - {'EQUAL'}))} where: {setting}"
            for (program, setting), said in by_setting.items()
            if said != {"EQUAL"} and program in right
        ]
        found += [f"{program}: changes nothing where: {setting}" for program, setting in self.idle]
        return [
            *found,
            *(f"{program}: cannot be captured where: {setting}" for program, setting in self.uncaptured),
        ]

    def table(self) -> str:
        """Return a Markdown table for the pass's page: a row per program, its graphs and their verdicts."""
        said: dict[tuple[str, str], dict[str, list[str]]] = {}
        for site in self.sites:
            of = said.setdefault((site.program, site.setting), {})
            of.setdefault(site.graph, []).append(site.said)
        rows: dict[tuple[str, str, str], list[str]] = {}
        for (program, setting), graphs in said.items():
            verdict = ", ".join(dict.fromkeys(v for found in graphs.values() for v in found))
            row = program or "the model", ", ".join(graphs), verdict
            rows.setdefault(row, []).append(setting or "as it is")
        for program, setting in self.idle:
            rows.setdefault((program, "", "changes nothing"), []).append(setting)
        for program, setting in self.uncaptured:
            rows.setdefault((program, "", "cannot be captured"), []).append(setting)
        lines = ["| program | graphs | verdict | settings |", "|---|---|---|---|"]
        return "\n".join([*lines, *(f"| {' | '.join(row)} | {', '.join(s)} |" for row, s in rows.items())])

    def _repr_html_(self) -> str:
        rows = [
            (s.program or "the model", s.setting or "as it is", s.graph, s.location or "whole run", s.said)
            for s in self.sites
        ]
        text = "\n".join([f"pass '{self.name}'", *self.conditions])
        return as_html(text, ("program", "setting", "graph", "site", "verdict"), rows)

    def raise_if_wrong(self) -> None:
        """Raise an error if a rewrite is wrong: another function, or less precise.

        Raises:
            WrongPassError: names the wrong sites.
        """
        faults = {"DIFFERENT", "LESS PRECISE"} | ({"APPROXIMATE"} if self.numerics != "none" else set())
        wrong = [str(site) for site in self.sites if site.said in faults]
        if wrong:
            raise WrongPassError(f"pass '{self.name}' computes something else:\n" + "\n".join(wrong))

    def __str__(self) -> str:
        return "\n".join([f"pass '{self.name}'", *(f"  {site}" for site in self.sites)])


def prove(
    item: Pass,
    model: Callable[..., Any] | None = None,
    *inputs: Any,
    dynamic: bool | None = None,
    decompose: bool = True,
    samples: int = 2,
    **keywords: Any,
) -> PassProof:
    """Decide in exact arithmetic whether a pass preserves the functions that a model's graphs compute.

    Each match site is rewritten and judged alone, then all together. A pass without claimed sites is judged
    as a whole. A pass that finds nothing in the captured graph runs on it after the default passes.

    Args:
        item: the pass.
        model: a function or module; it is captured, forward and backward, and not changed. If not given, the
            pass is tried on programs of many kinds (a pass made of a pattern: on its pattern), in several
            dtypes, sizes and strides, with and without gradients.
        *inputs: its positional arguments.
        dynamic: whether sizes are symbolic, as for ``torch.compile``; other sizes are then tried as well.
        decompose: whether the pass sees the operators that it sees under ``torch.compile``, or those of ATen.
        samples: how many random samples of the inputs to try.
        **keywords: keyword arguments of the model.

    Returns:
        The verdicts; see :class:`PassProof`.

    Raises:
        NoSiteError: the pass changes no graph of the kinds that it takes.
        CaptureError: the model cannot be captured as one graph.
        PassError: the pass fails.
        ArgumentTypeError: ``item`` is not a pass, or ``model`` is not a function.

    >>> import torch, fxpasses
    >>> from fxpasses.passes import EliminateCommonSubexpressions
    >>> from fxpasses.testing import prove
    >>> proof = prove(EliminateCommonSubexpressions(), lambda x: torch.exp(x) + torch.exp(x), torch.randn(3, requires_grad=True))
    >>> proof.ok
    True
    """
    check_type("prove", "item", item, Pass, "a pass, such as ConcatMatmuls() of fxpasses.passes")
    if model is None:
        return _prove_on_programs(item, decompose, samples)
    check_type("prove", "model", model, callable, "a module or function")
    if isinstance(item, PatternPass):
        item = replace(item, expect_match=True)  # makes it warn with the reason if it does not match
    found: list[SiteProof] = []
    kinds: set[str] = set()
    with _collect_near_misses() as left_alone:
        for kind, gm, values in _graphs(item, model, inputs, keywords, dynamic, decompose):
            kinds.add(kind)
            with few_threads(gm):
                found += _prove_graph(item, kind, gm, sort_inputs(gm, values), samples)
    if not found:
        looked_at = ", ".join(sorted(kinds)) or f"none of the kinds {', '.join(sorted(item.contract.graphs))}"
        raise NoSiteError(
            f"pass '{item.name}' changes nothing in the graphs of this model ({looked_at}): give a model in which it has "
            "something to rewrite, or look at the graphs with fxpasses.capture(..., decompose=True)",
            left_alone,
        )
    return PassProof(item.name, tuple(found), numerics=item.contract.numerics)


@contextlib.contextmanager
def _collect_near_misses() -> Iterator[list[str]]:
    """Collect near misses of patterns, and suppress the warnings about patterns without a match."""
    reasons: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NoMatchWarning)  # read below, whatever the program's filters
        yield reasons
    for warning in caught:
        if isinstance(warning.message, NoMatchWarning):
            reasons += [reason for reason in warning.message.left_alone if reason not in reasons]
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _programs(item: Pass) -> tuple[Program, ...]:
    if not isinstance(item, PatternPass):
        return PROGRAMS
    examples, names = item.inputs, list(inspect.signature(item.pattern).parameters)
    variants = []
    for i, example in enumerate(examples):
        for other in _other_numbers(example):
            changed = (*examples[:i], other, *examples[i + 1 :])
            name = names[i] if i < len(names) else f"argument {i}"
            variants.append(
                (f"{name} = {other}", functools.partial(_program_from_pattern, item.pattern, changed))
            )
    make = functools.partial(_program_from_pattern, item.pattern, examples)
    return (Program("its pattern", make, tuple(variants)),)


def _program_from_pattern(
    pattern: Callable[..., Any], examples: Sequence[Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function that calls a pattern, and tensors. Numbers are literals: variables may be symbols."""
    generator = torch.Generator().manual_seed(0)
    tensors = [v for v in examples if isinstance(v, ExampleTensor)]
    parameters = [f"tensor_{i}" for i in range(len(tensors))]
    given = iter(parameters)
    values: dict[str, Any] = {"pattern": pattern}
    arguments = []
    for i, value in enumerate(examples):
        if isinstance(value, ExampleTensor):
            arguments.append(next(given))
        elif type(value) in (int, float) and math.isfinite(value):
            arguments.append(repr(value))
        else:
            values[f"value_{i}"] = value
            arguments.append(f"value_{i}")
    program = eval(f"lambda {', '.join(parameters)}: pattern({', '.join(arguments)})", values)
    return program, tuple(_sample_tensor(v, generator) for v in tensors)


def _other_numbers(value: Any) -> list[Any]:
    """Return values to try for a number that a pattern leaves open: other sign, odd, and a fraction."""
    if type(value) is int:
        return [other for other in (-value, value + 1) if other != value]
    if type(value) is float:
        return [other for other in dict.fromkeys((-value, 3.0, 0.375)) if other != value]
    return []


def _sample_tensor(example: ExampleTensor, generator: torch.Generator) -> Tensor:
    if example.dtype.is_floating_point:
        return torch.randn(example.shape, generator=generator).to(example.dtype)
    return torch.randint(0, 2, example.shape, generator=generator).to(example.dtype)


def _prove_on_programs(item: Pass, decompose: bool, samples: int) -> PassProof:
    """Prove the pass on all programs it rewrites: the first in all settings, others in the usual ones."""
    differentiated = bool(set(item.contract.graphs) & {"joint", "forward", "backward"})
    found: list[SiteProof] = []
    idle: list[tuple[str, str]] = []
    uncaptured: list[tuple[str, str]] = []
    refusal: CaptureError | None = None
    left_alone: Sequence[str] = ()
    for program in _programs(item):
        first, inputs = True, program.make()[1]
        # Programs that eager cannot differentiate (statistics that require grad, say) run without gradients.
        gradients = differentiated and _runs(*with_setting(*program.make(), Setting("")), gradients=True)
        tried = [(program.make, setting) for setting in settings(inputs, gradients)]
        tried += [(make, Setting(name, gradients=gradients)) for name, make in program.variants]
        for make, setting in [(make, setting) for make, setting in tried if not found or setting.is_usual]:
            model, given = with_setting(*make(), setting)
            if not _runs(model, given, setting.gradients):
                given = [_without_zeros(v) for v in given]  # they may be divisors
                if not _runs(model, given, setting.gradients):
                    continue
            dynamic = setting.dynamic or None
            try:
                proof = prove(item, model, *given, dynamic=dynamic, decompose=decompose, samples=samples)
            except NoSiteError as error:
                left_alone = left_alone or error.left_alone
                if first:
                    break
                idle.append((program.name, setting.name))
                continue
            except CaptureError as error:
                refusal = refusal or error
                uncaptured.append((program.name, setting.name))
                continue
            finally:
                first = False
            found += [replace(site, program=program.name, setting=setting.name) for site in proof.sites]
    if not found and refusal is not None:
        raise refusal
    if not found:
        raise NoSiteError(
            f"pass '{item.name}' changes nothing in any of the programs that are tried: "
            f"{', '.join(program.name for program in _programs(item))}; give it a model in which it has something to rewrite",
            left_alone,
        )
    return PassProof(item.name, tuple(found), tuple(idle), item.contract.numerics, tuple(uncaptured))


def _runs(model: Callable[..., Any], inputs: Sequence[Any], gradients: bool) -> bool:
    """Whether eager accepts these inputs: sizes of 1 may not fit, and not every operator has every dtype."""
    try:
        result = model(*inputs)
        wanted = [v for v in tree_leaves(result) if isinstance(v, Tensor) and v.requires_grad]
        if gradients and wanted:
            torch.autograd.grad(
                [v.sum() for v in wanted], [v for v in inputs if _requires_grad(v)], allow_unused=True
            )
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return True


def _without_zeros(value: Any) -> Any:
    is_integer = isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()
    return value + 2 if is_integer and value.dtype is not torch.bool else value


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _prove_graph(
    item: Pass, kind: GraphKind, gm: fx.GraphModule, inputs: Sequence[Any], samples: int
) -> Iterator[SiteProof]:
    whole, runs, sites = _rewrite_all(item, gm, kind)
    if runs is None:  # many passes match only the form that the default passes produce
        gm = copy_graph(gm)
        PassManager(list(default_passes())).run(gm, kind)
        whole, runs, sites = _rewrite_all(item, gm, kind)
    if runs is None:
        return
    claimed = [site for run in runs for site in run.sites] or sites
    mark_parameters(gm, inputs)
    original = SideBySide(gm, inputs)
    names = value_names(gm, kind)
    alone: list[SiteProof] = []
    for site in claimed if len(claimed) > 1 else ():
        copy = copy_graph(gm, constants=True)
        if _rewrite_one(item, copy, site.index):
            verdict = _with_result_name(original.equivalent(copy, samples=samples), names)
            alone.append(SiteProof(kind, site.index, site.location, verdict))
    index, location = (claimed[0].index, claimed[0].location) if len(claimed) == 1 else (None, None)
    verdict = _with_result_name(original.equivalent(whole, samples=samples), names)
    proof = SiteProof(kind, index, location, verdict)
    if verdict.kind in ("EQUAL", "UNPROVED") and item.contract.numerics != "none":
        found, why = findings(Rewrite(item, kind, gm, whole, tuple(claimed)), inputs)
        notes = [f"not looked at on other values, nor for rounding: {reason}" for reason in why]
        if not found and not why and verdict.kind == "EQUAL":
            notes = unreachable(Reference(gm, inputs).rewriting(whole))
        proof = replace(proof, findings=tuple(found), is_checked=not why, notes=tuple(notes))
        alone = [replace(p, findings=tuple(f for f in found if p.site in f.sites)) for p in alone]
    yield from alone
    yield proof


def _with_result_name(verdict: Verdict, names: Sequence[str]) -> Verdict:
    """Return the verdict with a result named as in the value check, such as the gradient of a parameter."""
    finding = verdict.finding
    if finding is None:
        return verdict
    word, _, number = finding.output.partition(" ")
    if word != "output" or int(number) >= len(names):
        return verdict
    return replace(verdict, finding=replace(finding, output=names[int(number)]))


def _rewrite_all(
    item: Pass, gm: fx.GraphModule, kind: GraphKind
) -> tuple[fx.GraphModule, list[PassRun] | None, list[MatchSite]]:
    """Return a rewritten copy, the runs of the pass (``None`` if nothing changed), and the claimed sites."""
    whole = copy_graph(gm, constants=True)
    with collect_sites() as sites:
        runs = PassManager([item]).run(whole, kind)
    return whole, list(runs) if any(run.changed for run in runs) else None, list(sites.claimed)


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
    """Yield the graphs of the model that the pass takes, with real inputs."""
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
    nodes = captured.forward.graph.find_nodes(op="placeholder")
    given = {node.name: value for node, value in zip(nodes, captured.inputs, strict=True)}
    return _with_gradients(joint, given)


def _backward_inputs(captured: Captured, backward: fx.GraphModule) -> list[Any]:
    with torch.no_grad():
        values = fx.Interpreter(captured.forward).run(*captured.inputs)
    saved = (value.name for value in captured.saved)
    return _with_gradients(backward, dict(zip(saved, values[captured.num_outputs :], strict=True)))


def _with_gradients(gm: fx.GraphModule, given: Mapping[str, Any]) -> list[Any]:
    """Return the inputs of a graph. Those not given are gradients of outputs, for which any value will do."""
    nodes = gm.graph.find_nodes(op="placeholder")
    others = iter(inputs_from_hints([node for node in nodes if node.name not in given]))
    return [given[node.name] if node.name in given else next(others) for node in nodes]
