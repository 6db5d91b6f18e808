"""Functions that run in Python between the graphs of a call, and have graphs of their own: each looks for plans as the model does.

At a graph break the code that Dynamo wrote for a frame goes on in Python. What it calls there (the loss of a model, the layers of one whose loop Dynamo
cannot trace) is compiled when its frame is evaluated. While a plan is recorded, such a frame runs :class:`Stub` code in place of its own: it has
the same parameters, and hands them to a compiled copy of the function. A plan names these functions; where it runs, torch's C++ code lets their frames enter
the same stubs, without Dynamo.
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

from fxpasses.plans._torch_frames import entries_only, let_enter, never_traced, set_hook
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.resumed import Cells, Resumed

Name = Sequence[Any]
"""The name of a module, the names that lead from it to a function, and how many functions that wrap it are to be unwrapped."""
_OWNERS = 4
"""How many references a cell has that only the frame knows which made it: of the frame, of the tuple that is handed on, and of two names here."""
_CLOSURES = 32
"""The most closures of a function that are compiled, each on its own; others run in Python."""


class Planned(Protocol):
    """A function that looks for plans: what :func:`fxpasses.compile` makes of it."""

    functions_between: Functions
    has_no_graph: bool

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any: ...
    def by_dynamo(self, *args: Any, **kwargs: Any) -> Any: ...


class _Running(threading.local):
    functions: Functions | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


_running = _Running()


class Stub:
    """A function between graphs: the code that its frames run in place of their own.

    Attributes:
        code: its own.
        instead: what its frames run.
        module: the name of one whose globals it was called with.
        is_named: whether a name leads to the function, once that was asked.
        name: the one that was found last.
    """

    def __init__(self, code: types.CodeType, instead: types.CodeType) -> None:
        self.code = code
        self.instead = instead.replace(
            co_consts=tuple(self._enter if value == _ENTER else value for value in instead.co_consts)
        )
        self.module = ""
        self.is_named: bool | None = None
        self.name: Name | None = None
        self._copy = code.replace()
        _copies.add(id(self._copy))

    def function(self, values: dict[str, Any], cells: Cells) -> types.FunctionType:
        """The function with a code of its own, whose frames do not enter, and for which Dynamo has compiled nothing yet.

        Args: its globals, and the cells of its closure.
        """
        return types.FunctionType(self.code.replace(), values, self.code.co_name, None, cells)

    def _enter(self, cells: Cells | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hook = set_hook(None)
        try:
            values, functions = sys._getframe(1).f_globals, _running.functions
            call = None if functions is None else functions.call_of(self, values, cells or ())
            if call is not None:
                with _running.around():
                    return call(*args, **kwargs)
            function = types.FunctionType(self._copy, values, self.code.co_name, None, cells)
            set_hook(hook)
            return function(*args, **kwargs)
        finally:
            set_hook(hook)


never_traced(Stub._enter)
_ENTER = "<enter>"
_stubs: dict[int, Stub] = {}
_copies: set[int] = set()
"""Codes of these, which have no stubs."""


def stub_of(code: types.CodeType) -> Stub | None:
    """The stub of a code, which is always the same; None where there can be none. It keeps the code."""
    stub = _stubs.get(id(code))
    if stub is None and id(code) not in _copies and (instead := _code_instead(code)) is not None:
        stub = _stubs[id(code)] = Stub(code, instead)
    return stub


def _code_instead(code: types.CodeType) -> types.CodeType | None:
    """Code with the parameters, local variables and cells of another (frames have places for them in the same order), which hands on what it is given."""
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
    # After the return stands what never runs: it makes the same locals, and cells of the same.
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
        warnings.simplefilter("ignore", SyntaxWarning)  # of a string that is called
        try:
            exec(compile("\n".join(lines), code.co_filename, "exec", dont_inherit=True), made)
        except SyntaxError:  # a parameter that has the name of the function, say
            return None
    instead: types.CodeType = made["make"]().__code__
    return instead if all(getattr(instead, fact) == getattr(code, fact) for fact in _SAME) else None


_SAME = (
    "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_varnames", "co_cellvars", "co_freevars",
)  # fmt: skip


def without_hook(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose own frames, and those of what it calls, enter nothing."""

    def run(*args: Any, **kwargs: Any) -> Any:
        hook = set_hook(None)
        try:
            return call(*args, **kwargs)
        finally:
            set_hook(hook)

    return run


class WithCells:
    """Makes the function with which a frame goes on whose variables are shared with functions inside it: their cells are others in each call.

    Where nobody but the frame has its cells, what the function does is the same with cells of its own, and their contents are arguments as others are.
    Where somebody has (a function that the frame has made before), Dynamo compiles it as it does without plans.

    Args:
        resumed: the function.
        planned: makes of a function one that looks for plans.
        around: makes the context of each call.
    """

    def __init__(
        self,
        resumed: Resumed,
        planned: Callable[[Callable[..., Any]], Planned],
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._resumed, self._planned, self._around = resumed, planned, around
        self._known: tuple[tuple[str, ...], Cells, Planned] | None = None
        self._lasting = [name in resumed.closure for name in resumed.code.co_freevars]

    @property
    def has_no_graph(self) -> bool:
        """Whether it was called, and nothing was compiled."""
        return self._known is not None and self._known[-1].has_no_graph

    @property
    def functions_between(self) -> Functions:
        """The functions that run in Python between its graphs. Only of one that was called."""
        assert self._known is not None
        return self._known[-1].functions_between

    def __call__(self, cells: Cells) -> Callable[..., Any]:
        """The function. Args: the cells of a frame that is running."""

        def resume(*args: Any) -> Any:
            hook = set_hook(None)
            try:
                call, given = self._call_for(cells)
                with self._around():
                    return call(*args, *given)
            finally:
                set_hook(hook)

        return never_traced(resume)

    def _call_for(self, cells: Cells) -> tuple[Callable[..., Any], list[Any]]:
        names, given, lasting = [], [], []
        counts = [sys.getrefcount(cell) for cell in cells]
        are_known = any(n > _OWNERS and not lasts for n, lasts in zip(counts, self._lasting, strict=True))
        for name, lasts, cell in zip(self._resumed.code.co_freevars, self._lasting, cells, strict=True):
            if lasts:
                lasting.append(cell)
                continue
            try:
                given.append(cell.cell_contents)
                names.append(name)
            except ValueError:
                pass  # the variable has no value yet
        filled, closure = tuple(names), tuple(lasting)
        if self._known is None and not are_known:
            if filled not in self._resumed.filled:
                from fxpasses.plans._torch_cells import with_parameters  # imports Dynamo

                self._resumed.filled[filled] = with_parameters(
                    self._resumed.code, filled, self._resumed.closure
                )
            function = self._resumed.function(closure, self._resumed.filled[filled])
            self._known = filled, closure, self._planned(function)
        if are_known or self._known is None or self._known[:2] != (filled, closure):
            return self._planned(self._resumed.function(cells)).by_dynamo, []
        return self._known[-1], given


class Functions:
    """The functions between the graphs of one compiled object.

    Args:
        planned: makes of a function one that looks for plans.
    """

    def __init__(self, planned: Callable[[Callable[..., Any]], Planned]) -> None:
        self.planned = planned
        self._resumed: dict[str, Planned | WithCells] = {}
        self._loaded: dict[tuple[str, str], Planned | WithCells] = {}
        self._known: dict[Stub, list[tuple[dict[str, Any], Cells, Planned | None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    @contextmanager
    def run(self, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Iterator[None]:
        """Within, frames of this thread that enter stubs call these functions.

        Args:
            around: makes the context of each call.
        """
        before = _running.functions, _running.around
        _running.functions, _running.around = self, around
        try:
            yield
        finally:
            _running.functions, _running.around = before

    def loaded(self, frame: str, name: str, goes_on: Resumed) -> Planned | WithCells:
        """What a frame goes on with that was loaded from a plan: the same where the plan is loaded again, which keeps what it was compiled to.

        Args:
            frame: a digest of its code.
            name: of the function, there.
            goes_on: the function.
        """
        if (frame, name) not in self._loaded:
            has_cells = bool(goes_on.code.co_freevars)
            self._loaded[frame, name] = (
                WithCells(goes_on, self.planned) if has_cells else self.planned(goes_on.function())
            )
        return self._loaded[frame, name]

    def call(
        self,
        stubs: Sequence[Stub],
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a function without Dynamo; in it, frames of these functions enter their stubs.

        Each frame that runs under the hook may cost 30 microseconds, so none is from here.

        Args:
            stubs: of functions that it calls.
            function: what is called.
            args: its arguments.
            kwargs: those given by name.

        Returns: what it returns.

        Raises:
            Exception: what it raises.
        """
        for stub in stubs:
            let_enter(stub.code, stub.instead)
        with self.run():
            hook = set_hook(entries_only())
            try:
                return function(*args, **kwargs)
            finally:
                set_hook(hook)

    def call_of(self, stub: Stub, values: dict[str, Any], cells: Cells) -> Callable[..., Any] | None:
        """What is called in place of a function, or None where it has no graphs.

        Args:
            stub: of its code.
            values: its globals.
            cells: of its closure.
        """
        if stub.is_named is None:
            stub.module = str(values.get("__name__", ""))
            stub.is_named = _name_of(stub) is not None
        if not stub.is_named:
            return None  # no plan can say which it is: it is left to Dynamo, which compiles it once, and not for each closure
        known = self._known.setdefault(stub, [])
        for of_globals, of_closure, planned in known:
            if of_globals is values and all(map(operator.is_, of_closure, cells)):
                return planned
        if len(known) >= _CLOSURES:
            return None
        planned = self.planned(stub.function(values, cells))
        known.append((values, cells, planned))
        return planned

    def resume(self, name: str, resumed: Resumed) -> Callable[[], Callable[..., Any] | None]:
        """What returns the call with which frames of the model go on, or None once the model is gone: globals of a module may hold it.

        Args:
            name: of the function, among these globals.
            resumed: the function.
        """

        def around() -> AbstractContextManager[Any]:
            return _running.around()

        has_cells = bool(resumed.code.co_freevars)
        planned = WithCells(resumed, self.planned, around) if has_cells else self.planned(resumed.function())
        self._resumed[name] = planned
        known = weakref.ref(planned)

        def held() -> Callable[..., Any] | None:
            call = known()
            if call is None or has_cells:
                return call

            def run(*args: Any, **kwargs: Any) -> Any:
                with around():
                    return call(*args, **kwargs)

            return run

        return held

    def take_over_resumed(self) -> bool:
        """Whether what frames of the model go on with has no graphs; what it calls belongs to the model then."""
        for planned in self._resumed.values():
            if not planned.has_no_graph or not planned.functions_between.take_over_resumed():
                return False
            for stub, known in planned.functions_between._known.items():
                self._known.setdefault(stub, []).extend(known)
        return True

    def stubs(self) -> list[Stub]:
        """The functions that have graphs. Those that have none run in Python from now on, and what they call belongs to their callers."""
        for known in list(self._known.values()):
            for i, (values, cells, planned) in enumerate(known):
                if planned is not None and planned.has_no_graph:
                    known[i] = values, cells, None
                    for inner, of in planned.functions_between._known.items():
                        self._known.setdefault(inner, []).extend(of)
                    return self.stubs()
        return [stub for stub, known in self._known.items() if any(p is not None for _, _, p in known)]


def names_of(stubs: Sequence[Stub]) -> list[Name]:
    """Names that lead to these functions, for another process.

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


def _name_of(stub: Stub) -> Name | None:
    code = stub.code
    if stub.name is None or _code_at(stub.name) is not code:
        stub.name = _leads_to(code, stub.module, code.co_qualname) or _name_of_wrapper(code)
    return stub.name


def _name_of_wrapper(code: types.CodeType) -> Name | None:
    """A name that leads to a function of this code which has the module and the name of what it wraps."""
    functions = (one for one in gc.get_referrers(code) if isinstance(one, types.FunctionType))
    found = (_leads_to(code, one.__module__, one.__qualname__) for one in functions if one.__code__ is code)
    return next(filter(None, found), None)


def _leads_to(code: types.CodeType, module: str | None, path: str) -> Name | None:
    names = ((module, path, depth) for depth in range(_WRAPPED))
    return next((name for name in names if _code_at(name) is code), None)


def stubs_named(names: Sequence[Name]) -> list[Stub] | None:
    """The stubs of the functions that have these names here, or None where one leads to none."""
    codes = [_code_at(name) for name in names]
    stubs = [stub_of(code) for code in codes if code is not None]
    known = [stub for stub in stubs if stub is not None]
    return known if len(known) == len(names) else None


_WRAPPED = 8
"""How many decorators around a function are looked behind."""


def _code_at(name: Name) -> types.CodeType | None:
    module, path, depth = name
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, "__dict__", {}).get(part)
    for _ in range(depth):
        value = getattr(_function(value), "__wrapped__", None)
    return getattr(_function(value), "__code__", None)


def _function(value: Any) -> Any:
    value = value.fget if isinstance(value, property) else value
    return getattr(value, "__func__", value)
