"""Replace a match if results cannot differ: the second half of :mod:`fxpasses.patterns`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpasses.errors import PatternError
from fxpasses.graphs.aliasing import AliasInfo, is_assertion, is_mutating
from fxpasses.graphs.provenance import is_backward, locate
from fxpasses.graphs.rewriting import insert_call, outputs_of, same_metadata, same_size, value_of
from fxpasses.pass_manager.sites import claim
from fxpasses.patterns.matching import find_matches
from fxpasses.patterns.pattern_tracing import TracedFunction, TracedPattern

aten = torch.ops.aten


@dataclass(frozen=True)
class Match:
    """One occurrence of a pattern.

    Attributes:
        inputs: for each parameter of the pattern, by name, the node or number that it matched.
        nodes: the calls of the pattern, in graph order.
        outputs: the calls that the pattern returns.
    """

    inputs: dict[str, Any]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @property
    def anchor(self) -> fx.Node:
        """Return the node that identifies the match: its first output."""
        return self.outputs[0]

    def value(self, name: str) -> Any:
        """Return the fake tensor, or the number, that a parameter matched.

        Comparing one of its symbolic sizes adds a guard. Use
        ``torch.fx.experimental.symbolic_shapes.statically_known_true`` to avoid one.
        """
        given = self.inputs[name]
        return value_of(given) if isinstance(given, fx.Node) else given


class Replacer:
    """Replaces every occurrence in one graph.

    Attributes:
        refused: the matches that were left alone: reason, and line of the user's program.
    """

    def __init__(
        self, gm: fx.GraphModule, traced: TracedPattern, where: Callable[[Match], bool] | None
    ) -> None:
        self.graph = gm.graph
        self.traced = traced
        self.where = where
        self.refused: list[tuple[str, str]] = []
        self._traces: dict[Any, TracedFunction] = {}
        self._aliases: AliasInfo | None = None
        self._writes = [node for node in self.graph.nodes if is_mutating(node)]

    def run(self) -> int:
        """Replace what may be replaced. Returns the number of occurrences replaced."""
        return sum(self._run_variant(pattern, decompose) for pattern, decompose in self.traced.variants)

    def _run_variant(self, pattern: TracedFunction, decompose: bool) -> int:
        target = pattern.outputs[0].target
        count = 0
        erased: set[fx.Node] = set()
        for anchor in self.graph.find_nodes(op="call_function", target=target):
            if anchor in erased:
                continue
            match, replacement = self._match(pattern, anchor, decompose)
            if match is not None and replacement is not None and claim(anchor):
                erased.update(self._rewrite(match, replacement))
                self._aliases = None
                count += 1
        return count

    def _match(
        self, pattern: TracedFunction, anchor: fx.Node, decompose: bool
    ) -> tuple[Match | None, TracedFunction | None]:
        """Return the first match at ``anchor`` that may be replaced, with its replacement."""
        reasons = []
        for loose in find_matches(pattern.outputs, self.graph, anchor, pattern.numbers):
            given = {name: loose.get(node) for name, node in pattern.parameters.items()}
            values = {n: value_of(v) if isinstance(v, fx.Node) else v for n, v in given.items()}
            if any(value is None for value in values.values()):
                reasons.append("a value has no fake value")
                continue
            try:
                exact = self._trace(self.traced.pattern, values, decompose)
                replacement = self._trace(self.traced.replacement, values, decompose)
            except PatternError as error:
                reasons.append(f"not for the sizes and numbers there: {error}")
                continue
            known = {exact.parameters[name]: value for name, value in given.items()}
            for binding in find_matches(exact.outputs, self.graph, anchor, {}, known):
                nodes = sorted({v for k, v in binding.items() if k.op == "call_function"})
                outputs = tuple(binding[node] for node in exact.outputs)
                match = Match(given, tuple(nodes), outputs)
                reason = self._reason_to_refuse(match, exact, replacement)
                if reason is None:
                    return match, replacement
                reasons.append(reason)
        if reasons:
            self.refused.append((reasons[0], str(locate(anchor))))
        return None, None

    def _trace(self, function: Callable[..., Any], values: dict[str, Any], decompose: bool) -> TracedFunction:
        first = {id(value): name for name, value in reversed(values.items())}
        same = tuple(first[id(value)] for value in values.values())
        key = (function, decompose, same, *map(_metadata_key, values.values()))
        if key not in self._traces:
            guards = function is self.traced.replacement
            self._traces[key] = TracedFunction(function, values, decompose, guards)
        return self._traces[key]

    def _reason_to_refuse(
        self, match: Match, pattern: TracedFunction, replacement: TracedFunction
    ) -> str | None:
        """Return why the match must not be replaced, or ``None``."""
        inside = set(match.nodes)
        for node in match.nodes:
            outside = [] if node in match.outputs else [u for u in node.users if u not in inside]
            if others := [user.name for user in outside if not _feeds_only_assertions(user)]:
                return f"{node.name} is used outside of the match too, by {others[0]}"
        if len({is_backward(node) for node in match.nodes}) > 1:
            return "it is part of the forward and of the backward computation"
        if self._insertion_point(match) is None:
            return "a result is used before all inputs are known"
        for position, (old, new) in enumerate(zip(match.outputs, replacement.outputs, strict=True)):
            if not same_metadata(value_of(old), value_of(new)):
                return f"result {position} would be {_describe(value_of(new))} instead of {_describe(value_of(old))}"
        if (written := self._interfering_write(match)) is not None:
            return f"{written.name} writes to memory that it reads"
        if self._aliasing_differs(match, pattern, replacement):
            return "its results would share memory with other values than before"
        if self.where is not None and not self.where(match):
            return "the guard says no"
        return None

    def _insertion_point(self, match: Match) -> fx.Node | None:
        """Return a node before which all inputs of the replacement, and no users of its results, are."""
        inside = set(match.nodes)
        users = [user for output in match.outputs for user in output.users if user not in inside]
        point = min([match.nodes[-1], *users])
        inputs = [value for value in match.inputs.values() if isinstance(value, fx.Node)]
        return point if all(value < point for value in inputs) else None

    def _interfering_write(self, match: Match) -> fx.Node | None:
        """Return a write, between the first and last call of the match, to memory that the match uses."""
        point = self._insertion_point(match)
        assert point is not None
        first, last = min(match.nodes[0], point), max(match.nodes[-1], point)
        writes = [node for node in self._writes if first < node < last]
        if not writes:
            return None
        aliases = self._alias_info()
        values = [*match.nodes, *(v for v in match.inputs.values() if isinstance(v, fx.Node))]
        touched = frozenset().union(*(aliases.roots(value) for value in values))
        for write in writes:
            if touched & aliases.written_by(write):
                return write
        return None

    def _aliasing_differs(self, match: Match, pattern: TracedFunction, replacement: TracedFunction) -> bool:
        """Whether the results would alias other values, if writes or the caller could observe that."""
        if _alias_signature(pattern) == _alias_signature(replacement):
            return False
        aliases = self._alias_info()
        inputs = [value for value in match.inputs.values() if isinstance(value, fx.Node)]
        roots = frozenset().union(*(aliases.roots(value) for value in (*match.outputs, *inputs)))
        outputs = frozenset().union(*(aliases.roots(value) for value in match.outputs))
        return bool(roots & aliases.mutated or outputs & aliases.output)

    def _alias_info(self) -> AliasInfo:
        if self._aliases is None:
            self._aliases = AliasInfo(self.graph)
        return self._aliases

    def _rewrite(self, match: Match, replacement: TracedFunction) -> tuple[fx.Node, ...]:
        """Rewrite one match. Returns the erased nodes."""
        point = self._insertion_point(match)
        assert point is not None
        new: dict[fx.Node, Any] = {
            replacement.parameters[name]: value for name, value in match.inputs.items()
        }
        with self.graph.inserting_before(point):
            for node in replacement.graph.nodes:
                if node.op == "call_function":
                    new[node] = self._available_size(node, point) or insert_call(
                        self.graph,
                        node.target,
                        fx.node.map_arg(node.args, lambda n: new[n]),
                        fx.node.map_arg(node.kwargs, lambda n: new[n]),
                        like=match.anchor,
                    )
        for old, result in zip(match.outputs, outputs_of(replacement.graph), strict=True):
            old.replace_all_uses_with(new[result])
        erased = []
        for node in reversed(match.nodes):
            if not node.users:
                self.graph.erase_node(node)
                erased.append(node)
        return tuple(erased)

    def _available_size(self, node: fx.Node, point: fx.Node) -> fx.Node | None:
        """Return a node before ``point`` with the symbolic size that ``node`` reads from a tensor, if any."""
        if node.target not in (aten.sym_size.int, aten.sym_stride.int):
            return None
        for known in self.graph.nodes:
            if known is point:
                return None
            value = value_of(known)
            if isinstance(value, torch.SymInt) and same_size(value, value_of(node)):
                return known
        return None


def _feeds_only_assertions(node: fx.Node) -> bool:
    """Whether a call only serves assertions, like ``one_hot``'s on indices: then it stays for them."""
    return is_assertion(node) or (bool(node.users) and all(map(_feeds_only_assertions, node.users)))


def _alias_signature(traced: TracedFunction) -> list[tuple[frozenset[str], frozenset[int]]]:
    """Return, for each result, the parameters and the other results that it may share memory with."""
    aliases = AliasInfo(traced.graph)
    names = {node: name for name, node in traced.parameters.items()}
    roots = [aliases.roots(node) for node in traced.outputs]
    return [
        (
            frozenset(names[node] for node in own if node in names),
            frozenset(i for i, other in enumerate(roots) if own & other),
        )
        for own in roots
    ]


def _metadata_key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(tuple(value.shape)), str(value.stride()), value.dtype, value.device)
    return (type(value), str(value))


def _describe(value: Any) -> str:
    return f"{value.dtype}{tuple(value.shape)} with strides {value.stride()} on {value.device}"
