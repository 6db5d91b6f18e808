"""Isolate the calls that Inductor cannot lower: they run in eager, between parts that Inductor compiles.

::

    graph ── Inductor raises
      └ which call? ── the shortest part from the front on which it still raises, shortened from its other end
    what is before ── compiled      the call ── eager      what is behind ── compiled, or searched in its turn

Parts are cut in graph order and exchange values in the traced layouts, so that nothing depends on what the
compiler makes of the other parts. Updates of inputs come last, in eager, in their order.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fake.error_text import first_line
from fxpasses import _torch
from fxpasses.compiling import _torch_inductor
from fxpasses.compiling.compiled_segments import (
    COPY,
    Cut,
    Segment,
    connect_segment,
    segment_module,
    stitch_segments,
)
from fxpasses.compiling.inductor_rng import with_inductor_rng
from fxpasses.compiling.saved_code import EagerCode, StitchedCode
from fxpasses.counters import Isolated, counters
from fxpasses.errors import Location
from fxpasses.graphs.aliasing import is_alias, is_mutating
from fxpasses.graphs.provenance import failing_node, locate
from fxpasses.graphs.rewriting import value_of

log = logging.getLogger(__name__)

_SECONDS = 120.0
"""Seconds to spend on trying parts of one graph. After that, the rest runs in eager as one part."""
_REPROS = 3
"""Maximum number of repro files for one model's graphs."""

Unit = tuple[fx.Node, ...]
"""A call and the nodes that extract its results. They are never split across parts."""

Lower = Callable[..., Callable[[list[Any]], Any]]
"""Compiles a graph for its inputs, with Inductor's arguments; ``generated`` is called once there is code."""


class NotIsolated(Exception):
    """The graph cannot be cut. The message says why."""


class _Generated(BaseException):
    """Raised once Inductor has generated code, to end a trial that needs nothing more. Not an error."""


@dataclass
class _Part:
    """Calls that run together: compiled, or in eager if ``compiled`` is ``None``."""

    units: list[Unit]
    compiled: Callable[[list[Any]], Any] | None = None


@dataclass
class Isolation:
    """The search in one graph.

    Attributes:
        gm: the graph as it was passed to Inductor.
        inputs: its inputs, as Inductor takes them.
        kwargs: Inductor's further arguments.
        lower: compiles a graph.
        directory: where repro files go.
        repros: the existing repro files, by operator and reason.
    """

    gm: fx.GraphModule
    inputs: Sequence[Any]
    kwargs: Mapping[str, Any]
    lower: Lower
    directory: Path
    repros: dict[tuple[str, str], str] = field(default_factory=dict)
    _found: list[Isolated] = field(default_factory=list)
    _trials: dict[Any, Exception | None] = field(default_factory=dict)
    _window: list[Unit] = field(default_factory=list)
    """The smallest part that fails although none of its calls fails alone."""
    _spent: float = 0.0
    """Seconds spent on trials."""
    _late: bool = False
    """Whether Inductor fails after code generation. A trial then has to compile the code, too."""
    _generated: bool = False
    """Whether Inductor generated code for the last part it was given."""

    @property
    def kind(self) -> str:
        """The kind of the graph."""
        if self.kwargs.get("is_backward"):
            return "backward"
        return "inference" if self.kwargs.get("is_inference") else "forward"

    def compiled(self, error: Exception, *, late: bool) -> Callable[[list[Any]], Any]:
        """Build a callable (list of inputs) in which only what Inductor cannot lower runs in eager.

        Args:
            error: Inductor's error on the whole graph.
            late: whether Inductor had generated code by then.

        Raises:
            NotIsolated: if the graph cannot be cut.
        """
        self._late = late
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        self._values = dict(zip(placeholders, self.inputs, strict=True))
        static = self.kwargs.get("static_input_idxs") or ()
        self._static = {placeholders[i] for i in static}
        units, updates = _units(self.gm)
        self._symbols = _Symbols(self.gm)
        parts = _merge_eager_parts(self._parts(units, error))
        if not self._found and updates:  # everything else can be lowered without them
            self._record_failure([tuple(updates)], error)
        if not any(part.compiled for part in parts):
            raise NotIsolated("nothing of it can be lowered")
        for found in self._found:
            counters.add_isolated(found)
        self._log_summary(sum(part.compiled is not None for part in parts))
        segments = [self._segment([node for unit in part.units for node in unit]) for part in parts]
        runs = [part.compiled for part in parts]
        if updates:
            segments.append(self._segment(updates))
            runs.append(None)
        call = stitch_segments(
            Cut(self.gm, list(segments), {}),
            [r or self._eager_code(s) for r, s in zip(runs, segments, strict=True)],
        )
        parts_saved = all(isinstance(part, _torch_inductor.OutputCode) for part in call.parts.values())  # type: ignore[attr-defined]
        if _torch_inductor.saves_compiled_code() and parts_saved:
            return StitchedCode(call.source, call.parts)  # type: ignore[attr-defined]
        return call

    def _eager_code(self, segment: Segment) -> EagerCode:
        """Run a segment in eager, with the traced strides that the compiled segments rely on."""
        module = with_inductor_rng(segment_module(self.gm, segment))
        return EagerCode(module, [value_of(node) for node in segment.outputs])

    def _parts(self, units: list[Unit], error: Exception | None) -> Iterator[_Part]:
        """Divide calls into parts; ``error`` is what Inductor raised on all of them, if it was tried."""
        again = True
        while units:
            known = next((u for u in units if self._is_known(u)), None) if error is None else None
            if error is None and known is None:
                self._generated = False
                try:
                    yield _Part(units, self._compile(units, stop=False))
                    return
                except Exception as raised:
                    if _torch.is_control_flow(raised):
                        raise
                    error, self._late = raised, self._generated
            culprit = known or self._culprit(units, error)
            if culprit == () and again:
                error, again = None, False  # the calls can be lowered: compile them
                continue
            culprit = culprit or (units[-1] if culprit == () else None)
            if culprit is None:
                self._record_failure(units, error)
                yield _Part(units)
                return
            index = units.index(culprit)
            shown = [culprit] if self._trial_error([culprit]) is not None else self._window
            self._record_failure([culprit], self._trial_error(shown) or error, shown)
            yield from self._parts(units[:index], None)
            yield _Part([culprit])
            units, error = units[index + 1 :], None

    def _is_known(self, unit: Unit) -> bool:
        """Whether a call resembles one that was found, and cannot be lowered alone either."""
        alike = any(found.target == str(unit[0].target) for found in self._found)
        return alike and self._spent < _SECONDS and self._trial_error([unit]) is not None

    def _culprit(self, units: list[Unit], error: Exception | None) -> Unit | None:
        """Find the call to run in eager: one that fails alone, or else one without which the others succeed.

        Returns:
            The call; an empty tuple if all calls can be lowered as a part; ``None`` if the search took too
            long.
        """
        name = failing_node(error, self.gm).node if error is not None else ""
        named = next((i for i, unit in enumerate(units) if any(n.name == name for n in unit)), None)
        if len(units) == 1 or (named is not None and self._trial_error([units[named]]) is not None):
            return units[named or 0]
        at = set(_torch_inductor.origins_of(error)) if error is not None and not self._late else set()
        for unit in units:
            if any(n.name in at for n in unit) and self._trial_error([unit]) is not None:
                return unit

        def fails(first: int, end: int) -> bool:
            if self._spent > _SECONDS:
                raise TimeoutError
            return first < end and self._trial_error(units[first:end]) is not None

        self._window = units
        try:
            if not fails(0, len(units)):
                return ()
            low, high = 0, len(units)  # the first `high` calls fail, the first `low` succeed
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if fails(0, middle) else (middle, high)
            end = high
            low, high = 0, end  # calls from `low` on fail, calls from `high` on succeed
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if fails(middle, end) else (low, middle)
            candidates = range(low, end)
            self._window = units[low:end]
            likely = [named] if named is not None and named in candidates else []
            for i in dict.fromkeys([*likely, end - 1, low]):
                if not fails(0, i) and not fails(i + 1, len(units)):
                    return units[i]
            return units[likely[0] if likely else end - 1]
        except TimeoutError:
            return None

    def _trial_error(self, units: list[Unit]) -> Exception | None:
        """The exception that Inductor raises on some calls, or ``None`` if it lowers them."""
        key = (units[0], len(units), self._late)
        if key not in self._trials:
            start = time.perf_counter()
            try:
                self._compile(units, stop=not self._late)
                self._trials[key] = None
            except _Generated:
                self._trials[key] = None
            except Exception as raised:
                if _torch.is_control_flow(raised):
                    raise
                self._trials[key] = raised
            self._spent += time.perf_counter() - start
        return self._trials[key]

    def _compile(self, units: Sequence[Unit], stop: bool) -> Callable[[list[Any]], Any]:
        def generated() -> None:
            self._generated = True
            if stop:
                raise _Generated

        segment = self._segment([node for unit in units for node in unit])
        given = [self._values.get(node, node.meta.get("val")) for node in segment.inputs]
        static_indices = [i for i, node in enumerate(segment.inputs) if node in self._static]
        kwargs = {**self.kwargs, "static_input_idxs": static_indices, "cudagraphs": _torch.BoxedBool(False)}
        with _torch.segment_context():
            return self.lower(segment_module(self.gm, segment), given, kwargs, generated)

    def _segment(self, nodes: list[fx.Node]) -> Segment:
        segment = Segment(nodes)
        connect_segment(segment, dict.fromkeys(nodes, segment), self._symbols.given)
        segment.inputs += self._symbols.missing(segment)
        return segment

    def _record_failure(
        self, units: Sequence[Unit], error: Exception | None, shown: Sequence[Unit] | None = None
    ) -> None:
        """Record what runs in eager, and write a repro program of the calls that show why (``shown``)."""
        nodes = [node for unit in units for node in unit]
        location = locate(nodes[0])
        reason = _one_line(error)
        if len(nodes) > 1 and any(node.target is not operator.getitem for node in nodes[1:]):
            reason += f" (somewhere in {len(nodes)} calls from here)"
        repro = self.repros.get((location.target, reason), "")
        if not repro and len(self.repros) < _REPROS:
            repro = self.repros[location.target, reason] = self._write_repro(
                [node for unit in shown or units for node in unit], reason, location
            )
        self._found.append(
            Isolated(
                self.kind, location.node, location.target, location.source, location.module, reason, repro
            )
        )

    def _write_repro(self, nodes: list[fx.Node], reason: str, location: Location) -> str:
        segment = self._segment(nodes)
        given = [self._values.get(node, node.meta.get("val")) for node in segment.inputs]
        module = segment_module(self.gm, segment)
        try:
            text = _torch_inductor.inductor_repro(module, given)
        except Exception as error:  # noqa: BLE001  (its failure must not end a compilation)
            log.warning("there is no repro file: %s: %s", type(error).__name__, error)
            return ""
        file = fresh_file(self.directory)
        file.write_text(
            f'"""Inductor fails: {reason}\n\nFor {location}.\nUses nothing but torch.\n"""\n{text}'
        )
        return str(file)

    def _log_summary(self, parts: int) -> None:
        """Report once what runs in eager, and why."""
        by_reason: dict[tuple[str, str], list[Isolated]] = {}
        for found in self._found:
            by_reason.setdefault((found.target, found.reason), []).append(found)
        for group in by_reason.values():
            first = group[0]
            more = f" and {len(group) - 1} more like it" if len(group) > 1 else ""
            where = Location(first.node, first.target, first.source, first.module)
            shown = f" {first.repro} shows it, for a report to PyTorch." if first.repro else ""
            log.warning(
                "Inductor cannot lower %s%s: %s. It runs in eager, between %d compiled parts of the %s graph "
                "(on_failure='isolate').%s", where, more, first.reason, parts, first.graph, shown,
            )  # fmt: skip


def _one_line(error: BaseException | None) -> str:
    if error is None:
        return "the search took too long"
    return first_line(error)


def fresh_file(directory: Path) -> Path:
    """Return a path ``inductor_N/repro.py`` that does not exist yet."""
    number = 0
    while True:
        folder = directory / f"inductor_{number}"
        try:
            folder.mkdir(parents=True)
            return folder / "repro.py"
        except FileExistsError:
            number += 1


def _units(gm: fx.GraphModule) -> tuple[list[Unit], list[fx.Node]]:
    """Split the graph into its calls in order, and the final input updates with the calls that follow them.

    Raises:
        NotIsolated: if it writes to memory in other ways, or has values that no part can take.
    """
    body: dict[fx.Node, list[fx.Node]] = {}
    updates: list[fx.Node] = []
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.op != "call_function":
            raise NotIsolated(f"it has a {node.op} of {node.target}")
        target = node.target
        if "with_effects" in str(target) or _torch.has_effects(target):
            raise NotIsolated(f"{node} has effects ({target})")
        if updates or is_mutating(node):
            if target is not COPY and not is_alias(node) and not isinstance(value_of(node), torch.SymInt):
                raise NotIsolated(f"{node} ({target}) computes or writes where inputs are updated")
            updates.append(node)
        elif target is operator.getitem and node.args[0] in body:
            body[node.args[0]].append(node)  # type: ignore[index]
        else:
            body[node] = [node]
    for node, taken in body.items():
        if isinstance(value_of(node), (tuple, list)) and len(taken) - 1 != len(node.users):
            raise NotIsolated(f"{node} returns several values that are used as one")
    return [tuple(nodes) for nodes in body.values()], updates


class _Symbols:
    """Finds the values that tell a part of a graph its symbols."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._index = {node: index for index, node in enumerate(gm.graph.nodes)}
        self.given: list[fx.Node] = []
        self._known: set[Any] = set()
        self._from: dict[Any, fx.Node] = {}
        self._made_by: dict[Any, fx.Node] = {}
        """For each symbol, the first node whose value contains it."""
        for node in gm.graph.nodes:
            for symbol in self._needed([node]):
                self._made_by.setdefault(symbol, node)
            value = value_of(node)
            if node.op == "placeholder" and isinstance(value, torch.SymInt):
                self.given.append(node)
                self._known |= _torch.free_symbols(value)
            if node.op == "placeholder" or isinstance(value, torch.SymInt):
                for symbol in _plain_symbols(value):
                    self._from.setdefault(symbol, node)

    def missing(self, segment: Segment) -> list[fx.Node]:
        """Nodes that a part needs as extra inputs to know its symbols.

        Raises:
            NotIsolated: if no earlier value provides a symbol.
        """
        found: dict[fx.Node, None] = {}
        known = self._known.union(*(_plain_symbols(value_of(node)) for node in segment.inputs))
        own = set(segment.nodes)
        first = min(self._index[node] for node in segment.nodes)
        for symbol in self._needed([*segment.nodes, *segment.inputs]) - known:
            if self._made_by.get(symbol) in own:
                continue
            node = self._from.get(symbol)
            if node is None or self._index[node] > first:
                raise NotIsolated(f"no value before {segment.nodes[0]} is its size {symbol}")
            found[node] = None
        return list(found)

    def _needed(self, nodes: Sequence[fx.Node]) -> set[Any]:
        needed: set[Any] = set()
        for node in nodes:
            value = value_of(node)
            for one in value if isinstance(value, (tuple, list)) else (value,):
                needed |= _torch.free_symbols(one)
        return needed


def _plain_symbols(value: Any) -> set[Any]:
    """The symbols that are the value itself or one of its sizes. Inductor reads their values from there."""
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return {size.node.expr for size in sizes if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol}


def _merge_eager_parts(parts: Iterator[_Part]) -> list[_Part]:
    """The parts, with adjacent parts that run in eager merged."""
    merged: list[_Part] = []
    for part in parts:
        if merged and merged[-1].compiled is None and part.compiled is None:
            merged[-1].units += part.units
        else:
            merged.append(dataclasses.replace(part, units=list(part.units)))
    return merged
