"""Classify the nodes of a joint graph: which pass needs each node, and where it may be computed.

A joint graph computes a function and its gradients at once. Every node falls into one of three classes:
*forward* (a forward output depends on it, or it has an effect that must happen then), *backward* (it depends
on a tangent, so it cannot be saved), and *free* (only gradients need it, and it may be computed in either
pass).
"""

import dataclasses
from typing import Any

import torch
import torch.fx as fx

from fake.seam.dispatch import storage_of
from fxpasses.partitioner import _torch
from fxpasses.partitioner.cost import is_getitem
from fxpasses.partitioner.errors import PartitionError


def number_values(nodes: list[fx.Node], index: dict[fx.Node, int], outputs: list[Any]) -> list[int]:
    """Find the first node that computes the same value as each node.

    Some calls are never considered equal: RNG calls, operators with an effect, mutations, and calls on
    different sides of a mutation. Values that share storage with an output are kept apart, too, because the
    caller may tell them apart.

    Args:
        nodes: all nodes except the output, in graph order.
        index: the position of each node in ``nodes``.
        outputs: the values that the graph returns, including constants.

    Returns:
        For each node, the position of the first node with its value; its own position if there is no earlier
        one.
    """
    first = list(range(len(nodes)))
    seen: dict[object, int] = {}
    returned = {s for node in outputs if isinstance(node, fx.Node) and (s := _storage(node)) is not None}
    writes = 0
    for i, node in enumerate(nodes):
        if node.op != "call_function":
            continue
        target: Any = node.target
        if not isinstance(target, _torch.OpOverload):
            if not _torch.is_sym_node(node) and not is_getitem(node):
                continue
        elif target._schema.is_mutable:
            writes += 1
            continue
        elif (
            torch.Tag.nondeterministic_seeded in target.tags
            or node.is_impure()
            or target.overloadpacket in _UNINITIALIZED
            or "unbacked_bindings" in node.meta
        ):
            continue
        if returned and _storage(node) in returned:
            continue
        key = (target, writes, _key(node.args, index, first), _key(node.kwargs, index, first))
        try:
            first[i] = seen.setdefault(key, i)
        except TypeError:  # an unhashable argument, such as a symbolic number; not worth more effort
            continue
    return first


_UNINITIALIZED = frozenset(
    [torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty]
)


def _key(value: Any, index: dict[fx.Node, int], first: list[int]) -> object:
    """`value` with nodes replaced by their value's number. Keeps types, because 1, 1.0 and True are equal."""
    if isinstance(value, fx.Node):
        return ("node", first[index[value]])
    if isinstance(value, list | tuple):
        return ("list", *[_key(item, index, first) for item in value])
    if isinstance(value, dict):
        return ("dict", *[(name, _key(item, index, first)) for name, item in value.items()])
    if isinstance(value, slice):
        return ("slice", _key((value.start, value.stop, value.step), index, first))
    if isinstance(value, float):
        return ("float", repr(value))  # -0.0 equals 0.0, and nan does not equal itself
    return (type(value), value)


def _storage(node: fx.Node) -> int | None:
    """Identify the storage of the node's value; None if it has none."""
    value = node.meta.get("val")
    try:
        return storage_of(value) if isinstance(value, torch.Tensor) else None
    except NotImplementedError:  # a tensor subclass without storage
        return None


@dataclasses.dataclass(frozen=True)
class JointGraph:
    """A joint graph by number: node ``i`` is ``nodes[i]``, in graph order, without the output node.

    Attributes:
        nodes: all nodes except the output, in graph order.
        index: the number of each node. Nodes that compute the same value have the number of the first one.
        inputs: for each live node, the numbers of the nodes that it reads, ascending.
        users: for each node, the numbers of the live nodes that read it, ascending.
        live: whether the node has an effect or an output depends on it. Nodes that compute the value of an
            earlier node are not live.
        in_forward: whether the forward pass must compute it, whatever is saved.
        in_backward: whether it depends on something that only the backward pass has.
        tangent_free_outputs: numbers of the nodes that the backward graph returns although no tangent
            reaches them.
        primals: the forward graph's inputs, without tangents and random-number seeds.
        outputs: the joint graph's outputs, including ``None`` and constants, those of the forward pass first.
        output_descriptions: AOTAutograd's descriptors of the outputs, None where it has none.
        num_forward_outputs: how many of the outputs belong to the forward pass.
        static_inputs: numbers of the inputs that live as long as the model (parameters, buffers).
        mutated_inputs: numbers of the inputs that are overwritten in the forward pass or right after it.
    """

    nodes: list[fx.Node]
    index: dict[fx.Node, int]
    inputs: list[list[int]]
    users: list[list[int]]
    live: bytearray
    in_forward: bytearray
    in_backward: bytearray
    tangent_free_outputs: list[int]
    primals: list[int]
    outputs: list[Any]
    output_descriptions: list[Any]
    num_forward_outputs: int
    static_inputs: frozenset[int]
    mutated_inputs: frozenset[int]

    @property
    def forward_outputs(self) -> list[Any]:
        """The outputs that the forward pass returns to its caller."""
        return self.outputs[: self.num_forward_outputs]

    @property
    def has_backward(self) -> bool:
        """Whether there is anything to compute in a backward pass."""
        return bool(self.tangent_free_outputs) or any(self.in_backward)


def read_joint_graph(
    joint: fx.GraphModule, num_fwd_outputs: int, static_input_indices: list[int] | None
) -> JointGraph:
    """Number and classify the nodes of `joint`.

    Args:
        joint: AOTAutograd's joint module, with placeholders ``primals*``, ``tangents*`` and random-number
            seeds.
        num_fwd_outputs: how many of its outputs belong to the forward pass. The rest are gradients.
        static_input_indices: positions among the primals of inputs that outlive the backward pass.
    """
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    index = {node: i for i, node in enumerate(nodes)}
    outputs, descriptions = _torch.outputs_of(joint)
    if _torch.functorch_config.cse:
        first = number_values(nodes, index, outputs)
        index = {node: first[i] for i, node in enumerate(nodes)}
    inputs = [
        sorted({index[n] for n in node.all_input_nodes}) if index[node] == i else []
        for i, node in enumerate(nodes)
    ]
    returned = [index[node] for node in outputs if isinstance(node, fx.Node)]
    num_returned_forward = sum(isinstance(node, fx.Node) for node in outputs[:num_fwd_outputs])

    in_backward = bytearray(len(nodes))
    in_forward = bytearray(len(nodes))
    live = bytearray(len(nodes))
    overwritten: set[int] = set()
    kept_for_backward: set[int] = set()
    for i, node in enumerate(nodes):
        if node.op == "placeholder":
            in_backward[i] = _torch.is_tangent(node) or _torch.is_backward_seed(node)
            live[i] = 1
        elif node.op == "call_function" and index[node] == i:
            live[i] = node.is_impure()
            if (
                any(in_backward[j] for j in inputs[i])
                or _torch.must_be_in_backward(node)
                or (live[i] and _torch.tagged_backward(node))
            ):
                in_backward[i] = 1
                kept_for_backward.update(_mutated_nodes(node, index))
            elif live[i] or _torch.must_be_in_forward(node):
                live[i] = in_forward[i] = 1
                overwritten.update(_mutated_nodes(node, index))
    for k, node in enumerate(outputs[:num_fwd_outputs]):
        if isinstance(node, fx.Node):
            outputs[k] = node = _forward_value(node, index, in_backward)
            in_forward[index[node]] = 1
    for i in returned:
        live[i] = 1
    for i in range(len(nodes) - 1, -1, -1):
        for j in inputs[i]:
            if in_forward[i]:
                in_forward[j] = 1
            if live[i]:
                live[j] = 1
    users: list[list[int]] = [[] for _ in nodes]
    for i, reads in enumerate(inputs):
        if live[i]:
            for j in reads:
                users[j].append(i)
        else:
            reads.clear()

    primals = [i for i, node in enumerate(nodes) if _torch.is_primal(node)]
    static = frozenset(primals[k] for k in static_input_indices or () if k < len(primals))
    after = _torch.overwritten_inputs([nodes[i] for i in primals], descriptions[:num_fwd_outputs])
    overwritten.update(index[node] for node in after)
    return JointGraph(
        nodes,
        index,
        inputs,
        users,
        live,
        in_forward,
        in_backward,
        sorted({i for i in returned[num_returned_forward:] if not in_backward[i]}),
        primals,
        outputs,
        descriptions,
        num_fwd_outputs,
        static,
        frozenset(i for i in overwritten - kept_for_backward if nodes[i].op == "placeholder"),
    )


def _forward_value(node: fx.Node, index: dict[fx.Node, int], in_backward: bytearray) -> fx.Node:
    """The value that forward returns for an output: an input if the output is its state after backward."""
    while in_backward[index[node]] and node.op != "placeholder":
        behind = _torch.input_behind_backward_output(node)
        if not isinstance(behind, fx.Node):
            reason = "the forward pass returns it, and it is computed from gradients"
            raise PartitionError(node.name, reason, node.meta.get("stack_trace"))
        node = behind
    return node


def _mutated_nodes(node: fx.Node, index: dict[fx.Node, int]) -> list[int]:
    """Numbers of the nodes whose storage `node` writes to, according to its operator's schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(value, fx.Node):
                written.append(index[value])
    return written
