"""Comparing two graphs by running them on the same inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from fxpasses.checking.inputs import Unsupported, cloned, placeholders
from fxpasses.checking.interpret import ExactRun, Poison, RoundedRun, Run, allocates
from fxpasses.checking.local import wrong_changes
from fxpasses.checking.low_precision import Rewritten, focused_deviations, has_low_precision
from fxpasses.checking.tolerance import Deviation, deviation, same_bits
from fxpasses.graphs.aliasing import is_mutating
from fxpasses.graphs.rewriting import constants_of, same_constant, subgraphs

__all__ = ["Mismatch", "Outcome", "Reference", "changed_nodes", "compare", "largest_error", "value_names"]

_SAMPLES, _MORE_SAMPLES = 4, 24
_SEED = 20
Fault = Literal["value", "metadata", "aliasing", "structure", "error"]


@dataclass(frozen=True)
class Mismatch:
    """One way in which a graph differs from its reference.

    Attributes:
        fault: a wrong value, wrong metadata, memory that is shared wrongly, a finding of the structure check, or an exception.
        value: which of the graph's results, in words.
        position: its position among the results (outputs, then inputs after the run); -1 for an exception.
        problem: what is wrong, in words.
        deviation: for a wrong value, how far off it is.
        calls: for a wrong value, names of the calls that make it wrong, where that is known.
    """

    fault: Fault
    value: str
    position: int
    problem: str
    deviation: Deviation | None = None
    calls: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.value}: {self.problem}" if self.value else self.problem


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run of a graph.

    Attributes:
        values: its outputs, then its inputs after the run.
        shared: pairs of positions in ``values`` whose memory overlaps.
    """

    values: list[Any]
    shared: frozenset[tuple[int, int]]


class Reference:
    """A graph to compare others with, on fixed inputs. It runs in each precision when that is first asked for.

    Args:
        gm: the graph.
        inputs: its inputs; they are copied for each run.

    Raises:
        Unsupported: for inputs that cannot be copied.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.gm = gm
        self.inputs = cloned(inputs)
        self._samples: list[list[Any]] = []

    @functools.cached_property
    def native(self) -> Outcome:
        """The graph's own results.

        Raises:
            Unsupported: when the graph cannot be run on these inputs.
        """
        try:
            return _run(self.gm, self.inputs)
        except Unsupported:
            raise
        except Exception as error:
            raise Unsupported(f"the graph itself raises {type(error).__name__}: {error}") from error

    @functools.cached_property
    def exact(self) -> list[Any]:
        """The results in float64; ``None`` for each where an operator cannot be run so."""
        run = ExactRun(self.gm)
        try:
            return [*run(cloned(self.inputs), _SEED), *run.inputs]
        except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
            return [None] * len(self.native.values)

    def samples(self, count: int) -> list[list[Any]]:
        """The results of ``count`` runs with the rounding resampled."""
        while len(self._samples) < count:
            inputs = cloned(self.inputs)
            outputs = RoundedRun(self.gm, len(self._samples))(inputs, _SEED)
            self._samples.append([*outputs, *inputs])
        return self._samples[:count]


def compare(
    reference: Reference,
    candidate: fx.GraphModule,
    names: Sequence[str],
    bitwise: bool = False,
) -> list[Mismatch]:
    """The mismatches of ``candidate`` with ``reference`` on its inputs; empty when there are none.

    Where an input holds NaN, a candidate that need not have the same bits may lose NaN and infinities, but not have more
    of them; flags and integers are not looked at.

    Args:
        reference: the graph before, with inputs.
        candidate: the graph after.
        names: of the results, for messages: see :func:`value_names`.
        bitwise: whether the values have to be equal bit by bit.

    Raises:
        Unsupported: when the reference cannot be run on the inputs.
    """
    expected = reference.native
    lenient = not bitwise and _holds_nan(reference.inputs)
    poisons: list[Poison] = ["nan", "huge"] if allocates(candidate) else ["nan"]
    for poison in poisons:
        try:
            got = _run(candidate, reference.inputs, poison)
        except Unsupported:  # not run, which says nothing about it
            raise
        except Exception as error:  # noqa: BLE001  (whatever a wrong graph raises is the finding)
            return [Mismatch("error", "", -1, f"the graph now raises {type(error).__name__}: {error}")]
        found = [*_shapes(expected, got, names), *_memory(expected, got, names)]
        if not any(m.fault == "metadata" for m in found):
            local = (
                None
                if bitwise or lenient or len(poisons) > 1
                else _at_places(reference, candidate, got, names)
            )
            found += _numbers(reference, got, names, bitwise, lenient) if local is None else local
            if not found and local is not None:
                # Writes are seen by what the graph leaves in its inputs, wherever they stand.
                # What is infinite in the graph's own types may not be so in float64, in which the changes were judged.
                if any(map(is_mutating, candidate.graph.nodes)):
                    return _numbers(reference, got, names)
                infinite = _newly_infinite(reference, got)
                return (
                    [m for m in _numbers(reference, got, names) if m.position in infinite] if infinite else []
                )
        if found:
            return found
    return [] if bitwise or lenient else _looked_at_closely(reference, candidate, got, names)


def _holds_nan(values: Sequence[Any]) -> bool:
    return any(isinstance(v, Tensor) and v.is_floating_point() and bool(v.isnan().any()) for v in values)


def _at_places(
    reference: Reference, candidate: fx.GraphModule, got: Outcome, names: Sequence[str]
) -> list[Mismatch] | None:
    """The results that a rewrite makes wrong, judged change by change; ``None`` where that is not possible."""
    values = reference.native.values
    pairs = zip(values, got.values, strict=True)
    if all(same_bits(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs):
        return []
    changed = changed_nodes(reference.gm, candidate)
    found = wrong_changes(reference.gm, candidate, changed, reference.inputs, values)
    if found is None:
        return None
    return [
        Mismatch("value", names[f.position], f.position, str(f.deviation), f.deviation, f.change.names)
        for f in found
    ]


def changed_nodes(before: fx.GraphModule, after: fx.GraphModule) -> tuple[set[str], set[str]]:
    """Names of the nodes of each graph that the other has not, or has with another target or other arguments."""

    def described(gm: fx.GraphModule, other: fx.GraphModule | None) -> dict[str, str]:
        theirs = (subgraphs(other), constants_of(other)) if other is not None else ({}, {})
        told = {name: str(described(graph, theirs[0].get(name))) for name, graph in subgraphs(gm).items()}
        for name, value in constants_of(gm).items():
            if name in theirs[1] and not same_constant(value, theirs[1][name]):
                told[name] = f" {id(value)}"
        found = {n.name: f"{n.op} {n.target} {n.args} {n.kwargs}" for n in gm.graph.nodes}
        for node in gm.graph.nodes if told else ():
            for value in (node, *node.all_input_nodes):
                if value.op == "get_attr":
                    found[node.name] += told.get(str(value.target), "")
        return found

    old, new = described(before, after), described(after, before)
    return (
        {name for name, text in old.items() if new.get(name) != text},
        {name for name, text in new.items() if old.get(name) != text},
    )


def value_names(gm: fx.GraphModule, kind: str) -> list[str]:
    """A name for each output of the graph, and for each input after the run."""
    inputs = placeholders(gm)
    (output,) = gm.graph.find_nodes(op="output")
    returned = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    names = [f"output {i}" for i in range(len(returned))]
    primals = [n for n in inputs if not is_tangent(n)]
    if kind == "joint" and len(primals) < len(returned):
        count = len(returned) - len(primals)
        names[count:] = [f"gradient of {describe_input(node)}" for node in primals]
    elif kind == "backward":
        names = [f"gradient {i}" for i in range(len(returned))]
    return names + [f"input {describe_input(node)} after the run" for node in inputs]


def is_tangent(node: fx.Node) -> bool:
    """Whether an input of a joint or backward graph is the gradient of an output."""
    return str(node.target).startswith("tangents_")


def describe_input(node: fx.Node) -> str:
    """The input's name, with that of the parameter that it is where AOTAutograd knows it."""
    target = getattr(node.meta.get("desc"), "target", None)
    return f"{node.name} ({target})" if isinstance(target, str) else node.name


def largest_error(exact: Tensor, value: Tensor) -> float:
    """The largest distance from the exact values; 0 for integers and flags."""
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    if value.is_complex():
        exact, value = torch.view_as_real(exact.resolve_conj()), torch.view_as_real(value.resolve_conj())
    center, got = exact.double(), value.double()
    known = center.isfinite()
    return (got - center)[known].abs().nan_to_num(math.inf).max().item() if known.any() else 0.0


def _run(gm: fx.GraphModule, inputs: Sequence[Any], poison: Poison = "nan") -> Outcome:
    copies = cloned(inputs)
    values = [*Run(gm, poison)(copies, _SEED), *copies]
    return Outcome(values, _shared(values, len(values) - len(copies)))


def _shapes(expected: Outcome, got: Outcome, names: Sequence[str]) -> list[Mismatch]:
    if len(expected.values) != len(got.values):
        return [Mismatch("metadata", "", -1, f"{len(expected.values)} results became {len(got.values)}")]
    found = []
    for position, (a, b) in enumerate(zip(expected.values, got.values, strict=True)):
        was, now = _describe(a), _describe(b)
        if was != now:
            found.append(Mismatch("metadata", names[position], position, f"was {was} and is {now}"))
    return found


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value) if isinstance(value, (int, float, bool, type(None))) else type(value).__name__
    text = f"{value.dtype}{tuple(value.shape)} on {value.device}"
    if value.layout is torch.strided and value.numel():
        # The stride of a dimension of size 1 says nothing.
        text += (
            f" with strides {tuple(s for n, s in zip(value.shape, value.stride(), strict=True) if n != 1)}"
        )
    return text


def _memory(expected: Outcome, got: Outcome, names: Sequence[str]) -> list[Mismatch]:
    def pair(a: int, b: int) -> str:
        return f"{names[a]} and {names[b].removesuffix(' after the run')}"

    new = [
        Mismatch("aliasing", pair(a, b), a, "share memory and did not")
        for a, b in got.shared - expected.shared
    ]
    lost = [
        Mismatch("aliasing", pair(a, b), a, "shared memory and do not any more")
        for a, b in expected.shared - got.shared
        if not names[a].startswith("gradient")  # nobody relies on gradients being views of each other
    ]
    return sorted([*new, *lost], key=lambda m: m.position)


def _numbers(
    reference: Reference, got: Outcome, names: Sequence[str], bitwise: bool = False, lenient: bool = False
) -> list[Mismatch]:
    found = []
    for position, (native, value) in enumerate(zip(reference.native.values, got.values, strict=True)):
        if not isinstance(native, Tensor) or same_bits(native, value, bitwise):
            continue
        if lenient and not native.is_floating_point():
            continue
        for count in (_SAMPLES, _MORE_SAMPLES):  # a suspicion is looked into with more samples
            how = deviation(
                native,
                reference.exact[position],
                [sample[position] for sample in reference.samples(count)],
                value,
                bitwise,
                lenient=lenient,
            )
            if how is None or how.is_clear:
                break
        if how is not None:
            found.append(Mismatch("value", names[position], position, str(how), how))
    return found


def _looked_at_closely(
    reference: Reference, candidate: fx.GraphModule, got: Outcome, names: Sequence[str]
) -> list[Mismatch]:
    """The deviations that the ordinary comparison does not see in low precision: see :mod:`fxpasses.checking.low_precision`."""
    pairs = zip(reference.native.values, got.values, strict=True)
    if all(not isinstance(a, Tensor) or same_bits(a, b) for a, b in pairs) or not has_low_precision(
        reference.gm
    ):
        return []
    old, new = changed_nodes(reference.gm, candidate)
    rewritten = Rewritten(frozenset(old), frozenset(new))
    outputs = reference.native.values[: len(reference.native.values) - len(reference.inputs)]
    found = focused_deviations(reference.gm, candidate, rewritten, reference.inputs, outputs)
    note = "with float64 behind the rewritten calls"
    return [Mismatch("value", names[at], at, f"{how}, {note}", how) for at, how in found.items()]


def _newly_infinite(reference: Reference, got: Outcome) -> set[int]:
    """Positions of results that hold NaN or infinities where the reference holds numbers."""
    return {
        position
        for position, (native, value) in enumerate(zip(reference.native.values, got.values, strict=True))
        if isinstance(native, Tensor)
        and native.is_floating_point()
        and bool((native.isfinite() & ~value.isfinite()).any())
    }


def _shared(values: Sequence[Any], outputs: int) -> frozenset[tuple[int, int]]:
    """Pairs of an output and a later value (an output or an input) whose memory overlaps."""
    by_storage: dict[int, list[int]] = {}
    for position, value in enumerate(values):
        if isinstance(value, Tensor) and value.layout is torch.strided and value.numel():
            by_storage.setdefault(value.untyped_storage()._cdata, []).append(position)
    return frozenset(
        (a, b)
        for group in by_storage.values()
        for i, a in enumerate(group)
        if a < outputs
        for b in group[i + 1 :]
        if _overlap(values[a], values[b])
    )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common (exactly, not just their ranges)."""
    if a.dtype.itemsize != b.dtype.itemsize:
        return True
    ranges = [(t.storage_offset(), t.storage_offset() + _extent(t)) for t in (a, b)]
    (start, stop), (other, end) = ranges
    if stop <= other or end <= start:
        return False
    low = min(start, other)
    marks = torch.zeros(max(stop, end) - low, dtype=torch.bool)
    marks.as_strided(a.shape, a.stride(), start - low).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), other - low).any())


def _extent(t: Tensor) -> int:
    return sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
