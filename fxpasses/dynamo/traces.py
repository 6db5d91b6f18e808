"""What Dynamo's trace of a module call depends on, to tell whether another call has the same trace."""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fake.error_text import describe_error
from fxpasses.dynamo import _torch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Leaf:
    """One argument of a call, or one element of a tuple of arguments.

    Attributes:
        like: what must be equal in another call.
        node: its graph node, for tensors and symbolic numbers.
        source: Dynamo's source of a module.
        variable: Dynamo's variable.
    """

    like: Any
    node: fx.Node | None = None
    source: Any = None
    variable: Any = None


@dataclass
class Trace:
    """The trace of one module call: its arguments, the state of the process, the nodes and the result."""

    leaves: list[Leaf]
    state: tuple[Any, ...]
    nodes: list[fx.Node]
    result: Any
    confirmed: bool = False
    plan: Plan | None = None
    refused: bool = False
    """Whether copies are impossible."""


@dataclass
class Plan:
    """What a copy needs: the guards under a trace's modules, and the tensors that it read from them."""

    guards: list[tuple[Any, Any, Any]]
    """(guard, comparison, expected metadata)"""
    class_guards: set[Any]
    """Guards on values read from a class: these are guarded already, and another guard checks the class."""
    same_objects: list[tuple[_torch.Guard, Any]]
    """(guard, the other source of the same object)"""
    captured: dict[fx.Node, Any]
    """Graph inputs that came from the modules, with their sources."""
    numbers: dict[fx.Node, Any]
    """The calls that read a Python number from such an input, with the numbers' sources."""
    key_ordered: list[Any]
    """Sources of dictionaries whose key order matters, because guards find their items by index."""
    names: Mapping[Any, Set[str]]
    """The attribute names that objects have of their own. Dynamo has no guard for lookups in ``__dict__``."""


_OF_CONSTANTS = ("CONSTANT_MATCH", "EQUALS_MATCH")
"""Guards that compare a value with its earlier value."""


class Unknown(Exception):
    """Something about a call is not known well enough to copy it."""


def leaves_of(tx: Any, arguments: list[Any], keywords: Mapping[str, Any]) -> Iterator[Leaf]:
    """Flatten the arguments of a call.

    Args:
        tx: Dynamo's instruction translator.
        arguments: Dynamo's variables, the module first.
        keywords: likewise, by name.

    Yields:
        One leaf for the signature, then one for each tensor, number, constant, tuple and module, in order.

    Raises:
        Unknown: if an argument is of another kind.
    """
    yield Leaf((len(arguments), tuple(keywords)))
    for variable in (*arguments, *keywords.values()):
        yield from _leaf(tx, variable)


def _leaf(tx: Any, variable: Any) -> Iterator[Leaf]:
    if isinstance(variable, _torch.LazyVariableTracker):
        source = _torch.unrealized_source(variable)
        if source is not None:
            yield Leaf(("not looked at", source), variable=variable)
            return
        variable = variable.realize()
    kind = type(variable)
    if kind is _torch.TensorVariable:
        if _torch.has_new_attributes(tx, variable):
            raise Unknown(f"a tensor that was given attributes: {variable}")
        node = variable.as_proxy().node
        like = (_metadata(node.meta["example_value"]), variable.class_type, variable.source)
        yield Leaf(like, node, variable=variable)
    elif kind is _torch.SymNodeVariable:
        yield Leaf(
            (type(variable.sym_num), variable.sym_num.node.expr), variable.as_proxy().node, variable=variable
        )
    elif kind is _torch.ConstantVariable:
        yield Leaf(_constant(variable.value), variable=variable)
    elif kind is _torch.TupleVariable:
        yield Leaf((tuple, len(variable.items)))
        for item in variable.items:
            yield from _leaf(tx, item)
    elif _torch.plain_module(variable) and variable.source:
        yield Leaf(type(variable.value), source=variable.source, variable=variable)
    else:
        raise Unknown(f"an argument of another kind: {variable}")


def _metadata(value: Any) -> tuple[Any, ...]:
    """The tensor metadata that tracing can see, sizes as expressions: comparing these adds no guard."""
    if type(value) is torch.nn.Parameter or not isinstance(value, torch.Tensor):
        raise Unknown(f"a value of type {type(value).__name__}")
    if value.layout is not torch.strided or _torch.is_functorch_wrapped_tensor(value):
        raise Unknown(f"a tensor of layout {value.layout}")
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    return (
        type(value),
        tuple(n if type(n) is int else n.node.expr for n in numbers),
        value.dtype,
        value.device,
        value.requires_grad,
        value.is_leaf,
        value.is_conj(),
        value.is_neg(),
        value.is_inference(),
    )


def _pattern(leaves: list[Leaf]) -> list[Any]:
    """For each leaf, the number of the first leaf that is the same object."""
    seen: dict[Any, int] = {}
    return [
        seen.setdefault(item, len(seen)) if (item := leaf.node or leaf.source) is not None else None
        for leaf in leaves
    ]


def matched_sources(
    trace: Trace, tx: Any, leaves: list[Leaf], state: tuple[Any, ...], changed: Sequence[Any] = ()
) -> SourceMap | None:
    """Compare a call with a traced call.

    Args:
        trace: the traced call.
        tx: Dynamo's instruction translator.
        leaves: the arguments of the new call, from :func:`leaves_of`.
        state: the state of the process and of Dynamo that a trace depends on.
        changed: sources of objects that the traced program has mutated so far.

    Returns:
        The map from the traced call's sources to the new call's, or ``None`` if the new call's trace would
        differ or is unknown.
    """
    if (
        trace.refused
        or state != trace.state
        or [leaf.like for leaf in leaves] != [leaf.like for leaf in trace.leaves]
    ):
        return None
    if _pattern(leaves) != _pattern(trace.leaves):
        return None
    try:
        if trace.plan is None:
            trace.refused = True  # unless it gets a plan
            trace.plan = _plan(trace, tx)
            trace.refused = False
        moved = SourceMap(trace, tx, leaves)
        return moved if _guards_hold(trace.plan, moved, changed) else None
    except Unknown as reason:
        log.debug("a call is traced: %s", reason)
        return None


class SourceMap:
    """Maps sources of a traced call to those of a new call, by replacing the modules that they start from."""

    def __init__(self, trace: Trace, tx: Any, leaves: list[Leaf]) -> None:
        self.read = reader(tx)
        self.table = {
            old.source: new.source
            for old, new in zip(trace.leaves, leaves, strict=True)
            if old.source is not None and old.source != new.source
        }
        self._moved: dict[Any, Any] = {}

    def __call__(self, source: Any) -> Any:
        moved = self._moved.get(source)
        if moved is None:
            moved = self._moved[source] = self._move(source)
        return moved

    def _move(self, source: Any) -> Any:
        if source in self.table:
            return self.table[source]
        base = getattr(source, "base", None)
        if base is None:
            return source
        moved = self(base)
        fields: dict[str, Any] = {} if moved is base else {"base": moved}
        for name in _fields_except_base(source.__class__):
            value = getattr(source, name)
            # An index may itself be read from a source.
            if hasattr(value, "guard_source") and self(value) is not value:
                fields[name] = self(value)
        return dataclasses.replace(source, **fields) if fields else source


@functools.cache
def _fields_except_base(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.name != "base")


def _plan(trace: Trace, tx: Any) -> Plan:
    """Collect what a copy depends on.

    Raises:
        Unknown: if a guard or node cannot be transferred.
    """
    modules = [leaf.source for leaf in trace.leaves if leaf.source is not None]
    under: dict[Any, bool] = {}

    def is_under(source: Any) -> bool:
        known = under.get(source)
        if known is None:
            base = getattr(source, "base", None)
            known = under[source] = source in modules or (base is not None and is_under(base))
        return known

    read = reader(tx)
    compared, same = [], []
    for guard in tx.output.guards:
        source = guard.originating_source
        name = guard.create_fn_name()
        if name == "DUPLICATE_INPUT":
            other = guard.create_fn.keywords["source_b"]
            if is_under(source) or is_under(other):
                same.append((guard, other))
            continue
        if not is_under(source):
            continue
        comparison = _torch.comparison_of(guard)
        if comparison is None:
            raise Unknown(f"a guard {name} on {source.name}")
        value = read(source)
        compared.append((guard, comparison, comparison.get_metadata_fn(guard, value)))
    inside, given = set(trace.nodes), {leaf.node: leaf.like for leaf in trace.leaves}
    for node, like in given.items():
        value = node and node.meta["example_value"]
        if isinstance(value, torch.Tensor) and _metadata(value) != like[0]:
            raise Unknown(f"an argument whose metadata is changed: {node}")
    captured: dict[fx.Node, Any] = {}
    numbers: dict[fx.Node, Any] = {}
    for node in trace.nodes:
        has_value = "example_value" in node.meta or node.target is operator.setitem
        if node.op not in ("call_function", "call_method") or not has_value:
            raise Unknown(f"a node that is more than a call: {node.format_node()}")
        if isinstance(node.target, _torch.HigherOrderOperator):
            raise Unknown(f"an operator that takes functions: {node.target}")
        for used in node.all_input_nodes:
            if used in inside or used in given or used in captured:
                continue
            argument = used.meta.get("grapharg")
            if used.op != "placeholder" or argument is None or argument.source is None:
                raise Unknown(f"a value that is no argument: {used.format_node()}")
            if is_under(argument.source):
                value, real = used.meta["example_value"], read(argument.source)
                if any(type(n) is not int for n in getattr(value, "shape", ())):
                    raise Unknown(f"a tensor with symbolic sizes: {argument.source.name}")
                if isinstance(real, torch.Tensor) and (real.shape, real.requires_grad) != (
                    value.shape,
                    value.requires_grad,
                ):
                    raise Unknown(f"a tensor whose metadata is changed: {argument.source.name}")
                if not argument.pass_arg_as_tensor:
                    captured[used] = argument.source
                elif node.target == "item":
                    numbers[node] = argument.source
                else:
                    raise Unknown(f"a number that is used as a tensor: {argument.source.name}")
    class_guards = {
        guard for guard, _, _ in compared if _torch.is_from_class(guard.originating_source, modules)
    }
    key_ordered = [source for source in _torch.key_order_sources(tx) if is_under(source)]
    looked_into = {
        guard.originating_source for guard, _, _ in compared if guard.create_fn_name() == "TYPE_MATCH"
    }
    names = {source: set(getattr(read(source), "__dict__", ())) for source in looked_into}
    return Plan(compared, class_guards, same, captured, numbers, key_ordered, names)


def _guards_hold(plan: Plan, moved: SourceMap, changed: Sequence[Any]) -> bool:
    """Whether all guards of a trace hold for another call, and none reads what the program mutated."""
    if not moved.table:
        return True
    read = moved.read
    written = {id(read(source)) for source in changed}
    for guard, comparison, expected in plan.guards:
        moved_source = moved(guard.originating_source)
        value = read(moved_source)
        if written and any(id(read(step)) in written for step in _source_chain(moved_source)):
            return False
        if guard.create_fn_name() in _OF_CONSTANTS and type(value) is not type(expected):
            return False  # a tensor gives no plain answer when compared with a number
        if not comparison.eval_fn(value, expected):
            log.debug("a call is traced: %s of %s differs", guard.create_fn_name(), guard.name)
            return False
    if any(getattr(read(moved(s)), "__dict__", {}).keys() != names for s, names in plan.names.items()):
        return False
    if any(read(moved(g.originating_source)) is not read(moved(other)) for g, other in plan.same_objects):
        return False
    # For an equal number, everything that the trace asked about it has the same answer.
    return all(_constant(read(moved(source))) == _constant(read(source)) for source in plan.numbers.values())


def _source_chain(source: Any) -> Iterator[Any]:
    """A source and the sources that it is reached through."""
    while source is not None:
        yield source
        source = getattr(source, "base", None)


def _constant(value: Any) -> tuple[Any, ...]:
    """A constant to compare calls by, with its text: 0.0 and -0.0 are equal but give different graphs."""
    return type(value), value, repr(value)


def reader(tx: Any) -> Callable[[Any], Any]:
    """Return a function that reads sources, caching each step. It raises :class:`Unknown` on failure."""
    root = tx.output.root_tx
    scopes, cache = {"G": root.f_globals, "L": root.f_locals}, {}  # type: ignore[var-annotated]

    def read(source: Any) -> Any:
        try:
            return source.get_value(scopes, {}, cache)
        except (
            Exception
        ) as error:  # a source may run user code, such as a module's __getattr__; some have no name
            raise Unknown(f"a {type(source).__name__} cannot be read: {describe_error(error)}") from error

    return read


def is_confirmed(predicted: Trace, tx: Any, traced: Trace) -> bool:
    """Whether a full trace of a call equals the copy of an earlier trace that would have replaced it.

    Args:
        predicted: the earlier trace.
        tx: Dynamo's instruction translator.
        traced: the full trace.
    """
    if len(predicted.nodes) != len(traced.nodes):
        return False
    same: dict[fx.Node, fx.Node | None] = {}
    for was, now in zip(predicted.leaves, traced.leaves, strict=True):
        if was.node is not None:
            same[was.node] = now.node
    assert predicted.plan is not None
    moved = SourceMap(predicted, tx, traced.leaves)
    placeholders = {source: node for node, source in _placeholders(traced).items()}
    for node, source in predicted.plan.captured.items():
        same[node] = placeholders.get(moved(source))
    for node, source in predicted.plan.numbers.items():
        same[node.all_input_nodes[0]] = placeholders.get(moved(source))
    renamed: dict[Any, Any] = {}
    for old, new in zip(predicted.nodes, traced.nodes, strict=True):
        if old.op != new.op or old.target != new.target:
            return False
        args = fx.node.map_arg((old.args, old.kwargs), lambda n: same.get(n, n))
        if args != (new.args, new.kwargs):
            return False
        values = [node.meta.get("example_value") for node in (old, new)]
        if old in predicted.plan.numbers:
            before, after = (value.node.expr for value in values if value is not None)
            if before.is_Symbol:
                renamed[before] = after
        elif _value_metadata(values[0], renamed) != _value_metadata(values[1], {}):
            return False
        same[old] = new
    return template(predicted.result, same) == template(traced.result, {})


def _placeholders(trace: Trace) -> dict[fx.Node, Any]:
    used = {n for node in trace.nodes for n in node.all_input_nodes if n.op == "placeholder"}
    return {n: n.meta["grapharg"].source for n in used if n.meta.get("grapharg") is not None}


def _value_metadata(value: Any, renamed: Mapping[Any, Any]) -> Any:
    """The metadata of the tensors in a value, with its symbolic numbers as expressions."""

    def described(element: Any) -> Any:
        if isinstance(element, torch.Tensor):
            return _metadata(element)
        if isinstance(element, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return element.node.expr.xreplace(renamed)
        return element

    try:
        return _torch.tree_map(described, value)
    except Unknown as unknown:
        return str(unknown)


def template(variable: Any, same: Mapping[fx.Node, fx.Node | None]) -> Any:
    """A result as comparable tuples of nodes and constants, or None if it contains anything else."""
    if isinstance(variable, _torch.LazyVariableTracker):
        variable = variable.realize()
    if type(variable) is _torch.TensorVariable:
        node = variable.as_proxy().node
        return ("tensor", same.get(node, node))
    if type(variable) is _torch.ConstantVariable:
        return ("constant", type(variable.value), variable.value)
    if type(variable) is _torch.TupleVariable:
        items = tuple(template(item, same) for item in variable.items)
        return None if None in items else ("tuple", items)
    return None
