"""The cost model: decide whether a repeated subgraph is worth compiling on its own.

The benefit is the time that compiling its copies would take. The costs are the time to trace and lower each
call of the region, the overhead of each call at run time, and the bytes written and read again at the
boundary because pointwise work is no longer fused across it. Run time is counted for the number of steps that
a compiled model is expected to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpasses.graphs.rewriting import nbytes_of
from fxpasses.regional.facts import GraphFacts, value_of
from fxpasses.regional.parameters import is_static
from fxpasses.regional.writes import target_name

_CHEAP = frozenset(
    {
        "getitem",
        "size",
        "view",
        "reshape",
        "permute",
        "transpose",
        "t",
        "chunk",
        "split",
        "unsqueeze",
        "squeeze",
        "expand",
    }
    | {
        "flatten",
        "unflatten",
        "contiguous",
        "to",
        "mul_sizes",
        "unbind",
        "select",
        "slice",
        "item",
        "dim",
        "detach",
        "from_local",
        "to_local",
    }
)
_OWN_KERNEL_NAMES = (
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv", "scaled_dot_product", "embedding", "sdpa", "einsum",
    "tag_activation_checkpoint",
)  # fmt: skip

_COMPOSITE_WEIGHTS = {
    "tag_activation_checkpoint": 12.0,
    "_transformer_encoder_layer_fwd": 12.0,
    "_native_multi_head_attention": 6.0,
    "gru_cell": 10.0,
    "lstm_cell": 10.0,
    "rnn_tanh_cell": 4.0,
    "rnn_relu_cell": 4.0,
    "gru": 30.0,
    "lstm": 30.0,
    "rnn_tanh": 12.0,
    "rnn_relu": 12.0,
}
"""Number of computing nodes that one such call decomposes into."""


@dataclass(frozen=True)
class Estimate:
    """Estimated savings and costs of a region.

    Attributes:
        compile_seconds: time to compile one copy.
        saved_seconds: compile time saved for the whole graph.
        run_seconds: time lost to calls and missing fusion over the expected number of steps.
        kept_bytes: upper bound on extra memory saved for the backward pass: values that enter a copy, which
            whole-graph compilation could recompute.
    """

    compile_seconds: float
    saved_seconds: float
    run_seconds: float
    kept_bytes: int = 0

    @property
    def gain(self) -> float:
        """Seconds gained over the life of the compiled model."""
        return self.saved_seconds - self.run_seconds


@dataclass(frozen=True)
class CostModel:
    """Constants of the estimate, measured with Inductor on a 12-layer GPT with one thread.

    Attributes:
        seconds_per_node: time to compile one computing node of a Dynamo graph, forward and backward.
        dynamic_factor: factor on that time with symbolic sizes.
        seconds_per_call: time to trace and lower one call of a region.
        call_microseconds: run-time overhead of a call, forward and backward.
        bytes_per_second: memory bandwidth, by device type.
        steps: how often the compiled model is expected to run.
        fewest: minimum number of copies for a region.
        fewest_fused: the same for a subgraph without a kernel of its own (only pointwise work and
            reductions). Inductor fuses that with its surroundings, and a region call takes longer than the
            computation.
        fuses_beside: whether the compiler computes independent subgraphs of that kind in one kernel, such as
            an optimizer's updates of parameters.
        least_saved: minimum seconds that a region must save.
        least_share: minimum share of a graph's compile time that its regions together must save, because each
            is a barrier in the graph.
    """

    seconds_per_node: float = 0.04
    dynamic_factor: float = 2.2
    seconds_per_call: float = 0.025
    call_microseconds: float = 25.0
    bytes_per_second_cpu: float = 1e10
    bytes_per_second_gpu: float = 1.5e12
    steps: int = 1000
    fewest: int = 4
    fewest_fused: int = 64
    fuses_beside: bool = True
    least_saved: float = 0.75
    least_share: float = 0.2

    @classmethod
    def for_compiler(cls, compiler: str) -> CostModel:
        """Return the constants for Inductor, or for eager graphs, which only save tracing time."""
        if compiler == "inductor":
            return cls()
        return cls(seconds_per_node=0.012, fewest_fused=4, fuses_beside=False, least_saved=0.3)

    def weight(self, node: fx.Node) -> float:
        """Return a node's share of compile time, in computing nodes."""
        name = target_name(node)
        if name in _CHEAP:
            return 0.15
        return _COMPOSITE_WEIGHTS.get(name, 1.0)

    def saved(self, weight: float, copies: int, dynamic: bool) -> float:
        """Return the seconds of compile time that a region saves.

        Args:
            weight: the weight of one copy, in computing nodes.
            copies: the number of copies.
            dynamic: whether sizes are symbolic.
        """
        factor = self.dynamic_factor if dynamic else 1.0
        return factor * ((copies - 1) * weight * self.seconds_per_node - copies * self.seconds_per_call)

    def estimate(
        self, facts: GraphFacts, start: int, stop: int, copies: int, weight: float | None = None
    ) -> Estimate:
        """Estimate the gain of a region.

        Args:
            facts: the graph.
            start: index of the first call of one copy.
            stop: index after its last call.
            copies: the number of copies.
            weight: the weight of one copy, in computing nodes; computed if not given.
        """
        if weight is None:
            weight = sum(self.weight(node) for node in facts.calls[start:stop])
        one = weight * self.seconds_per_node * (self.dynamic_factor if facts.dynamic else 1.0)
        lost, device = _boundary_bytes(facts, start, stop)
        speed = self.bytes_per_second_cpu if device == "cpu" else self.bytes_per_second_gpu
        run = self.steps * copies * (self.call_microseconds * 1e-6 + lost / speed)
        kept = copies * lost if facts.grad_enabled else 0
        return Estimate(one, self.saved(weight, copies, facts.dynamic), run, kept)

    def verdict_on_graph(self, saved: float, weight: float, dynamic: bool) -> str:
        """Return why a graph should be compiled as a whole, or "".

        Args:
            saved: seconds saved by all its regions together.
            weight: the weight of all its calls, in computing nodes.
            dynamic: whether sizes are symbolic.
        """
        whole = weight * self.seconds_per_node * (self.dynamic_factor if dynamic else 1.0)
        if saved >= self.least_share * whole:
            return ""
        return f"all regions save {saved:.1f} of {whole:.1f} s of compile time: worth it from {self.least_share:.0%}"

    def verdict(
        self, estimate: Estimate, copies: int, fused: bool = False, *, independent: bool = False
    ) -> str:
        """Return why the region is not worth it, or "".

        Args:
            estimate: its estimated savings and costs.
            copies: the number of copies.
            fused: whether it has no kernel of its own (see :func:`is_fused`).
            independent: whether no copy needs another's results.
        """
        if copies < self.fewest:
            return f"{copies} copies: worth it from {self.fewest}"
        if fused and copies < self.fewest_fused:
            return f"{copies} copies without a matmul or the like: worth it from {self.fewest_fused}"
        if fused and independent and self.fuses_beside:
            return (
                f"{copies} copies without a matmul or the like, beside each other: one kernel computes them"
            )
        if estimate.saved_seconds <= 0:
            return "compiling it once and tracing its calls takes as long as compiling all copies"
        if estimate.saved_seconds < self.least_saved:
            return f"saves {estimate.saved_seconds:.2f} s of compile time: worth it from {self.least_saved:.2f} s"
        if estimate.gain <= 0:
            return (
                f"saves {estimate.saved_seconds:.2f} s of compile time, costs {estimate.run_seconds:.2f} s "
                f"in {self.steps} steps"
            )
        return ""


def _boundary_bytes(facts: GraphFacts, start: int, stop: int) -> tuple[int, str]:
    """Return the bytes that a subgraph reads again but fused code would have in registers, and their device.

    Counts tensors that enter the subgraph from a pointwise operation outside; a matmul or similar writes its
    result to memory anyway. Tensors that leave the subgraph are counted by their readers.
    """
    total, device = 0, "cpu"
    seen: set[fx.Node] = set()
    for index in range(start, stop):
        for node in facts.reads[index]:
            at = facts.position.get(node, -1)
            if node in seen or start <= at < stop or is_static(node):
                continue
            seen.add(node)
            if at >= 0 and facts.last_use[at] < stop and not _has_own_kernel(node):
                size, device = _bytes(value_of(node), device)
                total += size
    return total, device


def is_fused(nodes: Sequence[fx.Node]) -> bool:
    """Whether calls are only pointwise work and reductions."""
    return not any(_has_own_kernel(node) or target_name(node) in _COMPOSITE_WEIGHTS for node in nodes)


def _has_own_kernel(node: fx.Node) -> bool:
    return any(part in target_name(node) for part in _OWN_KERNEL_NAMES)


def _bytes(value: Any, device: str) -> tuple[int, str]:
    tensors: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
    total = 0
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            total += nbytes_of(tensor)
            device = tensor.device.type
    return total, device
