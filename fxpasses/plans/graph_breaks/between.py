"""Functions that run in Python between the graphs of a call and have graphs, and plans, of their own.

After a graph break, Dynamo's code for a frame continues in Python. The functions that it calls (the loss of a
model, or the layers of one whose loop Dynamo cannot trace) are compiled when their frames are evaluated.
While a plan is recorded, such a frame runs the code of a :class:`Stub` instead of its own: it has the same
parameters and passes them to a compiled copy of the function. A plan names these functions. Where it runs,
torch's C++ code lets their frames enter the same stubs, without Dynamo.
"""

from __future__ import annotations

import gc
import inspect
import operator
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from fxpasses.plans.errors import NoPlan
from fxpasses.plans.graph_breaks._torch_frames import (
    cache_entries_only_hook,
    install_replacement,
    set_hook,
    skipped_by_dynamo,
)
from fxpasses.plans.graph_breaks.resumed import Cells, ResumeFunction

FunctionName = Sequence[Any]
"""The name of a module, the path from it to a function, and how many wrappers of the function to unwrap."""
_CELL_REFERENCES = 4
"""The reference count of a cell that only its frame knows: the frame, the passed tuple, two names here."""
_MAX_CLOSURES = 32
"""The most closures of a function that are compiled, each on its own. Others run in Python."""


class Planned(Protocol):
    """A function that looks for plans, as :func:`fxpasses.compile` returns it."""

    functions_between: Functions
    has_no_graph: bool

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any: ...
    def by_dynamo(self, *args: Any, **kwargs: Any) -> Any: ...


class _Running(threading.local):
    functions: Functions | None = None
    make_context: Callable[[], AbstractContextManager[Any]] = nullcontext


_running = _Running()


class Stub:
    """A function between graphs, with the code that its frames run instead of their own.

    Attributes:
        code: its own code.
        stub_code: what its frames run.
        module: the name of a module whose globals it was called with.
        is_named: whether a name leads to the function, once that was looked up.
        name: the name that was found last.
    """

    def __init__(self, code: types.CodeType, stub_code: types.CodeType) -> None:
        self.code = code
        self.stub_code = stub_code.replace(
            co_consts=tuple(self._enter if value == _ENTER else value for value in stub_code.co_consts)
        )
        self.module = ""
        self.is_named: bool | None = None
        self.name: FunctionName | None = None
        self._copy = code.replace()
        _copies.add(id(self._copy))

    def function(self, values: dict[str, Any], cells: Cells) -> types.FunctionType:
        """The function with a copy of its code, whose frames do not enter the stub and for which Dynamo has
        compiled nothing.

        Args: its globals, and the cells of its closure.
        """
        return types.FunctionType(self.code.replace(), values, self.code.co_name, None, cells)

    def _enter(self, cells: Cells | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hook = set_hook(None)
        try:
            values, functions = sys._getframe(1).f_globals, _running.functions
            call = None if functions is None else functions.compiled_function(self, values, cells or ())
            if call is not None:
                with _running.make_context():
                    return call(*args, **kwargs)
            function = types.FunctionType(self._copy, values, self.code.co_name, None, cells)
            set_hook(hook)
            return function(*args, **kwargs)
        finally:
            set_hook(hook)


skipped_by_dynamo(Stub._enter)
_ENTER = "<enter>"
_stubs: dict[int, Stub] = {}
_copies: set[int] = set()
"""Codes of these copies, which have no stubs."""


def stub_of(code: types.CodeType) -> Stub | None:
    """The stub of a code, always the same one. None if there can be none. The stub keeps the code alive."""
    stub = _stubs.get(id(code))
    if stub is None and id(code) not in _copies and (stub_code := _stub_code(code)) is not None:
        stub = _stubs[id(code)] = Stub(code, stub_code)
    return stub


def _stub_code(code: types.CodeType) -> types.CodeType | None:
    """Code that passes on its arguments, with the same parameters, local variables and cells as ``code``,
    since frames store them in the same order."""
    flags, names = code.co_flags, code.co_varnames
    plain = inspect.CO_OPTIMIZED | inspect.CO_NEWLOCALS
    lasting = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    if flags & plain != plain or flags & lasting:
        return None
    if not all(name.isidentifier() for name in (code.co_name, *names, *code.co_cellvars, *code.co_freevars)):
        return None
    count, named = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    positional, by_name, others = names[:count], names[count:named], list(names[named:])
    rest = f"*{others.pop(0)}" if flags & inspect.CO_VARARGS else ""
    keywords = f"**{others.pop(0)}" if flags & inspect.CO_VARKEYWORDS else ""
    first = code.co_posonlyargcount
    parameters = [*positional[:first], *(["/"] if first else []), *positional[first:]]
    parameters += [rest or "*"] if rest or by_name else []
    parameters += [*by_name, *([keywords] if keywords else [])]
    given = "".join(f"{value}, " for value in (*positional, *([rest] if rest else [])))
    items = "".join(f"{name!r}: {name}, " for name in by_name)
    cells = f"(lambda: ({', '.join(code.co_freevars)},)).__closure__" if code.co_freevars else "None"
    # The lines after the return never run. They give the code the same locals and cells.
    lines = [
        "def make():",
        *(f"    {name} = None" for name in code.co_freevars),
        f"    def {code.co_name}({', '.join(parameters)}):",
        f"        return {_ENTER!r}({cells}, ({given}), {{{items}{keywords}}})",
        *(f"        {name} = None" for name in dict.fromkeys((*others, *code.co_cellvars))),
        f"        lambda: ({''.join(f'{name}, ' for name in code.co_cellvars)})",
        f"    return {code.co_name}",
    ]
    made: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # from calling a string literal
        try:
            exec(compile("\n".join(lines), code.co_filename, "exec", dont_inherit=True), made)
        except SyntaxError:  # for example, a parameter with the name of the function
            return None
    stub_code: types.CodeType = made["make"]().__code__
    return (
        stub_code if all(getattr(stub_code, fact) == getattr(code, fact) for fact in _FRAME_LAYOUT) else None
    )


_FRAME_LAYOUT = (
    "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_varnames", "co_cellvars", "co_freevars",
)  # fmt: skip


def without_hook(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its frames, and those of what it calls, enter no stubs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        hook = set_hook(None)
        try:
            return call(*args, **kwargs)
        finally:
            set_hook(hook)

    return run


class ResumeWithCells:
    """Makes a resume function whose variables are shared with inner functions. Their cells differ in each
    call.

    If only the frame has its cells, the function behaves the same with cells of its own, and their contents
    are ordinary arguments. If something else has them, such as a function that the frame has made before,
    Dynamo compiles it as it does without plans.

    Args:
        resumed: the function.
        compile_function: turns a function into one that looks for plans.
        make_context: makes the context of each call.
    """

    def __init__(
        self,
        resumed: ResumeFunction,
        compile_function: Callable[[Callable[..., Any]], Planned],
        make_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._resumed, self._compile_function, self._make_context = resumed, compile_function, make_context
        self._known: tuple[tuple[str, ...], Cells, Planned] | None = None
        self._lasting = [name in resumed.closure for name in resumed.code.co_freevars]

    @property
    def has_no_graph(self) -> bool:
        """Whether it was called and nothing was compiled."""
        return self._known is not None and self._known[-1].has_no_graph

    @property
    def functions_between(self) -> Functions:
        """The functions that run in Python between its graphs. It must have been called."""
        assert self._known is not None
        return self._known[-1].functions_between

    def __call__(self, cells: Cells) -> Callable[..., Any]:
        """Make the function for the cells of a running frame."""

        def resume(*args: Any) -> Any:
            hook = set_hook(None)
            try:
                call, given = self._call_for(cells)
                with self._make_context():
                    return call(*args, *given)
            finally:
                set_hook(hook)

        return skipped_by_dynamo(resume)

    def _call_for(self, cells: Cells) -> tuple[Callable[..., Any], list[Any]]:
        names, given, lasting = [], [], []
        counts = [sys.getrefcount(cell) for cell in cells]
        are_shared = any(
            n > _CELL_REFERENCES and not lasts for n, lasts in zip(counts, self._lasting, strict=True)
        )
        for name, lasts, cell in zip(self._resumed.code.co_freevars, self._lasting, cells, strict=True):
            if lasts:
                lasting.append(cell)
                continue
            try:
                given.append(cell.cell_contents)
                names.append(name)
            except ValueError:
                pass  # the variable is not set yet
        filled, closure = tuple(names), tuple(lasting)
        if self._known is None and not are_shared:
            if filled not in self._resumed.filled:
                from fxpasses.plans.graph_breaks._torch_cells import with_parameters  # imports Dynamo

                self._resumed.filled[filled] = with_parameters(
                    self._resumed.code, filled, self._resumed.closure
                )
            function = self._resumed.function(closure, self._resumed.filled[filled])
            self._known = filled, closure, self._compile_function(function)
        if are_shared or self._known is None or self._known[:2] != (filled, closure):
            return self._compile_function(self._resumed.function(cells)).by_dynamo, []
        return self._known[-1], given


class Functions:
    """The functions between the graphs of one compiled object.

    Args:
        compile_function: turns a function into one that looks for plans.
    """

    def __init__(self, compile_function: Callable[[Callable[..., Any]], Planned]) -> None:
        self.compile_function = compile_function
        self._resumed: dict[str, Planned | ResumeWithCells] = {}
        self._loaded: dict[tuple[str, str], Planned | ResumeWithCells] = {}
        self._known: dict[Stub, list[tuple[dict[str, Any], Cells, Planned | None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    @contextmanager
    def run(self, make_context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Iterator[None]:
        """Within, frames of this thread that enter stubs call these functions.

        Args:
            make_context: makes the context of each call.
        """
        before = _running.functions, _running.make_context
        _running.functions, _running.make_context = self, make_context
        try:
            yield
        finally:
            _running.functions, _running.make_context = before

    def loaded(self, frame: str, name: str, resumed: ResumeFunction) -> Planned | ResumeWithCells:
        """The function that a frame loaded from a plan resumes with. If the plan is loaded again, it is the
        same one, which keeps its compiled code.

        Args:
            frame: a digest of its code.
            name: of the function, there.
            resumed: the function.
        """
        if (frame, name) not in self._loaded:
            has_cells = bool(resumed.code.co_freevars)
            self._loaded[frame, name] = (
                ResumeWithCells(resumed, self.compile_function)
                if has_cells
                else self.compile_function(resumed.function())
            )
        return self._loaded[frame, name]

    def call(
        self,
        stubs: Sequence[Stub],
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a function without Dynamo. Frames of these functions that it calls enter their stubs.

        Each frame that runs under the hook may cost 30 microseconds, so no frame of this module does.

        Args:
            stubs: of functions that it calls.
            function: what is called.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Returns:
            What it returns.

        Raises:
            Exception: what it raises.
        """
        for stub in stubs:
            install_replacement(stub.code, stub.stub_code)
        with self.run():
            hook = set_hook(cache_entries_only_hook())
            try:
                return function(*args, **kwargs)
            finally:
                set_hook(hook)

    def compiled_function(
        self, stub: Stub, values: dict[str, Any], cells: Cells
    ) -> Callable[..., Any] | None:
        """What to call instead of a function, or None if it has no graphs.

        Args:
            stub: of its code.
            values: its globals.
            cells: of its closure.
        """
        if stub.is_named is None:
            stub.module = str(values.get("__name__", ""))
            stub.is_named = _name_of(stub) is not None
        if not stub.is_named:
            return None  # no plan can name it: Dynamo compiles it once, not for each closure
        known = self._known.setdefault(stub, [])
        for of_globals, of_closure, compiled in known:
            if of_globals is values and all(map(operator.is_, of_closure, cells)):
                return compiled
        if len(known) >= _MAX_CLOSURES:
            return None
        compiled = self.compile_function(stub.function(values, cells))
        known.append((values, cells, compiled))
        return compiled

    def resume(self, name: str, resumed: ResumeFunction) -> Callable[[], Callable[..., Any] | None]:
        """A function that returns what frames of the model resume with, or None once the model is gone.
        Globals of a module may hold it.

        Args:
            name: of the function, among these globals.
            resumed: the function.
        """

        def make_context() -> AbstractContextManager[Any]:
            return _running.make_context()

        has_cells = bool(resumed.code.co_freevars)
        compiled = (
            ResumeWithCells(resumed, self.compile_function, make_context)
            if has_cells
            else self.compile_function(resumed.function())
        )
        self._resumed[name] = compiled
        known = weakref.ref(compiled)

        def get_call() -> Callable[..., Any] | None:
            call = known()
            if call is None or has_cells:
                return call

            def run(*args: Any, **kwargs: Any) -> Any:
                with make_context():
                    return call(*args, **kwargs)

            return run

        return get_call

    def adopt_resumed(self) -> bool:
        """Whether no resume function of the model's frames has graphs.

        If so, the functions that they call belong to the model from now on.
        """
        for compiled in self._resumed.values():
            if not compiled.has_no_graph or not compiled.functions_between.adopt_resumed():
                return False
            for stub, known in compiled.functions_between._known.items():
                self._known.setdefault(stub, []).extend(known)
        return True

    def stubs(self) -> list[Stub]:
        """The functions that have graphs. The others run in Python, and their callers adopt their calls."""
        for known in list(self._known.values()):
            for i, (values, cells, compiled) in enumerate(known):
                if compiled is not None and compiled.has_no_graph:
                    known[i] = values, cells, None
                    for inner, of in compiled.functions_between._known.items():
                        self._known.setdefault(inner, []).extend(of)
                    return self.stubs()
        return [stub for stub, known in self._known.items() if any(p is not None for _, _, p in known)]


def names_of(stubs: Sequence[Stub]) -> list[FunctionName]:
    """Names that lead to these functions in another process.

    Raises:
        NoPlan: one has none.
    """
    names = []
    for stub in stubs:
        name = _name_of(stub)
        if name is None:
            raise NoPlan("a function between graph breaks that no name leads to", stub.code.co_qualname)
        names.append(name)
    return names


def _name_of(stub: Stub) -> FunctionName | None:
    code = stub.code
    if stub.name is None or _resolve_code(stub.name) is not code:
        stub.name = _find_name(code, stub.module, code.co_qualname) or _name_of_wrapper(code)
    return stub.name


def _name_of_wrapper(code: types.CodeType) -> FunctionName | None:
    """A name that leads to a function with this code under the module and name of what it wraps."""
    functions = (one for one in gc.get_referrers(code) if isinstance(one, types.FunctionType))
    found = (_find_name(code, one.__module__, one.__qualname__) for one in functions if one.__code__ is code)
    return next(filter(None, found), None)


def _find_name(code: types.CodeType, module: str | None, path: str) -> FunctionName | None:
    names = ((module, path, depth) for depth in range(_MAX_WRAPPERS))
    return next((name for name in names if _resolve_code(name) is code), None)


def find_stubs(names: Sequence[FunctionName]) -> list[Stub] | None:
    """The stubs of the functions with these names, or None if a name leads to none."""
    codes = [_resolve_code(name) for name in names]
    stubs = [stub_of(code) for code in codes if code is not None]
    known = [stub for stub in stubs if stub is not None]
    return known if len(known) == len(names) else None


_MAX_WRAPPERS = 8
"""The most decorators around a function that are unwrapped."""


def _resolve_code(name: FunctionName) -> types.CodeType | None:
    module, path, depth = name
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, "__dict__", {}).get(part)
    for _ in range(depth):
        value = getattr(_unwrapped_function(value), "__wrapped__", None)
    return getattr(_unwrapped_function(value), "__code__", None)


def _unwrapped_function(value: Any) -> Any:
    value = value.fget if isinstance(value, property) else value
    return getattr(value, "__func__", value)
