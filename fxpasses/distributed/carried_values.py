"""What a collective carries, if names do not tell: how its operand and users are computed.

Two ranks that run the same calls in another order have both equal, but in another position. What is specific
to a rank is ignored: names of groups and devices, values saved by a partition and, in the looser of two
digests, numbers (sizes, offsets, factors) and calls that only slice, pad or copy.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fake.dispatch.communication import communicates
from fxpasses.distributed._torch import disable_current_modes
from fxpasses.graphs.rewriting import outputs_of
from fxpasses.regional import communicating_graph

GROUPS = ("group_name", "process_group", "group")
"""Names of operator arguments that identify a process group."""


class CarriedValues(NamedTuple):
    """How a value is computed, or what a collective carries.

    Attributes:
        loosely: digest of the operators and inputs, excluding what other collectives carry.
        exactly: also includes numbers and small constants.
        text: for people.
    """

    loosely: str
    exactly: str
    text: str


def sends(node: fx.Node) -> bool:
    """Whether a node is a collective. A wait is not."""
    return node.op == "call_function" and _sends(node.target)


@functools.cache
def _sends(target: Any) -> bool:
    return communicates(target) and "wait_tensor" not in str(target)


def region_of(node: fx.Node) -> fx.Graph | None:
    """Return the graph of the region that a node calls, if it has collectives."""
    return communicating_graph(node) if node.op == "call_function" else None


def carried(graph: fx.Graph, names: Mapping[str, str]) -> list[CarriedValues | None]:
    """Return what each collective, also in regions, carries; ``None`` if nothing named depends on it.

    Args:
        graph: the graph of ATen calls.
        names: names of inputs and outputs that all ranks use. Keys of outputs are like ``"output 3"``.
    """
    given = {}
    for node in graph.find_nodes(op="placeholder"):
        name = names.get(node.name) or _UNKNOWN
        given[node.name] = CarriedValues(name, name, name)
    ends = [names.get(f"output {i}", "") for i in range(len(outputs_of(graph)))]
    return list(_walk(graph, given, ends))


def _walk(
    graph: fx.Graph, given: Mapping[str, CarriedValues], ends: Sequence[str]
) -> Iterator[CarriedValues | None]:
    """Yield what the collectives carry.

    Args:
        graph: the graph.
        given: how each placeholder is computed.
        ends: what becomes of each output; ``""`` if that says nothing.
    """
    values: dict[fx.Node, CarriedValues] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = given[node.name]
        elif node.op != "output":
            values[node] = _describe_value(node, values)
    uses, written = _use_digests(graph, values, ends)
    for node in graph.nodes:
        inner = region_of(node)
        if sends(node):
            use, loosely = (
                uses.get(node),
                _call_digest(node, [values[n].loosely for n in node.all_input_nodes], False),
            )
            text = ", ".join(_text(n, given) for n in node.all_input_nodes)
            text += "".join(f" -> {name} in place" for name in sorted(written[node]))
            yield (
                CarriedValues(_digest(loosely, use), _digest(values[node].exactly, use), text)
                if use
                else None
            )
        elif inner is not None:
            tensors: list[fx.Node] = node.args[1]  # type: ignore[assignment]
            placeholders = inner.find_nodes(op="placeholder")
            count = len(placeholders) - len(tensors)
            at = {p.name: _SIZE for p in placeholders[:count]}
            at |= {
                p.name: values[n]._replace(text=_text(n, given))
                for p, n in zip(placeholders[count:], tensors, strict=True)
            }
            of = {user.args[1]: uses.get(user, "") for user in node.users}
            yield from _walk(inner, at, [of.get(i, "") for i in range(len(outputs_of(inner)))])


def _describe_value(node: fx.Node, values: Mapping[fx.Node, CarriedValues]) -> CarriedValues:
    if _is_size(node):
        return _SIZE
    if node.op == "get_attr":
        return CarriedValues(_CONSTANT, _constant(node), _CONSTANT)
    given = [values[n] for n in node.all_input_nodes]
    exactly = _call_digest(node, [value.exactly for value in given], True)
    if _only_rearranges(node):
        return CarriedValues(given[0].loosely, exactly, "")
    return CarriedValues(
        _call_digest(node, [] if sends(node) else [value.loosely for value in given], False), exactly, ""
    )


def _text(node: fx.Node, given: Mapping[str, CarriedValues], depth: int = 3) -> str:
    """Describe how a value is computed, for people."""
    if node.op == "placeholder":
        return given[node.name].text or _UNKNOWN
    inner = ", ".join(_text(n, given, depth - 1) for n in node.all_input_nodes) if depth else "..."
    if node.target is operator.getitem:
        inner += f", {node.args[1]}"
    name = _CONSTANT if node.op == "get_attr" else _name(node.target).removeprefix("aten.").partition(".")[0]
    return f"{name}({inner if len(inner) <= _LONG else '...'})" if inner else name


def _use_digests(
    graph: fx.Graph, values: Mapping[fx.Node, CarriedValues], ends: Sequence[str]
) -> tuple[dict[fx.Node, str], dict[fx.Node, frozenset[str]]]:
    """Return a digest of each value's uses that reach named outputs or written inputs; and those inputs.

    Args:
        graph: the graph.
        values: how each one is computed.
        ends: what becomes of each output.
    """
    named: dict[fx.Node, set[str]] = {}
    for value, name in zip(outputs_of(graph), ends, strict=True):
        if isinstance(value, fx.Node) and name:
            named.setdefault(value, set()).add(name)
    found: dict[fx.Node, str] = {}
    written: dict[fx.Node, frozenset[str]] = {}
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        parts, written[node] = named.get(node, set()), frozenset()
        for user in node.users:
            given = user.all_input_nodes
            changed = {values[given[0]].text} - {""} if _writes(user.target) else set()
            written[node] |= written.get(user, frozenset()) | changed
            end = found.get(user) or ("written" if _writes(user.target) else "")
            if end and not _only_rearranges(user):
                end = _digest(values[user].loosely, str(given.index(node)), end)
            parts = parts | {end} if end else parts
        if parts:
            found[node] = _digest(*sorted(parts))
    return found, written


def _call_digest(node: fx.Node, given: Sequence[str], exact: bool) -> str:
    """Return a digest of a call.

    Args:
        node: the call.
        given: stand-ins for its input values.
        exact: whether to include numbers and names of regions. Names of process groups are always excluded.
    """
    name, numbers = _name(node.target), exact or node.target is operator.getitem
    left_out = {0} if name.startswith("fxpasses.region") and not exact else _groups_of(node.target)
    labels = {n: f"*{i}" for i, n in enumerate(node.all_input_nodes) if numbers or not _is_size(n)}
    parts = [_argument_text(item, labels, numbers) for i, item in enumerate(node.args) if i not in left_out]
    named = sorted(node.kwargs.items())
    parts += [key + _argument_text(item, labels, numbers) for key, item in named if key not in GROUPS]
    return _digest(name, *parts, *given)


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


@functools.cache
def _name(target: Any) -> str:
    return str(target) if hasattr(target, "_schema") else str(getattr(target, "__name__", target))


@functools.cache
def _groups_of(target: Any) -> set[int]:
    """Return the positions of arguments that name a process group."""
    schema = getattr(target, "_schema", None)
    return {i for i, argument in enumerate(schema.arguments if schema else ()) if argument.name in GROUPS}


def _argument_text(value: Any, labels: Mapping[fx.Node, str], numbers: bool) -> str:
    if isinstance(value, fx.Node):
        return labels.get(value, "")
    if isinstance(value, (list, tuple)):
        parts = [_argument_text(item, labels, numbers) for item in value]
        return f"[{','.join(parts if numbers else filter(None, parts))}]"
    if isinstance(value, torch.device):
        return value.type
    return "" if type(value) in (int, float) and not numbers else repr(value)


def _only_rearranges(node: fx.Node) -> bool:
    """Whether a call's result consists of elements of its one argument, possibly rearranged."""
    if node.target is operator.getitem:
        return _only_rearranges(node.args[0])  # type: ignore[arg-type]
    return len(node.all_input_nodes) > 0 and _is_rearrangement(node.target)


@functools.cache
def _is_rearrangement(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    name = schema.name.split("::")[-1]
    return name in _COPIES or any(result.alias_info is not None for result in schema.returns)


@functools.cache
def _writes(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable and not communicates(target)


def _constant(node: fx.Node) -> str:
    """Describe a constant tensor by its content: its name in the graph depends on the order of calls."""
    value = getattr(node.graph.owning_module, str(node.target), None)
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.numel() > _SMALL:
        return _CONSTANT
    with disable_current_modes():
        return repr(value.tolist())


def _digest(*parts: str) -> str:
    return hashlib.blake2b("|".join(parts).encode(), digest_size=8).hexdigest()


_UNKNOWN, _CONSTANT = "?", "a constant"
_SIZE = CarriedValues("", "a size", "")
_COPIES = (
    "clone",
    "constant_pad_nd",
    "_unsafe_view",
    "wait_tensor",
    "split_with_sizes_copy",
    "lift_fresh_copy",
)
_SMALL, _LONG = 256, 60
