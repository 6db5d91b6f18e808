"""Report passes that found nothing to change, or no graph to run on.

Most often such a pass looks for operators that are not in its graphs. Passes run after Inductor's
decompositions: ``aten.gelu`` is ``erf`` and products by then, and ``aten.linear`` never was in a graph. What
a pass looks for is read from its code. A model without gradients has no joint graph.
"""

from __future__ import annotations

import dis
import inspect
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from torch import fx

from fxpasses import _torch
from fxpasses.counters import counters
from fxpasses.graphs.decompositions import decompositions
from fxpasses.pass_manager.groups import Fixpoint
from fxpasses.pass_manager.pass_base import FunctionPass, Pass
from fxpasses.pass_manager.runs import PassRun
from fxpasses.passes import default_passes
from fxpasses.patterns import PatternPass

log = logging.getLogger(__name__)

_INFERENCE = (
    "Where no result needs a gradient there is an inference graph in the place of a joint one: declare graphs=['joint', 'inference'] "
    "if the pass is right there, too. "
)


@dataclass
class Unmatched:
    """The passes that changed no graph of one Dynamo graph.

    Attributes:
        passes: the passes.
    """

    passes: Iterable[Pass]
    _graphs: dict[str, int] = field(default_factory=dict)
    _ran: dict[str, dict[str, None]] = field(default_factory=dict)
    _targets: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        usual = {item.name for item in default_passes()}
        self._waiting = [
            item
            for given in self.passes
            for item in (given.passes if isinstance(given, Fixpoint) else (given,))
            if item.name not in usual
        ]
        """Passes that have not run on any graph yet."""
        self._candidates = [
            item
            for item in self._waiting
            # A pattern states itself whether it expects a match.
            if not isinstance(item, PatternPass) and not never_rewrites(item)
        ]

    def before(self, gm: fx.GraphModule, kind: str) -> None:
        """Record what a graph contains, before passes run on it."""
        if not self._candidates and not self._waiting:
            return
        targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
        self._graphs[kind] = len(targets)
        self._targets.update(targets)

    def after(self, runs: Iterable[PassRun], kind: str) -> None:
        """Record what the passes did."""
        for run in runs:
            counters.count_pass(run.name, changed=run.changed)
            self._waiting = [item for item in self._waiting if item.name != run.name]
            if run.changed or run.sites:
                self._candidates = [item for item in self._candidates if item.name != run.name]
            else:
                self._ran.setdefault(run.name, {})[kind] = None

    def warn(self) -> None:
        """Warn once about each pass that never changed anything and has seen every graph that it takes."""
        self._warn_not_run()
        for item in self._candidates:
            kinds = self._ran.get(item.name, {})
            if not kinds or self._expects_backward(item) or not counters.first_report(item.name):
                continue
            graphs = ", ".join(f"{kind} ({self._graphs[kind]} calls)" for kind in kinds)
            log.warning(
                "pass %r has changed nothing in the graphs that it ran on: %s. %sfxpasses.capture(model, *inputs) shows the "
                "graphs that passes see; fxpasses.stats().unmatched has all such passes.",
                item.name, graphs, _decomposition_hint(item, self._targets),
            )  # fmt: skip

    def _expects_backward(self, item: Pass) -> bool:
        """Whether a graph that the pass takes is still to come."""
        return (
            "joint" in self._graphs and "backward" in item.contract.graphs and "backward" not in self._graphs
        )

    def _warn_not_run(self) -> None:
        for item in self._waiting if self._graphs else ():
            if not self._expects_backward(item) and counters.first_without_graph(item.name):
                log.warning(
                    "pass %r has not run so far: it takes %s graphs, and those compiled are %s graphs. %s"
                    "fxpasses.stats().unmatched has all such passes.",
                    item.name, ", ".join(sorted(item.contract.graphs)), ", ".join(self._graphs),
                    _INFERENCE if "inference" in self._graphs else "",
                )  # fmt: skip


def _decomposition_hint(item: Pass, targets: Collection[Any]) -> str:
    if type(item).__module__.startswith("fxpasses.passes"):
        return ""  # our own passes know what is decomposed
    table = decompositions()
    decomposed = [
        str(operator)
        for operator in mentioned_operators(item)
        if not any(overload in targets for overload in _torch.overloads(operator))
        and all(overload in table or _torch.is_composite(overload) for overload in _torch.overloads(operator))
    ]
    if not decomposed:
        return ""
    return f"It names {', '.join(decomposed)}: decomposed into other operators before passes run. "


def never_rewrites(item: Pass) -> bool:
    """Whether a pass can never report a change: its code returns nothing but ``False``."""
    function = _code_of(item)
    if function is None:
        return False
    instructions = list(dis.get_instructions(function.__code__))
    for before, now in zip([None, *instructions], instructions, strict=False):
        if now.opname == "RETURN_CONST" and now.argval is not False:
            return False
        if now.opname == "RETURN_VALUE" and not (
            before is not None and before.opname == "LOAD_CONST" and before.argval is False
        ):
            return False
    return True


def _code_of(item: Pass) -> FunctionType | None:
    function = inspect.unwrap(item.function if isinstance(item, FunctionPass) else type(item).apply)
    return function if isinstance(function, FunctionType) else None


def mentioned_operators(item: Pass) -> list[Any]:
    """The operators named in a pass's code, including the functions of its own module that it calls.

    >>> import torch
    >>> from fxpasses import graph_pass
    >>> @graph_pass
    ... def finds(gm):
    ...     aten = torch.ops.aten
    ...     return bool(gm.graph.find_nodes(op="call_function", target=aten.gelu.default))
    >>> mentioned_operators(finds)
    [<OpOverload(op='aten.gelu', overload='default')>]
    """
    function = _code_of(item)
    found: dict[Any, None] = {}
    pending = [function]
    seen: set[Any] = set()
    while pending:
        function = pending.pop()
        if function is None or function in seen or len(seen) > 100:
            continue
        seen.add(function)
        for value in _named_values(function):
            for one in _elements(value):
                if isinstance(one, (_torch.OpOverload, _torch.OpOverloadPacket)):
                    found[one] = None
                elif isinstance(one, FunctionType) and one.__module__ == function.__module__:
                    pending.append(one)
    return list(found)


def _elements(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    else:
        yield value


def _named_values(function: FunctionType) -> Iterator[Any]:
    """The objects behind attribute chains in a function's code, such as ``torch.ops.aten.gelu.default``."""
    closed = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    known: dict[str, Any] = dict(function.__globals__)
    for name, cell in closed.items():
        try:
            known[name] = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    codes: list[CodeType] = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield from _chains(code, known)


_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_FAST", "LOAD_FAST_CHECK"}
_NO_VALUE = object()


def _chains(code: CodeType, known: dict[str, Any]) -> Iterator[Any]:
    value: Any = _NO_VALUE
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name in ("LOAD_ATTR", "LOAD_METHOD") and value is not _NO_VALUE:
            value = _attribute(value, str(instruction.argval))
            continue
        if name in ("STORE_FAST", "STORE_DEREF") and value is not _NO_VALUE:
            known[str(instruction.argval)] = value
        elif value is not _NO_VALUE:
            yield value
        value = known.get(str(instruction.argval), _NO_VALUE) if name in _LOADS else _NO_VALUE


def _attribute(value: Any, name: str) -> Any:
    """The attribute, if reading it runs no code except torch's operator lookup."""
    if isinstance(value, _torch.OpOverloadPacket) or inspect.ismodule(value):
        return getattr(value, name, _NO_VALUE)
    return inspect.getattr_static(value, name, _NO_VALUE) if isinstance(value, type) else _NO_VALUE
