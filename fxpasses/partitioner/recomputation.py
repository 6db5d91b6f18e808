"""Which operators the backward pass may run again, and at what kind of price."""

import dataclasses
import enum
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpasses.graphs.rewriting import attribute_of
from fxpasses.partitioner import _torch
from fxpasses.partitioner.classify import JointGraph
from fxpasses.partitioner.cost import CostModel, is_view

REDUCTION_RATIO = 4
"""An operation counts as a reduction if its output is this many times smaller than its inputs."""


class Terms(enum.Enum):
    """The terms on which an operation may run again in the backward pass."""

    FREE = "free"
    """Always, at no price worth counting: views, symbols, cheap elementwise work that fuses into readers."""
    PRICED = "priced"
    """Only to meet a memory budget, at the price of its FLOPs."""
    NEVER = "never"
    """Never: running it twice would change the program."""
    ALWAYS = "always"
    """The user put it in a checkpointed region: it is recomputed at any cost."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The terms for one node, and why it got them."""

    terms: Terms
    reason: str


RANDOM = "calls the RNG"
COLLECTIVE = "a collective"
FREE = Verdict(Terms.FREE, "cheap")
INPUT = Verdict(Terms.NEVER, "an input of the graph")


@dataclasses.dataclass(frozen=True)
class RecomputePolicy:
    """Which cheap operations have their results saved anyway at a memory budget of 1.

    The defaults are torch's (`torch._functorch.config`), so that one switch controls both partitioners.

    Attributes:
        save_reductions: save results that are much smaller than the inputs they are computed from.
        save_materialized: save values that a backward operation reads from memory anyway. A matmul does; an
            elementwise operation does not, because it computes its operand on the fly.
        allow_list: treat operations that are not known to be cheap as expensive.
        parameters_are_free: inputs that outlive the backward pass cost nothing to save.
    """

    save_reductions: bool = True
    save_materialized: bool = True
    allow_list: bool = True
    parameters_are_free: bool = True

    @classmethod
    def from_torch_config(cls) -> "RecomputePolicy":
        """The policy that the switches in `torch._functorch.config` select."""
        config = _torch.functorch_config
        aggressive = config.aggressive_recomputation
        return cls(
            save_reductions=config.ban_recompute_reductions,
            save_materialized=config.ban_recompute_materialized_backward and not aggressive,
            allow_list=config.ban_recompute_not_in_allowlist and not aggressive,
            parameters_are_free=config.treat_parameters_as_free_to_save,
        )


def recompute_verdicts(graph: JointGraph, cost: CostModel, policy: RecomputePolicy) -> list[Verdict]:
    """Decide for each node on which terms the backward pass may recompute it.

    Args:
        graph: the joint graph.
        cost: bytes and FLOPs of its nodes.
        policy: which cheap operations are worth saving.

    Returns:
        A verdict for every node, in graph order.
    """
    table = _operator_table()
    result = []
    for i, node in enumerate(graph.nodes):
        if node.op == "placeholder":
            verdict = INPUT
        elif _torch.must_recompute(node):
            verdict = Verdict(Terms.ALWAYS, "in a checkpointed region")
        elif node.op != "call_function" or not graph.in_forward[i]:
            verdict = FREE  # a constant, or work that runs once in either pass
        else:
            verdict = _verdict(node, graph, cost, policy, table)
        result.append(verdict)
    return result


def _verdict(
    node: fx.Node, graph: JointGraph, cost: CostModel, policy: RecomputePolicy, table: "_OperatorTable"
) -> Verdict:
    """Decide for a call of the forward pass. Facts that forbid it come first, then what it costs."""
    if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
        return Verdict(Terms.NEVER, "marked to be saved")
    if node.target is operator.getitem:
        return FREE
    target: Any = node.target
    forbidden = table.no_rerun_reason(target)
    if forbidden == RANDOM and _dropout_is_off(node):
        return Verdict(Terms.PRICED, "expensive")
    if forbidden == COLLECTIVE and _torch.functorch_config.unsafe_allow_optimization_of_collectives:
        return Verdict(Terms.PRICED, "expensive")
    if forbidden is not None:
        return Verdict(Terms.NEVER, forbidden)
    if _torch.is_sym_node(node):
        return FREE
    if "unbacked_bindings" in node.meta:
        return Verdict(Terms.NEVER, "its output's shape depends on data")
    if _torch.is_opaque(node):
        return Verdict(Terms.NEVER, "makes an opaque object")
    if isinstance(target, _torch.HigherOrderOperator):
        inner = _subgraphs_no_rerun_reason(node, table)
        return (
            Verdict(Terms.NEVER, inner)
            if inner
            else Verdict(Terms.PRICED, "runs a graph or a kernel of its own")
        )
    if is_view(node) or target in table.copies_of_constants:
        return FREE
    if not table.is_cheap(target) if policy.allow_list else table.is_expensive(target):
        return Verdict(Terms.PRICED, "expensive")
    if policy.save_materialized and _is_materialized_in_backward(graph.index[node], graph, table):
        return Verdict(Terms.PRICED, "the backward pass reads it from memory")
    if policy.save_reductions:
        reads = sum(cost.bytes_of(argument) for argument in node.args if isinstance(argument, fx.Node))
        if cost.bytes_of(node) * REDUCTION_RATIO < reads:
            return Verdict(Terms.PRICED, "a reduction")
    return FREE


def _dropout_is_off(node: fx.Node) -> bool:
    """Whether an attention kernel that may call the RNG has a dropout probability of zero."""
    schema = node.target._schema  # type: ignore[union-attr]
    for position, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p")
            return bool((argument.default_value if given is None else given) == 0)
    return False


def _is_materialized_in_backward(i: int, graph: JointGraph, table: "_OperatorTable") -> bool:
    """Whether a non-forward operation reads the value, or a view of it, without fusing with it."""
    stack, seen = [i], {i}
    while stack:
        current = stack.pop()
        for user in graph.users[current]:
            reader = graph.nodes[user]
            if not graph.in_forward[user] and not table.fuses(graph.nodes[current], reader):
                return True
            if user not in seen and table.is_view_packet(reader.target):
                seen.add(user)
                stack.append(user)
    return False


def _subgraphs_no_rerun_reason(node: fx.Node, table: "_OperatorTable") -> str | None:
    """Why a higher-order operator may not run twice, considering the graphs that it calls; None if it may."""
    if _torch.is_with_effects(node):
        return "has an effect"
    for argument in node.all_input_nodes:
        module = attribute_of(argument) if argument.op == "get_attr" else None
        if isinstance(module, fx.GraphModule):
            for inner in module.graph.nodes:
                if inner.op == "call_function" and (reason := table.no_rerun_reason(inner.target)):
                    return reason
                if isinstance(inner.target, _torch.HigherOrderOperator) and (
                    reason := _subgraphs_no_rerun_reason(inner, table)
                ):
                    return reason
    return None


class _OperatorTable:
    """Torch's lists of cheap, fusible and expensive operators, and what operator schemas and tags imply."""

    def __init__(self) -> None:
        lists = _torch.get_default_op_list()
        self._cheap = frozenset(lists.recomputable_ops)
        self._fusible = frozenset(lists.fusible_ops)
        self._expensive = frozenset(lists.compute_intensive_ops)
        self._views = frozenset(lists.view_ops)
        aten = torch.ops.aten
        self.copies_of_constants = frozenset([aten.lift_fresh_copy.default, aten.lift_fresh.default])
        self._never: dict[object, str | None] = {}

    def is_cheap(self, target: object) -> bool:
        return _packet(target) in self._cheap

    def is_expensive(self, target: object) -> bool:
        return _packet(target) in self._expensive

    def is_view_packet(self, target: object) -> bool:
        return _packet(target) in self._views

    def fuses(self, producer: fx.Node, reader: fx.Node) -> bool:
        """Whether Inductor computes `producer` inside `reader`'s loop instead of writing it to memory."""
        packet = _packet(reader.target)
        if packet is torch.ops.aten.cat:
            return True  # a cat writes its operands directly into its output
        if reader.target in _FUNCTIONALIZED:
            return _is_cloned_by(producer, reader)
        if producer.target is operator.getitem and _comes_from_user_kernel(producer):
            return False
        return packet in self._fusible and _packet(producer.target) in self._fusible

    def no_rerun_reason(self, target: Any) -> str | None:
        """Why an operator may never run twice, or None."""
        if target not in self._never:
            self._never[target] = _no_rerun_reason(target)
        return self._never[target]


@functools.cache
def _operator_table() -> _OperatorTable:
    return _OperatorTable()


def _packet(target: Any) -> Any:
    return getattr(target, "overloadpacket", target)


def _no_rerun_reason(target: Any) -> str | None:
    if isinstance(target, _torch.HigherOrderOperator):
        return _NEVER_HIGHER_ORDER.get(target.name())
    if not isinstance(target, _torch.OpOverload):
        if isinstance(target, str) or _is_symbol_function(target):
            return None
        return "not an operator"
    if target.namespace in ("_c10d_functional", "c10d_functional", "_dtensor"):
        return COLLECTIVE
    if target._schema.is_mutable:
        return "writes to an argument"
    if torch.Tag.nondeterministic_seeded in target.tags:
        return RANDOM
    if torch.Tag.data_dependent_output in target.tags or torch.Tag.dynamic_output_shape in target.tags:
        return "its output's shape depends on data"
    return None


def _is_symbol_function(target: Callable[..., Any]) -> bool:
    return getattr(target, "__module__", None) in ("_operator", "math", "torch", "builtins") or getattr(
        target, "__module__", ""
    ).startswith("torch.")


_NEVER_HIGHER_ORDER = {
    "with_effects": "has an effect",
    "call_torchbind": "calls a method of an opaque object",
    "run_and_save_rng_state": RANDOM,
    "graphsafe_run_with_rng_state": RANDOM,
}

_FUNCTIONALIZED = frozenset(
    operator_
    for name in ("auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional")
    if (operator_ := getattr(torch.ops.higher_order, name, None)) is not None
)


def _is_cloned_by(producer: fx.Node, reader: fx.Node) -> bool:
    """Whether a functionalized kernel clones `producer` before writing to it: the copy fuses with it."""
    names: Any = reader.kwargs.get("tensors_to_clone")
    if names is not None:  # a Triton kernel
        arguments: Any = reader.kwargs["kwargs"]
        return any(arguments[name] is producer for name in names)
    schema = getattr(reader.args[0], "_schema", None)
    if schema is None:
        return False
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = reader.kwargs.get(argument.name)
            if value is producer or (isinstance(value, list) and producer in value):
                return True
    return False


def _comes_from_user_kernel(producer: fx.Node) -> bool:
    parent = producer.args[0]
    return (
        isinstance(parent, fx.Node)
        and parent.target is torch.ops.higher_order.triton_kernel_wrapper_functional
    )
