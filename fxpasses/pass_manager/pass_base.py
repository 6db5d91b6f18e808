"""The base class of passes: a name, options, a contract, and one method.

>>> from torch import fx
>>> from fxpasses import Pass, graph_pass
>>> @graph_pass(graphs=["inference"], numerics="bitwise")
... def drop_nothing(gm: fx.GraphModule) -> bool:
...     "Leave the graph as it is."
...     return False
>>> isinstance(drop_nothing, Pass), drop_nothing.name, drop_nothing.contract.numerics
(True, 'drop_nothing', 'bitwise')
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Union, get_args

from torch import fx

from fake.error_text import short_repr
from fxpasses.errors import ContractError, OptionsError, did_you_mean
from fxpasses.pass_manager.identity import Identity, identify
from fxpasses.pass_manager.sites import MatchSite

GraphKind = Literal["joint", "forward", "backward", "inference"]
"""``joint``: forward and backward before the partition. ``forward`` and ``backward``: after it.
``inference``: the only graph of a call that needs no gradients."""

Numerics = Literal["bitwise", "tolerance", "none"]
"""Results of the rewritten graph: bitwise equal, equal up to rounding, or intentionally different."""

Metadata = Literal["exact", "types", "outputs"]
"""Metadata that stays the same on nodes that a pass keeps: shape, dtype, device and stride, all of these
except stride, or nothing. The metadata of the graph's outputs stays the same in any case."""

GRAPH_KINDS: tuple[GraphKind, ...] = get_args(GraphKind)


@dataclass(frozen=True)
class Contract:
    """What a pass promises, and the conditions that it relies on. The manager orders and checks passes by it.

    Names in ``requires`` and so on are names of passes, or of properties that passes establish (any word:
    ``"no_dead_code"``). A pass provides its own name.

    Attributes:
        graphs: the kinds of graph that the pass takes; ``"any"`` stands for all of them.
        requires: conditions that must hold before the pass runs.
        provides: conditions that hold after it has run.
        invalidates: conditions that no longer hold after it has run.
        conflicts: passes and properties that must not be in the same pipeline.
        numerics: whether results stay bitwise equal, equal up to rounding, or neither.
        metadata: how much of the metadata of remaining nodes stays unchanged.

    Raises:
        ContractError: if a kind of graph, numerics or metadata does not exist, if there is no graph at all,
            or if a name is not a string.

    >>> Contract("joint", requires="eliminate_dead_code").requires
    frozenset({'eliminate_dead_code'})
    >>> sorted(Contract("any").graphs)
    ['backward', 'forward', 'inference', 'joint']
    """

    graphs: frozenset[GraphKind] | Iterable[str] | str = ("joint", "inference")
    requires: frozenset[str] | Iterable[str] | str = ()
    provides: frozenset[str] | Iterable[str] | str = ()
    invalidates: frozenset[str] | Iterable[str] | str = ()
    conflicts: frozenset[str] | Iterable[str] | str = ()
    numerics: Numerics = "tolerance"
    metadata: Metadata = "types"

    def __post_init__(self) -> None:
        for field in ("graphs", "requires", "provides", "invalidates", "conflicts"):
            value = getattr(self, field)
            words = [value] if isinstance(value, str) else value
            if not isinstance(words, Iterable) or not all(isinstance(word, str) and word for word in words):
                raise ContractError(
                    f"contract: {field} is {short_repr(value)}, not a name or a list of names"
                )
            object.__setattr__(self, field, frozenset(words))
        if not self.graphs:
            raise ContractError(f"contract: graphs is empty; choose from {', '.join((*GRAPH_KINDS, 'any'))}")
        if "any" in self.graphs:
            object.__setattr__(self, "graphs", frozenset(GRAPH_KINDS))
        for field, given, valid in (
            ("graphs", sorted(self.graphs), (*GRAPH_KINDS, "any")),
            ("numerics", [self.numerics], get_args(Numerics)),
            ("metadata", [self.metadata], get_args(Metadata)),
        ):
            for word in given:
                if not isinstance(word, str) or word not in valid:
                    choices = f"choose from {', '.join(valid)}{did_you_mean(word, valid)}"
                    raise ContractError(f"unknown {field} {short_repr(word)}; {choices}")


@dataclass(frozen=True)
class Pass(abc.ABC):
    """A rewrite of a graph. Subclasses are frozen dataclasses, and their fields are the pass's options.

    The docstring of a pass shows a graph before and after. ``apply`` changes the graph in place and returns
    whether it changed anything. The rewritten graph must compute the same outputs and gradients, with the
    same aliasing between inputs and outputs.

    A subclass has a ``name`` and a ``contract``. If the contract only says which graphs it takes, the
    subclass may have ``graphs`` instead.

    Raises:
        ContractError: if the contract of a subclass is something else.
    """

    name: ClassVar[str]
    contract: ClassVar[Contract] = Contract()
    graphs: ClassVar[frozenset[GraphKind]] = Contract().graphs  # type: ignore[assignment]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = cls.__dict__
        if isinstance(own.get("graphs"), property) or not own.keys() & {"graphs", "contract"}:
            return  # computes graphs itself, or inherits both
        if "graphs" in own and "contract" not in own:
            cls.contract = Contract(graphs=cls.graphs)
        if isinstance(cls.contract, Contract):
            cls.graphs = cls.contract.graphs  # type: ignore[assignment]
        elif isinstance(cls.contract, (property, dataclasses.Field)):  # each instance has its own
            cls.graphs = property(lambda self: self.contract.graphs)
        else:
            raise ContractError(f"{cls.__qualname__}.contract is {cls.contract!r}, not a fxpasses.Contract")

    @abc.abstractmethod
    def apply(self, gm: fx.GraphModule) -> bool:
        """Rewrite ``gm`` in place. Return whether anything changed."""

    def __str__(self) -> str:
        """The pass in command line syntax: ``name{option=value}``, without options at their defaults."""
        options = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in option_fields(self)
            if getattr(self, field.name) != field.default
        ]
        return self.name + (f"{{{' '.join(options)}}}" if options else "")

    def identify(self) -> Identity:
        """The factors that determine this pass's result: see :mod:`fxpasses.pass_manager.identity`."""
        return identify(self)

    def identity(self) -> str | None:
        """The hash of :meth:`identify`, for the compile caches.

        ``None`` if something that determines the result cannot be hashed (such as an open file). Graphs are
        then compiled without caching.
        """
        return self.identify().digest


def option_fields(item: Pass | type[Pass]) -> list[dataclasses.Field[Any]]:
    """The fields of a pass that are its options: all except its name and its function or pattern."""
    return [
        field
        for field in dataclasses.fields(item)
        if field.init and field.name != "name" and field.metadata.get("option", True)
    ]


def fits_hint(value: Any, hint: Any) -> bool:
    """Whether a value has an annotated type. True for hints beyond classes, unions, tuples and literals."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in arguments
    if origin in (Union, types.UnionType):
        return any(fits_hint(value, a) for a in arguments)
    if origin is tuple:
        kinds = (
            arguments[:1] * len(value) if arguments[1:] == (...,) and isinstance(value, tuple) else arguments
        )
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(fits_hint, value, kinds))
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    kind = origin or hint
    return not isinstance(kind, type) or isinstance(value, kind)


_GIVEN = {"option": False}


@dataclass(frozen=True, repr=False)
class FunctionPass(Pass):
    """A pass made from a function by :func:`graph_pass`. Call it to get the same pass with other options."""

    name: str  # type: ignore[misc]
    contract: Contract = dataclasses.field(metadata=_GIVEN)  # type: ignore[misc]  # no default, unlike the class variable
    function: Callable[..., bool] = dataclasses.field(metadata=_GIVEN)

    def __call__(self, **options: Any) -> FunctionPass:
        """Return the same pass with other options: ``drop_small(threshold=0.5)``.

        Raises:
            TypeError: if the function has no such option.
            OptionsError: if the value does not have the annotated type.
        """
        valid = {field.name: field.type for field in option_fields(self)}
        for option, value in options.items():
            if option not in valid:
                raise TypeError(
                    f"pass {self.name!r} has no option {option!r}; its options: {', '.join(valid) or 'none'}"
                )
            if not fits_hint(value, hint := valid[option]):
                name = hint.__name__ if isinstance(hint, type) else str(hint)
                raise OptionsError(f"{self.name}: {option}", value, f"a value of type {name}")
        return dataclasses.replace(self, **options)

    def apply(self, gm: fx.GraphModule) -> bool:
        return self.function(gm, **{field.name: getattr(self, field.name) for field in option_fields(self)})

    def __repr__(self) -> str:
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        where = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(self.function)
        return f"{self} ({where})"


def _name(function: Callable[..., bool]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _with_options(function: Callable[..., bool]) -> type[FunctionPass]:
    """A pass class whose fields are the function's parameters that have a default."""
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # a type imported for type checkers only; a callable object
        hints = {}
    try:
        signature = inspect.signature(function)
    except ValueError as error:  # a C function without a readable signature
        raise ContractError(
            f"graph_pass: what {function!r} takes cannot be told; wrap it: lambda gm: ..."
        ) from error
    try:
        signature.bind("the graph")
    except TypeError as error:
        raise ContractError(
            f"graph_pass: {_name(function)}{signature} cannot be called with the graph alone: {error}; "
            "further parameters need a default"
        ) from error
    options = [
        (name, hints.get(name, Any), dataclasses.field(default=parameter.default))
        for name, parameter in signature.parameters.items()
        if parameter.default is not inspect.Parameter.empty
    ]
    if not options:
        return FunctionPass
    made = dataclasses.make_dataclass("FunctionPass", options, bases=(FunctionPass,), frozen=True, repr=False)
    made.__module__ = __name__
    return made


def graph_pass(
    function: Callable[..., bool] | None = None,
    *,
    name: str | None = None,
    graphs: Iterable[GraphKind] | str = ("joint", "inference"),
    requires: Iterable[str] = (),
    provides: Iterable[str] = (),
    invalidates: Iterable[str] = (),
    conflicts: Iterable[str] = (),
    numerics: Numerics = "tolerance",
    metadata: Metadata = "types",
) -> Any:
    """Make a :class:`FunctionPass` from ``function(gm) -> bool`` (whether it changed something).

    Further parameters with a default are options of the pass: see the example.

    Args:
        function: the rewrite; omitted when used as a decorator with arguments.
        name: the pass's name; by default the function's.
        graphs: the kinds of graph that the function takes, or ``"any"``.
        requires: see :class:`Contract`, as for all that follow.
        provides: conditions that hold afterwards.
        invalidates: conditions that no longer hold afterwards.
        conflicts: what must not be in the same pipeline.
        numerics: what happens to results.
        metadata: what happens to the metadata of remaining nodes.

    Raises:
        ContractError: if a kind of graph, numerics or metadata does not exist, a name is not a string, or
            ``function`` cannot be called with only a graph. It is a ``ValueError``.

    >>> @graph_pass
    ... def drop_small(gm: fx.GraphModule, threshold: float = 0.1) -> bool:
    ...     return False
    >>> str(drop_small), str(drop_small(threshold=0.5))
    ('drop_small', 'drop_small{threshold=0.5}')
    """
    contract = Contract(graphs, requires, provides, invalidates, conflicts, numerics, metadata)
    if function is not None and not callable(function):
        raise ContractError(f"graph_pass: {function!r} is no function")
    if name is not None and (not isinstance(name, str) or not name):
        raise ContractError(f"graph_pass: name is {name!r}, not a text that a pass can be asked for by")

    def make(function: Callable[..., bool]) -> FunctionPass:
        return _with_options(function)(name or _name(function), contract, function)

    return make if function is None else make(function)


class Check:
    """Base class of checks: examine a graph before and after each pass, and raise if the pass is wrong."""

    def before(self, item: Pass, gm: fx.GraphModule, kind: GraphKind) -> Any:
        """Examine a graph before a pass runs on it.

        Args:
            item: the pass.
            gm: the graph. Copy it to keep it: the pass rewrites it in place.
            kind: the kind of graph, such as ``"joint"``.

        Returns:
            Anything. It is passed to :meth:`after` as ``remembered``.
        """

    def after(
        self, item: Pass, gm: fx.GraphModule, kind: GraphKind, remembered: Any, sites: tuple[MatchSite, ...]
    ) -> None:
        """Examine a graph that a pass has changed. The graph is well formed.

        Args:
            item: the pass.
            gm: the rewritten graph.
            kind: the kind of graph.
            remembered: the return value of :meth:`before`.
            sites: the match sites that the pass claimed, in order.

        Raises:
            PassError: if the pass is wrong.
        """
