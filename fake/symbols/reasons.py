"""Find who asked: the user's line and the operator behind each decision of a shape environment.

For a guard, torch keeps one line of its own and one of the user's. A :class:`Reason` is taken at the moment
of the decision from the Python stack: the operators being dispatched, the line of the user's program (what
Dynamo interprets, what AOTAutograd replays, or simply the caller), and the kind of decision.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch

from fake.seam import symbolic_shapes as _t

_OWN_DIRECTORIES = tuple(
    str(Path(__file__).resolve().parents[2] / package) + os.sep
    for package in ("fake", "fxpasses", "compiled_autograd")
)
_FRAMEWORK = (_t.torch_directory, *_OWN_DIRECTORIES, str(Path(sympy.__file__).resolve().parent) + os.sep)
_INTERPRETERS = tuple(
    _t.torch_directory + os.path.join(*place) for place in (("_dynamo", ""), ("fx", "experimental", ""))
)
_CHECKS = str(Path(__file__).resolve().parents[1] / "kernels" / "checks") + os.sep
_RESHAPES = ["reshape", "view", "flatten", "unflatten"]
_USER_NAMES = {
    "infer_size": _RESHAPES,
    "_reshape_view_helper": _RESHAPES,
    "_reshape_view_helper_core_alg": _RESHAPES,
    "_view_has_unbacked_input": _RESHAPES,
    "broadcast_shapes": ["add", "sub", "mul", "div"],
    "_broadcast_shapes": ["add", "sub", "mul", "div"],
}
"""For functions of torch with uninformative names, what users call them by."""
_LAYOUT_FUNCTIONS = re.compile(
    "contiguous|strides|channels_last|dense|should_swap|apply_perm|validate_dim_length"
)
"""Functions that ask about a tensor's memory layout, for operators that do not appear themselves."""
_READS_VALUE = re.compile(
    r"\b(if|elif|while|for|assert|and|or|not|in|match)\b|[<>]|[!=]=|\b(int|bool|float|range|min|max|sorted|len|round)\(|math\.|_check|guard_"
)
"""Code in a line of a program that reads the value of a size."""
_PLAIN_READS = frozenset(f"aten.{name}.default" for name in ("size", "stride", "numel", "storage_offset"))
"""Operators that C++ code dispatches to read numbers from a tensor."""
_MODULE_FILES = re.compile(r"(^|/)nn/(modules/\w+|functional)\.py$")
"""Files of torch whose lines Dynamo attributes to the user."""
_PLAIN_CALLS = frozenset(("getattr", "getitem", "size", "shape"))
_STANDARD_LIBRARY = str(Path(os.__file__).resolve().parent) + os.sep
_INTERACTIVE_FILES = ("<doctest", "<stdin>", "<ipython")
_STACK_LINE = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(?:\n\s+(?P<code>[^\n]+))?'
)


@dataclass(frozen=True)
class Location:
    """A line of a program."""

    file: str
    line: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


@dataclass(frozen=True)
class Reason:
    """Why an environment made a decision.

    Attributes:
        condition: what was taken to be true, in the environment's symbols.
        kind: ``"guard"`` (checked before the graph is used), ``"assertion"`` (checked while it runs), or
            ``"declared"`` (promised by the user: a contract, or ``torch._check`` on a range).
        operator: the innermost operator being dispatched, such as ``aten.mm.default``;
            ``None`` if there was none.
        called: the outermost operator, if it is another one: what the user's line called.
        where: the user's line, if found.
        stack: the user's lines above it, outermost first.
        framework: the line of torch that asked.
        refuses: whether eager raises an error if the condition does not hold.
    """

    condition: sympy.Basic
    kind: str
    operator: str | None
    called: str | None
    where: Location | None
    stack: tuple[Location, ...]
    framework: Location | None
    refuses: bool = False

    @property
    def is_of_program(self) -> bool:
        """Whether the user's line itself may have asked: it compares or converts something,
        or cannot be read."""
        return self.where is None or not self.where.code or _READS_VALUE.search(self.where.code) is not None

    @property
    def is_read_in_cpp(self) -> bool:
        """Whether C++ code of torch that does not support symbolic numbers read a number from a tensor.

        It dispatches the read, or (since 2.14) reads the symbolic number on a line that does not look at it.
        """
        if self.operator is not None:
            return self.operator in _PLAIN_READS
        location = self.framework or self.where
        return not self.is_of_program and location is not None and _READS_VALUE.search(location.code) is None

    @property
    def asked_by(self) -> str:
        """The operator, or where in the program the question was asked without one."""
        if self.operator is None:
            return "the program itself" if self.is_of_program else "a function that the line calls"
        if self.called is None or self.operator.startswith(
            "prims."
        ):  # called by torch's kernels among themselves
            return self.called or self.operator
        return f"{self.operator} (in {self.called})"


def record(shape_env: Any, reason: Reason) -> None:
    """Add a reason to its environment."""
    shape_env.__dict__.setdefault("_fake_reasons", []).append(reason)


def reasons_of(shape_env: Any) -> list[Reason]:
    """Return the reasons recorded on an environment, in order; for torch's own, what its guards remember.

    Guards that Dynamo made in an environment of torch's know a line. If a graph was given to
    :func:`record_graph_calls`, its calls at that line determine the operator.
    """
    recorded = shape_env.__dict__.get("_fake_reasons", [])
    known = {reason.condition for reason in recorded}
    calls = shape_env.__dict__.get("_fake_calls", {})
    of_guards = [_reason_of_guard(guard, calls) for guard in shape_env.guards if guard.expr not in known]
    return [*of_guards, *recorded]


def record_graph_calls(shape_env: Any, graph: torch.fx.Graph) -> None:
    """Record which calls Dynamo's graph makes at which lines, for guards that do not know their operator."""
    calls: _Calls = {}
    for node in graph.nodes:
        stack = tuple(_parse_stack(node.meta.get("stack_trace") or ""))
        if node.op in ("call_function", "call_method"):
            name = node.target if isinstance(node.target, str) else _name_of(node.target)
            calls.setdefault(_location_key(stack[-1]) if stack else _NO_LOCATION, []).append(
                (name, stack, _original_symbols(node))
            )
    shape_env.__dict__["_fake_calls"] = calls


_Call = tuple[str, tuple["Location", ...], frozenset[sympy.Basic]]
_Calls = dict[tuple[str, int, str], list[_Call]]
"""Calls by location: names, with their stacks and the symbols of their arguments."""


_NO_LOCATION = ("", 0, "")
"""The key for calls of a graph without a line (those of torch's own modules may have none)."""


def _location_key(location: Location) -> tuple[str, int, str]:
    """Return a line without its directory, of which a guard keeps only a part."""
    return Path(location.file).name, location.line, location.function


def _original_symbols(node: torch.fx.Node) -> frozenset[sympy.Basic]:
    """Return the original symbols of a call's arguments, before any of them was replaced."""
    found: set[sympy.Basic] = set()
    for argument in node.all_input_nodes:
        value = argument.meta.get("example_value")
        for number in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(number, torch.SymInt | torch.SymFloat):
                found |= number.node._expr.free_symbols
    return frozenset(found)


def _name_of(target: Any) -> str:
    return str(target) if isinstance(target, _t.OpOverload) else getattr(target, "__name__", str(target))


def reason_now(condition: sympy.Basic, kind: str) -> Reason:
    """Return the reason for a decision that is being made in the current call."""
    frame: FrameType | None = sys._getframe(1)
    operators: list[str] = []
    framework: Location | None = None
    user: list[Location] = []
    called_by_graph: str | None = None
    refuses = False
    while frame is not None:
        file = frame.f_code.co_filename
        called_by_graph = called_by_graph or _graph_call_name(frame)
        refuses = refuses or file.startswith(_CHECKS)
        if _is_user_file(file):
            user.append(_location(frame))
        else:
            if framework is None and _is_informative(file):
                framework = _location(frame)
            if not user:
                _add_operator(frame, operators)
        frame = frame.f_back
    stack = _traced_user_stack() or tuple(reversed(user))
    if not operators and called_by_graph is not None:
        operators.append(
            called_by_graph
        )  # one that C++ composes of others, and that asked before calling them
    return Reason(
        condition,
        kind,
        operator=operators[0] if operators else None,
        called=operators[-1] if len(operators) > 1 and operators[-1] != operators[0] else None,
        where=_innermost_user_location(stack),
        stack=stack,
        framework=framework,
        refuses=refuses,
    )


def _add_operator(frame: FrameType, operators: list[str]) -> None:
    """Add the operator that a frame dispatches: in torch's and our dispatch functions,
    a local named ``func``."""
    func = frame.f_locals.get("func") if "func" in frame.f_code.co_varnames else None
    if isinstance(func, _t.OpOverload) and func.namespace != "prim":
        name = str(func)
        if not operators or operators[-1] != name:
            operators.append(name)


def _graph_call_name(frame: FrameType) -> str | None:
    """Return the name of a call on tensors that Dynamo runs to determine its result, or None."""
    if frame.f_code.co_name != "run_node" or not frame.f_code.co_filename.startswith(_INTERPRETERS):
        return None
    node = frame.f_locals.get("node")
    if not isinstance(node, torch.fx.Node) or not any(
        isinstance(argument.meta.get("example_value"), torch.Tensor) for argument in node.all_input_nodes
    ):
        return None
    return node.target if isinstance(node.target, str) else _name_of(node.target)


def _is_user_file(file: str) -> bool:
    if file.startswith("<"):
        return file.startswith(_INTERACTIVE_FILES)
    if file.startswith(_STANDARD_LIBRARY) and "-packages" not in file:
        return False
    return not file.startswith(_FRAMEWORK)


def _is_informative(file: str) -> bool:
    """Return whether a line of the framework is informative: not the guard machinery itself."""
    return file.startswith(_t.torch_directory) and not file.endswith(
        ("symbolic_shapes.py", "sym_node.py", "recording.py", os.path.join("torch", "__init__.py"))
    )


def _location(frame: FrameType) -> Location:
    code = frame.f_code
    return Location(
        code.co_filename,
        frame.f_lineno,
        code.co_name,
        linecache.getline(code.co_filename, frame.f_lineno).strip(),
    )


def _traced_user_stack() -> tuple[Location, ...]:
    """Return the user's lines according to the interpreter of the program: Dynamo,
    or the replay of its graph."""
    interpreted = _t.user_stack()
    if interpreted:
        return tuple(Location(f.filename, f.lineno or 0, f.name, (f.line or "").strip()) for f in interpreted)
    replayed = _t.current_node_stack()
    return tuple(_parse_stack(replayed)) if replayed else ()


def _parse_stack(text: str) -> Iterator[Location]:
    for found in _STACK_LINE.finditer(text):
        yield Location(found["file"], int(found["line"]), found["function"], found["code"] or "")


def _innermost_user_location(stack: tuple[Location, ...]) -> Location | None:
    """Return the last line that is not torch's own (Dynamo's stack extends into ``torch.nn``)."""
    users = [location for location in stack if _is_user_file(location.file)]
    return users[-1] if users else stack[-1] if stack else None


def _reason_of_guard(guard: Any, calls: _Calls) -> Reason:
    """Return what torch remembers of a guard: no operator, but the user's line,
    and often the function that asked."""
    where = next(_parse_location(guard.sloc.maybe_user_loc), None)
    framework = guard.sloc.framework_loc
    framework_location = (
        Location(framework.filename, framework.lineno or 0, framework.name, (framework.line or "").strip())
        if hasattr(framework, "filename")
        else None
    )
    operator = None
    # If Dynamo or the environment itself asks, the program asked, not an operator.
    if (
        framework_location is not None
        and not _is_user_file(framework_location.file)
        and not framework_location.file.startswith(_INTERPRETERS)
    ):
        operator = (
            "an operator of the graph"
            if framework_location.file.startswith(_OWN_DIRECTORIES)
            else framework_location.function
        )
    if where is None and framework_location is not None and _is_user_file(framework_location.file):
        where = framework_location
    stack: tuple[Location, ...] = (where,) if where else ()
    if operator == "_check_guards":
        operator = "an earlier compilation, whose result AOTAutograd's cache gave"
    elif where is None and operator is not None and _LAYOUT_FUNCTIONS.search(operator):
        operator = "an operator that looks at how a tensor lies in memory"
    elif where is None and operator in _USER_NAMES:
        operator, stack = _only_call(_USER_NAMES[operator], calls)
        where = _innermost_user_location(stack)
    elif where is not None and (operator is not None or _MODULE_FILES.search(where.file)):
        found = _call_at(where, operator or "", calls, guard.expr.free_symbols)
        operator, stack = found or (operator, stack)
        where = _innermost_user_location(stack)
    return Reason(guard.expr, "guard", operator, None, where, stack, framework_location)


def _call_at(
    where: Location, function: str, calls: _Calls, symbols: set[sympy.Basic]
) -> tuple[str, tuple[Location, ...]] | None:
    """Return the graph's call that a line makes, and the user's lines that lead there.

    Args:
        where: a line of the user's program, or of a torch module, which graphs omit from their stacks.
        function: the function of torch that asked, which may distinguish calls on one line.
        symbols: what it asked about. If calls at several lines match (a module called again, for example),
            the first one that takes one of these is chosen: later ones ask what is known by then.
    """
    found = calls.get(_location_key(where))
    if found is None:
        found = [
            call
            for made in calls.values()
            for call in made
            if re.search(rf"\b{call[0]}\(", where.code) is not None
        ]
        first = next((call for call in found if not call[2].isdisjoint(symbols)), None)
        found = found if first is None else [first]
    words = _USER_NAMES.get(function) or [word for word in function.split("_") if len(word) > 2]
    related = [call for call in found if any(word in call[0] or call[0] in word for word in words)] or found
    names = dict.fromkeys(name for name, _, _ in related if name not in _PLAIN_CALLS)
    lines = {stack for _, stack, _ in related}
    if not names:
        return None
    return " or ".join(names), (lines.pop() if len(lines) == 1 else ()) or (where,)


def _only_call(names: list[str], calls: _Calls) -> tuple[str, tuple[Location, ...]]:
    """Return a graph's only call with one of these names, and its lines; if there are several,
    just the names."""
    found = [(name, stack) for made in calls.values() for name, stack, _ in made if name in names]
    if len({stack for _, stack in found}) == 1 and found[0][1]:
        return found[0]
    return " or ".join(dict.fromkeys(name for name, _ in found) or names[:2]), ()


_SHORT_LOCATION = re.compile(r"(?P<code>.*?)\s*#\s*(?P<file>\S+):(?P<line>\d+) in (?P<function>\S+)")


def _parse_location(text: str | None) -> Iterator[Location]:
    """Parse torch's short form of a line: ``code  # path/file.py:12 in function``."""
    found = _SHORT_LOCATION.match(text or "")
    if found:
        yield Location(found["file"], int(found["line"]), found["function"], found["code"])
