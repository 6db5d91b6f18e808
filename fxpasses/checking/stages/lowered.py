"""Shrink a graph that Inductor compiles to something wrong to the few calls that it takes.

Each graph that is passed to Inductor is kept, and run operator by operator next to the compiled program on
the inputs of its first call. Where they differ by more than rounding explains, or Inductor raises, parts of
the graph are compiled alone until the smallest that still fails is found and written to a file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fake.error_text import first_line
from fxpasses._torch import inductor_config, outside_tracing
from fxpasses.checking.comparison.rounding import PROGRAM_LIMIT
from fxpasses.checking.comparison.values import Reference
from fxpasses.checking.execution.collectives import UnknownCollective, collectives
from fxpasses.checking.execution.inputs import Unsupported, cloned, inputs_from_hints, placeholders
from fxpasses.checking.faults.reduce import Case, extract_calls, reduce_nodes, smaller_sizes
from fxpasses.checking.faults.registered import add_lowerings
from fxpasses.checking.faults.repro import fresh_directory, recorded_calls, write_repro
from fxpasses.checking.faults.source import CannotEmbed, PassSource
from fxpasses.graphs.aliasing import uses_rng
from fxpasses.graphs.rewriting import copy_graph
from fxpasses.pass_manager.limits import progress

log = logging.getLogger(__name__)

_FEW_ELEMENTS = 4096
"""Inputs with at most this many elements are not shrunk: each attempt costs a compilation."""
_SECONDS = 240.0
"""Time limit, in seconds, of the search for a small graph, which compiles parts."""


def replay_compiled(graph: Callable[..., Any], inputs: Sequence[Any]) -> int:
    """Compile a function of operator calls with Inductor and compare. Repro files call this.

    Returns:
        1 if the compiled function raises or computes something else, 0 otherwise: an exit status.
    """
    found = differences(recorded_calls(graph), list(inputs))
    print(f"Inductor is wrong: {found}" if found else "Inductor is right on these inputs")
    return 1 if found else 0


def differences(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Return how the graph compiled by Inductor differs from running its operators; "" if it does not.

    Raises:
        Unsupported: the graph itself cannot run, or communicates with other processes, which would not
            answer.
    """
    _refuse_collectives(gm)
    reference = Reference(gm, inputs)
    assert reference.native is not None
    module = fx.GraphModule(gm, copy_graph(gm).graph)
    try:
        with inductor_config.patch(force_disable_caches=True), torch.no_grad():
            values = list(cloned(inputs))
            # A new function each time: Dynamo caches compiled code per code object.
            compiled = torch.compile(lambda *args: module(*args), backend="inductor", dynamic=False)
            got = [*_as_list(compiled(*values)), *values]
    except Exception as error:  # noqa: BLE001  (whatever a wrong lowering raises is the finding)
        cause = getattr(error, "inner_exception", error)
        return f"it raises {first_line(cause)}"
    return _describe_wrong_value(reference, got)


def _describe_wrong_value(reference: Reference, got: Sequence[Any]) -> str:
    outputs = len(reference.native.values) - len(reference.inputs)
    for position, (native, value) in enumerate(zip(reference.native.values, got, strict=True)):
        if not isinstance(native, Tensor) or not isinstance(value, Tensor):
            continue
        name = f"output {position}" if position < outputs else f"input {position - outputs} after the run"
        if (native.shape, native.dtype) != (value.shape, value.dtype):
            return f"{name}: {native.dtype}{tuple(native.shape)} became {value.dtype}{tuple(value.shape)}"
        how = reference.distance(position, value)
        if how is not None and how.times > PROGRAM_LIMIT:
            return f"{name}: {how}"
    return ""


def _refuse_collectives(gm: fx.GraphModule) -> None:
    for _, target in collectives(gm):
        raise UnknownCollective(target)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


class LoweringCheck:
    """Compares each graph with what Inductor made of it, once. Writes a repro file for the first fault.

    Args:
        directory: where to write the file.
        suspect: name of a node to blame, if known.

    Attributes:
        repro: the file, or "".
        calls: number of operator calls in its graph.
        found: what is wrong, in words.
    """

    def __init__(self, directory: Path, suspect: str = "") -> None:
        self._directory, self._suspect = directory, suspect
        self.repro, self.calls, self.found = "", 0, ""

    def watch(self, gm: fx.GraphModule, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``compiled`` to compare it with ``gm`` on its first call (with one list of inputs)."""
        seen = False

        def run(inputs: list[Any]) -> Any:
            nonlocal seen
            first, seen = not seen, True
            if not first or self.found:
                return _call_compiled(compiled, inputs)
            before = cloned(inputs) if _can_be_cloned(inputs) else None
            results = _call_compiled(compiled, list(inputs))
            if before is not None:
                with outside_tracing():
                    self._compare(gm, before, [*_as_list(results), *inputs])
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def failed(self, gm: fx.GraphModule, error: BaseException) -> None:
        """Look for a smaller graph on which Inductor raises, after it raised on ``gm``."""
        try:
            with outside_tracing():
                self._reduce(gm, inputs_from_hints(placeholders(gm)), f"it raises {type(error).__name__}")
        except Unsupported as reason:
            log.info("there is no repro file: %s", reason)

    def check_alone(self, gm: fx.GraphModule) -> None:
        """Compile a graph by itself and compare it on made-up inputs, unless a fault was found before."""
        if self.found or _calls_rng(gm):
            return
        try:
            with outside_tracing():
                inputs = inputs_from_hints(placeholders(gm))
                found = differences(gm, inputs)
                if found:
                    self._reduce(gm, inputs, found)
        except Unsupported as reason:
            log.info("a graph is not compared with what Inductor makes of it: %s", reason)

    def _compare(self, gm: fx.GraphModule, inputs: list[Any], got: list[Any]) -> None:
        if _calls_rng(gm):
            log.info("a graph that calls the RNG is not compared: Inductor samples otherwise")
            return
        try:
            _refuse_collectives(gm)
            found = _describe_wrong_value(Reference(gm, inputs), got)
        except Unsupported as reason:
            log.info("a graph is not compared with what Inductor made of it: %s", reason)
            return
        if found:
            self._reduce(gm, inputs, found)

    def _reduce(self, gm: fx.GraphModule, inputs: list[Any], found: str) -> None:
        self.found = found
        raises = found.startswith("it raises")
        deadline = time.perf_counter() + _SECONDS

        def fails(case: Case) -> bool:
            if time.perf_counter() > deadline:
                return False
            try:
                how = differences(case.gm, case.inputs)
            except Unsupported:
                return False
            return bool(how) and how.startswith("it raises") == raises

        try:
            whole = _with_static_sizes(gm, inputs)
            suspects = {self._suspect} if self._suspect else _first_wrong_call(whole)
            progress.note("suspects", sorted(suspects))
            case = reduce_nodes(whole, None, suspects, fails)
            if sum(v.numel() for v in case.inputs if isinstance(v, Tensor)) > _FEW_ELEMENTS:
                case = smaller_sizes(case, lambda c: c, fails)
            if case is whole and not fails(case):
                log.warning(
                    "there is no repro file: the fault does not show when the graph is compiled alone"
                )
                return
            self.repro, self.calls = self._write(case, found), case.size
            progress.note("repro", self.repro)
        except (Unsupported, CannotEmbed, OSError) as reason:
            log.warning("there is no repro file: %s", reason)

    def _write(self, case: Case, found: str) -> str:
        source = PassSource()
        add_lowerings(case.gm, source)
        file = fresh_directory(self._directory, "inductor") / "repro.py"
        write_repro(
            file,
            f"Inductor is wrong on a graph of {case.size} calls: {found}.",
            case,
            lambda drawn: bool(differences(case.gm, drawn)),
            "fxpasses.checking.stages.lowered.replay_compiled(graph, inputs)",
            source,
        )
        return str(file)


def _calls_rng(gm: fx.GraphModule) -> bool:
    return any(uses_rng(n) or "inductor_random" in str(n.target) for n in gm.graph.nodes)


def _call_compiled(compiled: Callable[..., Any], inputs: list[Any]) -> Any:
    return compiled(inputs) if getattr(compiled, "_boxed_call", False) else compiled(*inputs)


def _can_be_cloned(inputs: Sequence[Any]) -> bool:
    try:
        cloned(inputs)
    except Unsupported as reason:
        log.info("a graph is not compared with what Inductor made of it: %s", reason)
        return False
    return True


def _with_static_sizes(gm: fx.GraphModule, inputs: list[Any]) -> Case:
    """The graph with the sizes of this call as numbers, which become part of the graph."""
    return Case(copy_graph(gm), inputs)


def _first_wrong_call(case: Case) -> set[str]:
    """The first call whose value is wrong if all values are returned; empty if none is then."""
    names = [
        n
        for n in case.gm.graph.nodes
        if n.op == "call_function" and isinstance(n.meta.get("val"), Tensor) and not n.is_impure()
    ]
    values: dict[str, Any] = dict(zip((n.name for n in placeholders(case.gm)), case.inputs, strict=True))
    every = extract_calls(
        case.gm, {n for n in case.gm.graph.nodes if n.op == "call_function"}, values, returned=names
    )
    if every is None:
        return set()
    found = differences(every.gm, every.inputs)
    if not found.startswith("output "):
        return set()
    return {names[int(found.split()[1].rstrip(":"))].name}
