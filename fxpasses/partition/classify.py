"""What each node of a joint graph is to the two passes: who needs it, and where it may be computed.

A joint graph computes a function and its gradients at once. Every node falls in one of three classes:
*forward* (a forward output depends on it, or it has an effect that must happen then), *backward* (it depends on a
tangent, so it cannot be saved), and *free* (neither: only gradients need it, and it may be computed in either pass).
"""

import dataclasses

import torch.fx as fx

from . import _torch

__all__ = ["JointGraph", "read_joint_graph"]


@dataclasses.dataclass(frozen=True)
class JointGraph:
    """A joint graph by number: node ``i`` is ``nodes[i]``, in graph order, the output node left out.

    Attributes:
        nodes: all nodes but the output, in graph order.
        index: number of each node.
        inputs: for each node, the numbers of the nodes that it reads, ascending.
        users: for each node, the numbers of the nodes that read it, ascending.
        in_forward: whether the forward pass must compute it whatever is saved.
        in_backward: whether it depends on something that only the backward pass has.
        wanted: numbers of the nodes that the backward graph returns or must run although no tangent reaches them.
        primals: the forward graph's inputs, tangents and seeds of the backward pass excluded.
        forward_outputs: what the forward graph returns to its caller, ``None`` and constants included.
        static_inputs: numbers of the inputs that live as long as the model (parameters, buffers).
        mutated_inputs: numbers of the inputs that are overwritten in the forward pass or right after it.
    """

    nodes: list[fx.Node]
    index: dict[fx.Node, int]
    inputs: list[list[int]]
    users: list[list[int]]
    in_forward: bytearray
    in_backward: bytearray
    wanted: list[int]
    primals: list[int]
    forward_outputs: list[object]
    static_inputs: frozenset[int]
    mutated_inputs: frozenset[int]

    @property
    def has_backward(self) -> bool:
        """Whether there is anything at all to compute in a backward pass."""
        return bool(self.wanted) or any(self.in_backward)


def read_joint_graph(
    joint: fx.GraphModule, num_fwd_outputs: int, static_input_indices: list[int] | None
) -> JointGraph:
    """Number the nodes of `joint` and classify them.

    Args:
        joint: AOTAutograd's joint module: placeholders named ``primals*``, ``tangents*`` and random-number seeds.
        num_fwd_outputs: how many of its outputs belong to the forward pass; the rest are gradients.
        static_input_indices: positions among the primals of inputs that outlive the backward pass.
    """
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    index = {node: i for i, node in enumerate(nodes)}
    inputs = [sorted(index[n] for n in node.all_input_nodes) for node in nodes]
    users: list[list[int]] = [[] for _ in nodes]
    for i, reads in enumerate(inputs):
        for j in reads:
            users[j].append(i)

    in_backward = bytearray(len(nodes))
    in_forward = bytearray(len(nodes))
    wanted: list[int] = []
    mutated: set[int] = set()
    for i, node in enumerate(nodes):
        if node.op == "placeholder":
            in_backward[i] = _torch.is_tangent(node) or _torch.is_backward_seed(node)
        elif any(in_backward[j] for j in inputs[i]):
            in_backward[i] = 1
        elif node.op == "call_function":
            if _torch.must_be_in_backward(node):
                in_backward[i] = 1
            elif _torch.must_be_in_forward(node) or (node.is_impure() and not _torch.tagged_backward(node)):
                in_forward[i] = 1
                mutated.update(_mutated_inputs(node, index))

    forward_outputs, backward_outputs, descriptions, _ = _torch.extract_forward_backward_outputs(
        joint, num_fwd_outputs=num_fwd_outputs
    )
    for output in forward_outputs:
        if isinstance(output, fx.Node):
            in_forward[index[output]] = 1
    for i in range(len(nodes) - 1, -1, -1):
        if in_forward[i]:
            for j in inputs[i]:
                in_forward[j] = 1
    for output in backward_outputs:
        if isinstance(output, fx.Node) and not in_backward[index[output]]:
            wanted.append(index[output])

    primals = [i for i, node in enumerate(nodes) if _torch.is_primal(node)]
    overwritten = _torch.overwritten_inputs([nodes[i] for i in primals], descriptions)
    mutated.update(index[node] for node in overwritten)
    static = frozenset(primals[k] for k in static_input_indices or () if k < len(primals))
    return JointGraph(
        nodes,
        index,
        inputs,
        users,
        in_forward,
        in_backward,
        sorted(set(wanted)),
        primals,
        list(forward_outputs),
        static,
        frozenset(i for i in mutated if nodes[i].op == "placeholder"),
    )


def _mutated_inputs(node: fx.Node, index: dict[fx.Node, int]) -> list[int]:
    """Numbers of the nodes whose storage an operator's schema says `node` writes to."""
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
