"""Facts about each node of a graph, compared by the search for repeated subgraphs.

A graph is read as the sequence of its calls. Each call gets a *token*. Two calls have the same token if they
call the same operator with the same constants on values of the same kind (shape, strides, dtype, device,
gradient, whether it is a parameter), under the same ambient autocast and gradient mode. How calls are wired
to each other is not part of the token; :func:`wiring` compares it for one subgraph.

Equal tokens and wiring must never describe different computations. So any call that is not known to be
comparable gets a unique token, which ends every repeated subgraph, and a reason.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from fake.seam.dtensor import is_plain_placement
from fxpasses.graphs.rewriting import attribute_of
from fxpasses.regional import _torch, _torch_dtensor
from fxpasses.regional._torch_dtensor import FUNCTIONAL
from fxpasses.regional.parameters import gathered_parameters, is_static
from fxpasses.regional.sizes import is_literal, literal, simplify_stride, sizes_of_inputs, value_of
from fxpasses.regional.writes import target_name

_FORBIDDEN_METHODS = frozenset(
    {
        "register_hook",
        "requires_grad_",
        "retain_grad",
        "backward",
        "set_",
        "resize_",
        "detach_",
        "share_memory_",
    }
    | {"untyped_storage", "__setattr__", "data_ptr"}
)
_FORBIDDEN_NAMES = re.compile(r"^(_assert|_check|manual_seed|set_rng_state|get_rng_state|trace_wrapped)")
_CONSTANT_TYPES = (int, float, bool, str, complex, type(None), type(Ellipsis))
_REPR_TYPES = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


@dataclass
class GraphFacts:
    """A graph as a sequence of calls.

    Attributes:
        calls: the calls, in order.
        position: each call's index in that order.
        tokens: equal numbers for calls that do the same in isolation.
        descriptions: each token as text without addresses, equal in every process.
        barriers: for each call, why it cannot be part of a region, or "".
        reads: for each call, the nodes in its arguments, in order, with repetitions.
        last_use: for each call, the index of its last reader; one past the end for an output.
        autocast: for each index, the autocast blocks that are open before it.
        grad_mode: for each index, the gradient mode that the graph has set before it (``None`` for the
            initial one).
        modules: for each call, the paths of its modules, outermost first, each with its address.
        returns_several: for each call, whether its value is a tuple or must be waited for.
        dynamic: whether any size is symbolic.
        grad_enabled: the gradient mode in which the graph starts.
        vmaps: for each index, the number of open ``vmap`` before it.
    """

    graph: fx.Graph
    calls: list[fx.Node]
    position: dict[fx.Node, int]
    tokens: list[int]
    descriptions: list[str]
    barriers: list[str]
    reads: list[list[fx.Node]]
    last_use: list[int]
    autocast: list[tuple[fx.Node, ...]]
    grad_mode: list[bool | None]
    modules: list[tuple[tuple[str, str], ...]]
    returns_several: list[bool]
    dynamic: bool
    grad_enabled: bool
    vmaps: list[int] = field(default_factory=list)

    def balanced(self, start: int, stop: int) -> bool:
        """Whether a subgraph restores autocast and gradient mode, and closes only what it opened.

        It must contain all of a ``vmap`` or none of it. It must not enable gradients either: a region called
        with gradients off records none.
        """
        around = self.autocast[start]
        modes = [self.grad_enabled if m is None else m for m in self.grad_mode[start : stop + 1]]
        return (
            (modes[0] or not any(modes))
            and not (self.vmaps[start] or self.vmaps[stop])
            and self.autocast[stop] == around
            and self.grad_mode[stop] == self.grad_mode[start]
            and all(self.autocast[i][: len(around)] == around for i in range(start, stop))
        )


def wiring(facts: GraphFacts, start: int, stop: int) -> tuple[tuple[int, ...], list[fx.Node]]:
    """Describe how the calls of a subgraph are connected.

    Two subgraphs with equal tokens compute the same function of their outside nodes exactly if their wires
    are equal.

    Args:
        facts: the graph.
        start: index of the first call.
        stop: index after the last call.

    Returns:
        One wire per argument (the index of a call in the subgraph, or a negative number for an outside node,
        -1 for the first), and the outside nodes in order of first use. Literal numbers count as constants.
    """
    outside: dict[fx.Node, int] = {}
    wires: list[int] = []
    position = facts.position
    for index in range(start, stop):
        for node in facts.reads[index]:
            at = position.get(node, -1)
            if start <= at < stop:
                wires.append(at - start)
            else:
                wires.append(-1 - outside.setdefault(node, len(outside)))
    return tuple(wires), list(outside)


def read_facts(gm: fx.GraphModule, calls: list[fx.Node] | None = None) -> GraphFacts:
    """Read a Dynamo graph, or an ATen graph with fake values.

    Args:
        gm: the graph.
        calls: the calls to read, in order; by default all except those that gather parameters.
    """
    sizes = sizes_of_inputs(gm.graph)
    if calls is None:
        outside = sizes.keys() | gathered_parameters(gm.graph)
        calls = [n for n in gm.graph.nodes if is_call(n) and n not in outside]
    position = {node: i for i, node in enumerate(calls)}
    reader = _Reader(gm, sizes)
    enabled = torch.is_grad_enabled()
    facts = GraphFacts(
        gm.graph, calls, position, [], [], [], [], [len(calls)] * len(calls), [], [], [], [], False, enabled
    )
    open_autocast: tuple[fx.Node, ...] = ()
    grad_mode: bool | None = None
    transformed, facts.vmaps = _torch.transform_nesting(calls)
    for index, node in enumerate(calls):
        facts.autocast.append(open_autocast)
        facts.grad_mode.append(grad_mode)
        reads: list[fx.Node] = []
        ambient = tuple(n.args for n in open_autocast), grad_mode
        token, description, barrier = reader.token(node, reads, ambient)
        if transformed[index]:
            barrier, token = "it is part of a function transform (grad, jvp)", reader.unique()
        facts.tokens.append(token)
        facts.descriptions.append(description)
        facts.barriers.append(barrier)
        facts.reads.append(reads)
        facts.modules.append(module_paths(node))
        facts.returns_several.append(_is_pending(node) or isinstance(value_of(node), (list, tuple)))
        if _torch.enters_autocast(node):
            open_autocast = (*open_autocast, node)
        elif _torch.exits_autocast(node):
            open_autocast = tuple(n for n in open_autocast if n is not node.args[0])
        elif _torch.sets_grad_mode(node):
            grad_mode = None if node.args[0] is enabled else bool(node.args[0])
    facts.autocast.append(open_autocast)
    facts.grad_mode.append(grad_mode)
    for i, node in enumerate(calls):
        users = (position.get(user, len(calls)) for user in node.users if not is_literal(user))
        facts.last_use[i] = max(users, default=i)
    facts.dynamic = reader.dynamic
    return facts


def is_call(node: fx.Node) -> bool:
    """Whether a node computes something."""
    return node.op not in ("placeholder", "get_attr", "output") and not is_literal(node)


def module_paths(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """Return the modules around a call, outermost first: path, and an address that tells calls apart."""
    stack = node.meta.get("nn_module_stack")
    if not isinstance(stack, dict):
        return ()
    return tuple((clean_path(str(entry[0])), str(key)) for key, entry in stack.items())


@functools.lru_cache(maxsize=10_000)
def clean_path(path: str) -> str:
    """Convert ``L['self'].blocks.0`` to ``blocks.0``.

    >>> clean_path("L['self']._modules['blocks']._modules['0'].attn")
    'blocks.0.attn'
    """
    path = re.sub(r"^[LG]\['[^']*'\]", "", path)
    path = re.sub(r"\.?_modules\['([^']*)'\]", r".\1", path)
    path = re.sub(r"\['?([^'\]]+)'?\]", r".\1", path)
    return path.strip(".")


class _NotComparable(Exception):
    """A constant or value that cannot be compared."""


class _Reader:
    """Computes the tokens of one graph."""

    def __init__(self, gm: fx.GraphModule, sizes: dict[fx.Node, fx.Node] | None = None) -> None:
        self._gm, self._equal_sizes = gm, sizes or {}
        self._numbers: dict[Any, int] = {}
        self._unique = 0
        self._values: dict[fx.Node, Any] = {}
        self._modules: dict[str, str] = {}
        self._meshes: list[Any] = []
        self.dynamic = False

    def unique(self) -> int:
        self._unique -= 1
        return self._unique

    def token(self, node: fx.Node, reads: list[fx.Node], ambient: Any) -> tuple[int, str, str]:
        """Compare a call with all earlier ones.

        Args:
            node: the call.
            reads: filled with the nodes in its arguments, in order.
            ambient: the autocast blocks and gradient mode around it.

        Returns:
            Its token, negative if unique; its description, equal in every process; and why it cannot be part
            of a region, or "".
        """
        try:
            self._refuse(node)
            key = (
                node.op,
                _target(node.target),
                tuple(self._constant(a, reads) for a in node.args),
                tuple((k, self._constant(v, reads)) for k, v in node.kwargs.items()),
                self._kind(node),
                tuple(self._kind(n) for n in reads),
                repr(ambient),
                self._offsets(node, reads),
            )
        except _NotComparable as unknown:
            reads[:] = node.all_input_nodes
            return self.unique(), "", str(unknown)
        # Functions of the same name may differ, so within a process the object itself decides.
        number = self._numbers.setdefault((key, id(node.target)), len(self._numbers))
        return number, key, ""  # type: ignore[return-value]

    def _refuse(self, node: fx.Node) -> None:
        target = node.target
        if node.op not in ("call_function", "call_method"):
            raise _NotComparable(f"it calls {node.op} {target}")
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        if node.op == "call_method" and name in _FORBIDDEN_METHODS:
            raise _NotComparable(f"it calls Tensor.{name}")
        if _FORBIDDEN_NAMES.match(str(name)):
            raise _NotComparable(f"it calls {name}")
        if isinstance(target, _torch.HigherOrderOperator) and not _torch.is_inlined_operator(target):
            raise _NotComparable(f"it calls the higher-order operator {target}")
        if isinstance(target, _torch.OpOverload) and (
            target.namespace == "c10d" or (target.namespace in FUNCTIONAL and target._schema.is_mutable)
        ):
            raise _NotComparable("it communicates with other processes in place")

    def _offsets(self, node: fx.Node, reads: Sequence[fx.Node]) -> tuple[Any, ...]:
        """Return the storage offsets of the operands, for the few calls that depend on them."""
        if not uses_storage_offset(node):
            return ()
        values = map(value_of, reads)
        return tuple(self._size(v.storage_offset()) for v in values if isinstance(v, torch.Tensor))

    def _constant(self, value: Any, reads: list[fx.Node]) -> Any:
        if isinstance(value, fx.Node):
            return self._node(value, reads)
        if isinstance(value, _CONSTANT_TYPES):
            return type(value).__name__, repr(value)
        if isinstance(value, _REPR_TYPES):
            return repr(value)
        if is_plain_placement(value):
            return type(value).__name__, repr(value)
        if _torch_dtensor.mesh_of(value) is not None:
            return self._mesh(value)
        if isinstance(value, (list, tuple)):
            return type(value).__name__, tuple(self._constant(v, reads) for v in value)
        if isinstance(value, dict):
            return "dict", tuple((str(k), self._constant(v, reads)) for k, v in value.items())
        if isinstance(value, slice):
            return "slice", tuple(self._constant(v, reads) for v in (value.start, value.stop, value.step))
        if (
            callable(value)
            and "<" not in getattr(value, "__qualname__", "<")
            and not hasattr(value, "__self__")
        ):
            return _target(value)
        raise _NotComparable(f"an argument of type {type(value).__name__} cannot be compared")

    def _node(self, node: fx.Node, reads: list[fx.Node]) -> Any:
        if is_literal(node):
            return "number", repr(literal(node))
        if _torch_dtensor.mesh_of(value_of(node)) is not None:
            return self._mesh(value_of(node))
        if node.op == "get_attr":
            attribute = attribute_of(node, self._gm)
            if isinstance(attribute, fx.GraphModule):
                return "graph", self._graph(str(node.target), attribute)
            if not isinstance(attribute, torch.Tensor):
                raise _NotComparable(
                    f"it reads the attribute {node.target} of type {type(attribute).__name__}"
                )
        reads.append(self._equal_sizes.get(node, node))
        return "node"

    def _graph(self, name: str, gm: fx.GraphModule) -> Any:
        """Return a nested graph as text: its calls with their wiring."""
        if name not in self._modules:
            number_of: dict[fx.Node, int] = {}
            lines = []
            nested = _Reader(gm)
            for number, node in enumerate(gm.graph.nodes):
                number_of[node] = number
                reads: list[fx.Node] = []
                if node.op == "get_attr" and not isinstance(attribute_of(node, gm), fx.GraphModule):
                    raise _NotComparable("a nested graph has tensors of its own")
                if node.op not in ("placeholder", "output", "get_attr"):
                    nested._refuse(node)
                constants = (
                    nested._constant(list(node.args), reads),
                    nested._constant(dict(node.kwargs), reads),
                )
                target = "" if node.op in ("placeholder", "output", "get_attr") else _target(node.target)
                lines.append(
                    (node.op, target, constants, tuple(number_of[n] for n in reads), nested._kind(node))
                )
            policy = _torch.checkpoint_policy(gm)
            self._modules[name] = repr((lines, policy and (_target(policy), id(policy))))
        return self._modules[name]

    def _kind(self, node: fx.Node) -> Any:
        kind = self._values.get(node)
        if kind is None:
            kind = self._describe(value_of(node))
            if node.op == "get_attr" and kind == ("NoneType",):
                attribute = attribute_of(node, self._gm)
                kind = self._describe(attribute) if isinstance(attribute, torch.Tensor) else kind
            if is_static(node):
                value = value_of(node)
                tensor = isinstance(value, torch.Tensor)
                kind = ("parameter", kind, self._size(value.storage_offset()) if tensor else 0)
            self._values[node] = kind
        return kind

    def _describe(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_nested or value.is_quantized:
                raise _NotComparable("a value is sparse, nested or quantized")
            if _torch_dtensor.is_dtensor(value):
                return self._describe_dtensor(value)
            if isinstance(value, _torch.FakeTensor) or type(value) in (torch.Tensor, torch.nn.Parameter):
                return (
                    str(value.dtype),
                    str(value.device),
                    self._sizes(value.shape),
                    tuple(map(simplify_stride, self._sizes(value.stride()))),
                    value.requires_grad,
                    value.is_conj() or value.is_neg(),
                )
            raise _NotComparable(f"a value is a {type(value).__name__}")
        if isinstance(value, (torch.SymInt, torch.SymBool)):
            return "size", self._size(value)
        if isinstance(value, torch.SymFloat):
            if _torch.depends_only_on_sizes(value):
                return "float of sizes", self._size(value)
            if isinstance(_torch.expression(value), sympy.Basic):
                raise _NotComparable("it computes with a float that may change from call to call")
            return "float", repr(_torch.expression(value))
        if isinstance(value, (list, tuple)):
            return tuple(self._describe(v) for v in value)
        return (type(value).__name__,)

    def _describe_dtensor(self, value: Any) -> Any:
        placed = _torch_dtensor.mesh_and_placements(value)
        if placed is None:
            raise _NotComparable("a DTensor is placed in a way that its text does not describe")
        mesh, placements = placed
        return (
            "DTensor",
            self._mesh(mesh),
            repr(placements),
            self._sizes(value.shape),
            self._sizes(value.stride()),
            value.requires_grad,
            self._describe(_torch_dtensor.local_of(value)),
        )

    def _mesh(self, value: Any) -> Any:
        """Describe a device mesh by identity, because equal meshes may have different process groups."""
        mesh = _torch_dtensor.mesh_of(value)
        if not any(known is mesh for known in self._meshes):
            self._meshes.append(mesh)
        number = next(i for i, known in enumerate(self._meshes) if known is mesh)
        return "mesh", number, repr(mesh)

    def _sizes(self, sizes: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(s if type(s) is int else self._size(s) for s in sizes)

    def _size(self, size: Any) -> Any:
        if type(size) is int:
            return size
        expr = _torch.expression(size)
        if isinstance(expr, sympy.Basic):
            self.dynamic = True
            if _torch.has_unbacked(size):
                raise _NotComparable("a size depends on data")
        return expr


def _is_pending(node: fx.Node) -> bool:
    """Whether a call is a collective whose result must be waited for."""
    target = node.target
    return (
        isinstance(target, _torch.OpOverload)
        and target.namespace in FUNCTIONAL
        and "wait" not in target._schema.name
    )


def uses_storage_offset(node: fx.Node) -> bool:
    """Whether a call depends on the storage offset of an operand."""
    return target_name(node).startswith(("as_strided", "storage_offset"))


def _target(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, (_torch.OpOverload, _torch.OpOverloadPacket, _torch.HigherOrderOperator)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '') or target!r}"
