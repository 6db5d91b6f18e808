"""The verdict on two graphs of ATen operators: are they the same function of real numbers, and what shows it.

``equivalent(before, after, inputs)`` evaluates both graphs with dual numbers
(:mod:`fxpasses.exact.arithmetic`) on several samples of inputs. By the Schwartz-Zippel lemma, two different
polynomials of degree ``d`` agree at a random point of a field with ``p`` elements with a probability of at
most ``d / p``. With rational functions, exponentials and logarithms that holds in the models that
:mod:`fxpasses.exact.fields` describes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from fake.error_text import first_line
from fake.wrong_arguments import check_flags, check_type
from fxpasses.exact.dual import Dual
from fxpasses.exact.fields import field as field_of
from fxpasses.exact.folded_numbers import folded_numbers
from fxpasses.exact.machine import Machine, UnsupportedCall
from fxpasses.exact.rounded_constants import new_constants, unrounded_constants
from fxpasses.exact.run import Run
from fxpasses.exact.same_values import DRIFT, EQUAL, KERNEL_DRIFT, Comparison, Relation, compare
from fxpasses.exact.samples import Family, sample_input, sort_inputs

Kind = Literal["EQUAL", "DIFFERENT", "APPROXIMATE", "UNPROVED"]
_KINDS: tuple[Kind, ...] = ("EQUAL", "UNPROVED", "APPROXIMATE", "DIFFERENT")

_ASSUMED_DEGREE = 2000
"""The degree that the printed bound assumes for the difference of two graphs, relative to shared values."""
_SMALLEST_FIELD = 2**21
_MAX_NEEDED = 8
_EXTRA_FAMILIES: tuple[Family, ...] = ("rows", "ties", "zeros")
_SCALE_EXPONENTS = (-10, -24, 6, 11, 16, 21, 26)
"""Exponents of input scales: small ones show an epsilon, large ones what a saturated activation hides."""
_APPROXIMATE_TOLERANCE = 0.02
"""Other functions approximate if they differ by at most this, relative to the largest of their tensor."""


@dataclass(frozen=True)
class Finding:
    """A difference that one sample showed.

    Attributes:
        family: the kind of inputs.
        output: which result of the graph.
        comparison: an element and its two values.
        node: the first node of the graph after whose value differs from that of the node with the same name
            before.
        note: further information, such as the factor of all inputs.
    """

    family: str
    output: str
    comparison: Comparison
    node: str = ""
    note: str = ""

    def __str__(self) -> str:
        where = f", first at {self.node}" if self.node else ""
        note = f" ({self.note})" if self.note else ""
        return f"{self.output}, {self.comparison}{where}, on {self.family} inputs{note}"


@dataclass
class Verdict:
    """Whether two graphs are the same function.

    Attributes:
        kind: ``EQUAL``, ``DIFFERENT``, ``APPROXIMATE`` (a different function, within 2% of the largest value
            of each result on all samples: right only for a pass that declares it), or ``UNPROVED``.
        finding: the evidence if they are not equal, taken where they differ most.
        distance: the difference there, relative to the largest value of the tensor.
        samples: how many random samples were equal.
        bound: the probability that this many samples miss a difference of degree 2,000.
        opaque: operators treated as uninterpreted functions, with their number of calls.
        needed: operators that prevent a proof: those without a rule, or else those that the rewrite calls
            differently.
        evaluated: how many calls of the graph after were evaluated in a sample.
        calls: calls of the graph after.
    """

    kind: Kind = "EQUAL"
    finding: Finding | None = None
    distance: float | None = None
    samples: int = 0
    bound: float = 1.0
    opaque: Counter[str] = field(default_factory=Counter)
    needed: tuple[str, ...] = ()
    evaluated: int = 0
    calls: int = 0

    @property
    def adopted(self) -> dict[str, str]:
        """Nodes of the graph after, with nodes of the graph before that have their value in every sample."""
        return self._adopted

    _adopted: dict[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        taken = f"; taken as they are: {', '.join(self.opaque)}" if self.opaque else ""
        if self.kind == "EQUAL":
            return f"EQUAL ({self.samples} samples, error below {self.bound:.0e}{taken})"
        close = ""
        if self.kind == "APPROXIMATE":
            close = f" (another function, at most {self.distance:.2g} of the largest value away)"
        why = "no exact rule for" if self.opaque else "no identity is known of"
        needs = f"; {why} {', '.join(self.needed)}" if self.needed else ""
        return f"{self.kind}{close}: {self.finding}{needs}{taken}"


def equivalent(
    before: fx.GraphModule,
    after: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    samples: int = 2,
    signed_zeros: bool = False,
) -> Verdict:
    """Decide in exact arithmetic whether two graphs compute the same function.

    Args:
        before: a graph of ATen operators with fake tensors as ``meta["val"]``; not mutated.
        after: the graph that is to replace it, with the same inputs.
        inputs: example inputs: tensors with data, and sizes.
        samples: how many random samples to try, in addition to the example.
        signed_zeros: whether 0.0 and -0.0 are different values.

    Returns:
        ``EQUAL`` if all samples are equal; ``DIFFERENT`` or ``APPROXIMATE`` with the evidence; ``UNPROVED``
        if residues differ and floats do not, or if an operator cannot be evaluated.

    Raises:
        ValueError: the graphs take a different number of inputs than are given.

    >>> import torch, fxpasses
    >>> from fxpasses.exact import equivalent
    >>> x = torch.randn(4, 3)
    >>> one = fxpasses.capture(lambda x: x.exp() * (2 * x).exp(), x).forward
    >>> other = fxpasses.capture(lambda x: (3 * x).exp(), x).forward
    >>> equivalent(one, other, [x]).kind
    'EQUAL'
    """
    check_type("equivalent", "samples", samples, int, "how many random samples")
    check_flags("equivalent", signed_zeros=signed_zeros)
    return Original(before, inputs).equivalent(after, samples=samples, signed_zeros=signed_zeros)


class Original:
    """A graph to compare others with. What it computes on each sample is cached.

    Args:
        gm: a graph of ATen operators with fake tensors as ``meta["val"]``; not mutated.
        inputs: example inputs: tensors with data, and sizes.

    Raises:
        ValueError: the graph takes a different number of inputs.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        _check_inputs(gm, inputs)
        self.gm = gm
        self.inputs = list(inputs)
        self._runs: dict[Any, _FirstRun] = {}

    def run(self, family: Family, number: int, scale: float = 1.0, squares_roots: bool = False) -> _FirstRun:
        """Run the graph on one sample, once.

        Args:
            family: the kind of values.
            number: which sample.
            scale: a factor for float inputs.
            squares_roots: see :class:`.Arithmetic`.
        """
        key = family, number, scale, squares_roots
        if key not in self._runs:
            args = self.gm, self.inputs, family, number, scale, squares_roots
            try:
                self._runs[key] = _FirstRun(*args)
            except _InputsRejected:  # for example lengths that have to add up
                if family != "random":
                    raise
                self._runs[key] = _FirstRun(*args, keep_integers=True)
        return self._runs[key]

    def equivalent(
        self, after: fx.GraphModule, *, samples: int = 2, signed_zeros: bool = False, example: bool = True
    ) -> Verdict:
        """Decide whether a graph computes the same: see :func:`equivalent`.

        Args:
            after: the graph that is to replace this one.
            example: whether to try the inputs themselves, too.
            samples: how many random samples of the inputs.
            signed_zeros: whether 0.0 and -0.0 are different values.

        Raises:
            ValueError: the graph takes a different number of inputs.
        """
        _check_inputs(after, self.inputs)
        families: list[Family] = ["example"] if example or not samples else []
        families += ["random"] * samples
        verdict = self._decide(after, families, signed_zeros)
        if verdict.kind == "UNPROVED" and verdict.finding and verdict.finding.comparison.first is not None:
            again = self._decide(after, families, signed_zeros, squares_roots=True)
            if again.kind == "EQUAL":  # either way is a proof
                return again
            if samples:
                self._refine_unproved(verdict, after, len(families))
        if verdict.kind != "EQUAL" and new_constants(self.gm, after):
            again = self._decide(after, families, signed_zeros, unrounded=True)
            return again if again.kind == "EQUAL" else verdict
        return verdict

    def find_difference(self, after: fx.GraphModule) -> Finding | None:
        """Return what is not equal, or not proved equal, on the inputs themselves.

        Floats are read as the numbers that they are meant to be: ``0.3`` is three tenths.

        Raises:
            ValueError: this graph does not run on the inputs.
            UnsupportedCall: a call cannot be evaluated.
        """
        try:
            finding = _SampleComparison(self.run("numbers", 0), after).finding
            if finding is not None and finding.comparison.relation == "unproved":
                finding = (
                    _SampleComparison(self.run("numbers", 0, squares_roots=True), after).finding and finding
                )
            return finding
        except _InputsRejected as error:
            raise ValueError(f"the graph before does not run on these inputs: {error}") from error

    def _refine_unproved(self, verdict: Verdict, after: fx.GraphModule, number: int) -> None:
        """Decide cases in which residues differ and floats hardly do.

        An epsilon shows on small numbers and on rows of equal ones, a saturated activation on large ones.
        """
        attempts: list[tuple[Family, float, str]] = [(family, 1.0, "") for family in _EXTRA_FAMILIES]
        attempts += [("random", 2.0**power, f"inputs times 2**{power}") for power in _SCALE_EXPONENTS]
        for family, scale, note in attempts:
            try:
                finding = _SampleComparison(self.run(family, number, scale), after).finding
            except _InputsRejected:
                continue
            if finding is None:
                continue
            kind = _kind(finding.comparison)
            if _KINDS.index(kind) > _KINDS.index(verdict.kind):
                verdict.kind, verdict.finding = kind, dataclasses.replace(finding, note=note or finding.note)
                verdict.distance, verdict.needed = finding.comparison.distance, ()
            if kind == "DIFFERENT":
                return

    def _decide(
        self,
        after: fx.GraphModule,
        families: Sequence[Family],
        signed_zeros: bool,
        squares_roots: bool = False,
        unrounded: bool = False,
    ) -> Verdict:
        verdict = Verdict(calls=len([n for n in after.graph.nodes if n.op == "call_function"]))
        adopted: dict[str, str] | None = None
        rejection = ""
        for number, family in enumerate(families):
            try:
                first = self.run(family, number, squares_roots=squares_roots)
                sample = _SampleComparison(first, after, signed_zeros, unrounded)
            except _InputsRejected as error:
                if family == "example":
                    raise ValueError(
                        f"the graph before does not run on the example inputs: {error}"
                    ) from error
                rejection = str(error)
                continue
            except UnsupportedCall as error:
                verdict.kind, verdict.needed = "UNPROVED", (str(error.target),)
                verdict.finding = Finding(family, "the graph", Comparison("unproved", reason=error.reason))
                return verdict
            verdict.opaque |= sample.opaque
            verdict.evaluated = max(verdict.evaluated, sample.evaluated)
            adopted = sample.adopted if adopted is None else dict(adopted.items() & sample.adopted.items())
            finding = sample.finding
            if finding is None:
                if family == "random":
                    verdict.samples += 1
                    verdict.bound *= _ASSUMED_DEGREE / _SMALLEST_FIELD
                continue
            kind, distance = _kind(finding.comparison), finding.comparison.distance
            if (_KINDS.index(kind), distance) > (_KINDS.index(verdict.kind), verdict.distance or 0.0):
                verdict.kind, verdict.finding, verdict.distance = kind, finding, distance
            if kind == "DIFFERENT":
                break
        verdict._adopted = adopted or {}
        if verdict.kind == "EQUAL" and not verdict.samples:
            reason = f"the graph before runs on the example alone, not on random values: {rejection}"
            verdict.kind, verdict.finding = (
                "UNPROVED",
                Finding("random", "the graph", Comparison("unproved", reason=reason)),
            )
        if verdict.kind == "UNPROVED":
            others = (
                n for n in after.graph.nodes if n.op == "call_function" and n.name not in verdict.adopted
            )
            verdict.needed = tuple(verdict.opaque or dict.fromkeys(str(n.target) for n in others))[
                :_MAX_NEEDED
            ]
        return verdict


def _kind(comparison: Comparison) -> Kind:
    if comparison.relation == "unproved":
        return "UNPROVED"
    return "APPROXIMATE" if comparison.distance <= _APPROXIMATE_TOLERANCE else "DIFFERENT"


def _check_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    check_type("equivalent", "a graph", gm, fx.GraphModule, "a torch.fx.GraphModule")
    check_type("equivalent", "inputs", inputs, (list, tuple), "the inputs of the graphs, in a list")
    count = len(gm.graph.find_nodes(op="placeholder"))
    if count != len(inputs):
        raise ValueError(f"a graph with {count} inputs was given {len(inputs)}")


class _InputsRejected(Exception):
    """The graph before does not accept these inputs."""


class _FirstRun:
    """The graph before on one sample of inputs.

    Attributes:
        gm: the graph.
        inputs: the sampled inputs.
        run: the evaluation.
        results: what it returned and wrote, by name.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        family: Family,
        number: int,
        scale: float,
        squares_roots: bool,
        keep_integers: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(number * 101 + 5)
        self.gm, self.family, self.number, self.squares_roots = gm, family, number, squares_roots
        self.machine = self.new_machine()
        sampled = [
            sample_input(v, family, generator, scale)
            if isinstance(v, Tensor) and not (keep_integers and not v.is_floating_point())
            else v
            for v in inputs
        ]
        self.inputs = [
            self._dual(_with_strides_of(new, value), value.dtype) if isinstance(value, Tensor) else value
            for new, value in zip(sort_inputs(gm, sampled), inputs, strict=True)
        ]
        self.run = Run(self.machine, gm)
        try:
            self.results = self.run.outputs(self.run.evaluate(*self.inputs))
        except (RuntimeError, IndexError, ValueError) as error:
            raise _InputsRejected(first_line(error)) from error
        self.scale = _DRIFT_SCALE * min(max(_largest_magnitude(self.run), 1.0), 1e3)

    def _dual(self, value: Tensor, dtype: torch.dtype) -> Dual | Tensor:
        if not value.is_floating_point():
            return value
        m = self.machine.arithmetic
        return m.dual_of_intended(value).as_type(dtype) if self.family == "numbers" else m.dual(value, dtype)

    def new_machine(self) -> Machine:
        """Return a machine that evaluates another graph on this sample."""
        machine = Machine(field_of(self.number), self.number)
        machine.arithmetic.squares_roots = self.squares_roots
        return machine


def _with_strides_of(value: Tensor, example: Tensor) -> Tensor:
    """Give a value the strides of the example if these fill memory: determinants depend on contiguity."""
    return torch.empty_like(example, dtype=value.dtype).copy_(value)


class _SampleComparison:
    """Both graphs on one sample of inputs.

    Attributes:
        finding: what is not equal.
        adopted: see :class:`.Run`.
        evaluated: how many calls of the second graph were evaluated.
        opaque: operators taken as uninterpreted functions.
    """

    def __init__(
        self, first: _FirstRun, after: fx.GraphModule, signed_zeros: bool = False, unrounded: bool = False
    ) -> None:
        machine = first.new_machine()
        machine.arithmetic.folded = folded_numbers(machine.arithmetic.field, first.gm.graph, after.graph)
        second = Run(machine, after, first.run, signed_zeros)
        if unrounded:
            second.constants = unrounded_constants(first.gm, first.run.values, after, machine.arithmetic)
        self.finding: Finding | None = None
        try:
            others = second.outputs(second.evaluate(*first.inputs))
        except (RuntimeError, IndexError, ValueError) as error:
            # Either the graph is wrong, or one of our rules.
            reason = f"evaluating the graph after raises {first_line(error)}"
            relation: Relation = "different" if _raises(after, first.inputs) else "unproved"
            self.finding = Finding(first.family, "the graph", Comparison(relation, reason=reason))
        else:
            self._compare(first, others, second, signed_zeros)
        self.opaque = first.machine.opaque | machine.opaque
        self.adopted, self.evaluated = second.adopted, second.evaluated

    def _compare(self, first: _FirstRun, others: dict[str, Any], second: Run, signed_zeros: bool) -> None:
        results = first.results
        if results.keys() != others.keys():
            unmatched = sorted(results.keys() ^ others.keys())
            reason = f"only one of the graphs has {', '.join(unmatched)}"
            self.finding = Finding(first.family, "the graph", Comparison("different", reason=reason))
            return
        worst = EQUAL
        drift = KERNEL_DRIFT if second.depends_on_imprecise_kernels() else DRIFT
        for name, value in results.items():
            found = compare(
                value, others[name], first.machine.arithmetic.field, first.scale, signed_zeros, drift
            )
            if found.rank > worst.rank:
                worst = found
                node = next((k for k, r in second.relations.items() if r != "equal"), "")
                self.finding = Finding(first.family, name, found, node)


def _raises(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether running a graph as it is on these inputs raises an error."""
    args = [
        v.witness.to(v.dtype) if isinstance(v, Dual) else v.clone() if isinstance(v, Tensor) else v
        for v in inputs
    ]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            fx.Interpreter(gm).run(*args, enable_io_processing=False)
    except (RuntimeError, IndexError, ValueError):
        return True
    return False


_DRIFT_SCALE = 1e-4


def _largest_magnitude(run: Run) -> float:
    """The largest finite magnitude in a run."""
    found = 0.0
    for value in run.values.values():
        if isinstance(value, Dual):
            finite = value.witness[torch.isfinite(value.witness)]
            if finite.numel():
                found = max(found, float(finite.abs().max()))
    return found
