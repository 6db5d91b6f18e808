"""Run a graph as its generated code would, without generating it.

FX writes a graph as Python source and lets Python compile it, which takes longer than the rest of a capture
together. `executable` reads the graph once into a flat list of calls. Values live in one list, and each is
dropped when passed to its last use, as in generated code: functions check who else holds a gradient. A graph
that runs often gets generated code after all, which is a third faster.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from compiled_autograd.runtime import _torch_nodes
from fake.tracing.collector import collection_paused

_Frame = list[Any]
_Read = Callable[[_Frame], Any]
_RUNNABLE = {"placeholder", "call_function", "call_method", "get_attr", "output"}
_SEQUENCES = {tuple, list, immutable_list}
_DICTS = {dict, immutable_dict}
_CONSTANTS = {int, float, str}
_VALUE = "\0"
_ELEMENT = f"{_VALUE}, "
_MAX_CACHED_SLOTS = 16
"""Up to this many values, an argument's template is likely to recur."""
_RUNS_BEFORE_CODEGEN = 32
"""Runs after which code generation pays off: it takes the time of about forty runs."""
_MAX_CODEGEN_NODES = 10_000
"""Above this many nodes no code is generated: it would pause training for a second."""


def graph_module(root: Any, graph: fx.Graph, name: str) -> fx.GraphModule:
    """Return a `torch.fx.GraphModule` that generates code when read or called. Args: those of its class."""
    return _torch_nodes.LazyGraphModule(root, graph, name)


def executable(module: fx.GraphModule) -> Callable[..., Any]:
    """Return ``module.forward``, or an equivalent without generated code if the graph is plain."""
    plain = _torch_nodes.has_plain_code(module) and all(node.op in _RUNNABLE for node in module.graph.nodes)
    return _Executable(module) if plain else module.forward


class _Executable:
    """A graph that runs as calls first, and as generated code once it has run often."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        with collection_paused():
            self._run: Callable[..., Any] = _Calls(module).run
        self._runs_left = _RUNS_BEFORE_CODEGEN if len(module.graph.nodes) <= _MAX_CODEGEN_NODES else -1

    def __call__(self, *arguments: Any) -> Any:
        if self._runs_left > 0:
            self._runs_left -= 1
            if not self._runs_left:
                self._run = self._module.forward
        return self._run(*arguments)


class _Calls:
    """The calls of a graph, in order."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._slots: dict[fx.Node, int] = {}
        self._initial: _Frame = []
        self._calls: list[tuple[Any, ...]] = []
        self._loads: list[tuple[Callable[[Any], Sequence[Any]], slice] | None] = []
        nodes = list(module.graph.nodes)
        freed = last_uses(nodes)
        for index in range(self._load_elements(nodes), len(nodes) - 1):
            if nodes[index] not in self._slots:
                self._add(nodes, index, freed.get(nodes[index], ()))
        self._results = self._reader(nodes[-1].args[0])
        self._slots.clear()

    def _slot(self, value: Any = None) -> int:
        self._initial.append(value)
        return len(self._initial) - 1

    def _load_elements(self, nodes: Sequence[fx.Node]) -> int:
        """Give placeholders the first slots, then load the elements taken out of each at once."""
        index = 0
        while nodes[index].op == "placeholder":
            self._slots[nodes[index]] = self._slot()
            index += 1
        taken: dict[Any, list[fx.Node]] = {node: [] for node in nodes[:index]}
        while _is_element(nodes[index]) and nodes[index].args[0] in taken:
            taken[nodes[index].args[0]].append(nodes[index])
            index += 1
        for elements in taken.values():
            start = len(self._initial)
            for node in elements:
                self._slots[node] = self._slot()
            read = _tuple_getter([cast(int, node.args[1]) for node in elements])
            self._loads.append((read, slice(start, len(self._initial))) if elements else None)
        return index

    def _add(self, nodes: Sequence[fx.Node], index: int, freed: Sequence[fx.Node]) -> None:
        node = nodes[index]
        function: Any = node.target
        if node.op == "call_method":
            function = functools.partial(_call_method, str(node.target))
        elif node.op == "get_attr":
            function = functools.partial(operator.attrgetter(str(node.target)), self._module)
        args, named = node.args, node.kwargs
        if named and _may_be_positional(function, len(args), named):
            args, named = (*args, *named.values()), {}
        read = self._reader(args)
        keywords = self._reader(named) if named else None
        elements, fused = [], 0
        while _is_element(nodes[index + 1]) and nodes[index + 1].args[0] is node:
            index, fused = index + 1, fused + 1
            self._slots[nodes[index]] = slot = self._slot()
            if nodes[index].users:
                elements.append((nodes[index].args[1], slot))
        self._slots[node] = target = self._slot() if fused < len(node.users) else -1
        free = [slot for used in freed if (slot := self._slots[used]) >= 0]
        self._calls.append((function, read, keywords, free, target, elements))

    def _reader(self, argument: Any) -> _Read:
        """Return a function that reads a value, or builds new lists and tuples of values."""
        slots: list[int] = []
        template = self._template(argument, slots)
        read = operator.itemgetter(*slots) if slots else None
        if template == _VALUE:
            return read  # type: ignore[return-value]
        if len(slots) > 1 and template == f"({_ELEMENT * len(slots)})":
            return read  # type: ignore[return-value]
        if len(slots) == 1:
            build_one, (slot,) = _builder(template), slots
            return lambda frame: build_one(frame[slot])
        build = _builder(template) if len(slots) <= _MAX_CACHED_SLOTS else _builder.__wrapped__(template)
        return (lambda frame: build(*read(frame))) if read is not None else (lambda frame: build())

    def _template(self, argument: Any, slots: list[int]) -> str:
        """Return the argument as source, with `_VALUE` per value, and append their slots to ``slots``."""
        kind = type(argument)
        if kind is fx.Node:
            slots.append(self._slots[argument])
            return _VALUE
        if kind in _SEQUENCES:
            parts, initial = [], self._initial
            for element in argument:
                if element is None or element is True or element is False:  # these add few distinct templates
                    parts.append(f"{element}, ")
                elif type(element) is fx.Node:
                    slots.append(self._slots[element])
                    parts.append(_ELEMENT)
                elif type(element) in _CONSTANTS:
                    slots.append(len(initial))
                    initial.append(element)
                    parts.append(_ELEMENT)
                else:
                    parts.append(f"{self._template(element, slots)}, ")
            inside = "".join(parts)
            return f"({inside})" if kind is tuple else f"[{inside}]"
        if kind in _DICTS and all(isinstance(key, str) for key in argument):
            items = [f"{key!r}: {self._template(element, slots)}, " for key, element in argument.items()]
            return f"{{{''.join(items)}}}"
        if kind is slice:
            ends = (argument.start, argument.stop, argument.step)
            return f"slice({''.join([f'{self._template(end, slots)}, ' for end in ends])})"
        slots.append(self._slot(argument))
        return _VALUE

    def run(self, *arguments: Any) -> Any:
        """Run the graph."""
        frame = self._initial.copy()
        frame[: len(arguments)] = arguments
        for argument, load in zip(arguments, self._loads, strict=True):
            if load is not None:
                frame[load[1]] = load[0](argument)
        argument = arguments = ()
        for function, read, keywords, freed, target, elements in self._calls:
            args = read(frame)
            named = None if keywords is None else keywords(frame)
            for slot in freed:
                frame[slot] = None
            result = function(*args) if named is None else function(*args, **named)
            if target >= 0:
                frame[target] = result
            for index, slot in elements:
                frame[slot] = result[index]
            args = named = result = None
        return self._results(frame)


def _tuple_getter(indices: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads the elements at ``indices``, always as a tuple."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    if not indices:
        return lambda values: ()
    (only,) = indices
    return lambda values: (values[only],)


def _call_method(name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(value, name)(*args, **kwargs)


def _is_element(node: fx.Node) -> bool:
    return node.target is operator.getitem and type(node.args[1]) is int


def _may_be_positional(function: Any, count: int, named: dict[str, Any]) -> bool:
    """Whether these keywords are the parameters after the first ``count``.

    Passed by position, arguments have one reference less than in a call with keywords.
    """
    code = getattr(function, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    return names[count : count + len(named)] == tuple(named)


@functools.lru_cache(256)
def _builder(template: str) -> Callable[..., Any]:
    """Return a function of as many values as ``template`` has `_VALUE`. Even long graphs have few templates.

    >>> _builder(f"([{_VALUE}, ], {_VALUE}, )")(1, 2)
    ([1], 2)
    """
    parts = template.split(_VALUE)
    names = [f"v{number}" for number in range(len(parts) - 1)]
    body = "".join(part + name for part, name in zip(parts, [*names, ""], strict=True))
    return eval(f"lambda {', '.join(names)}: {body}")  # type: ignore[no-any-return]


def last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return, per node, the values that are not used after it."""
    last: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                last.setdefault(node, []).append(used)
    return last
