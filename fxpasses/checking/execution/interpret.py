"""Run a graph for comparison: uninitialized memory poisoned, RNG calls reproducible, in two precisions.

* :class:`Run`: as it is.
* :class:`DefinedRun`: as it is, but without the precision loss of fused kernels.
* :class:`ExactRun`: every floating value in float64, whatever the graph casts to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

from fake.dispatch.communication import communicates
from fake.library.random_state import seeded_generators
from fake.seam.pytree import tree_leaves, tree_map
from fxpasses._torch import OpOverload, disable_current_modes
from fxpasses.checking.execution.collectives import (
    count_processes,
    differs_by_process,
    refuse_unknown,
    simulate_collective,
)
from fxpasses.checking.execution.fused_kernels import compute_in_float64, recompute_by_definition
from fxpasses.checking.execution.inputs import Unsupported, cloned, made_up, placeholders
from fxpasses.exact.float_constants import uniform_value, unrounded
from fxpasses.exact.time_limit import raise_if_out_of_time
from fxpasses.graphs.aliasing import effect_of, is_mutating, uses_rng
from fxpasses.graphs.rewriting import subgraphs

aten, prims = torch.ops.aten, torch.ops.prims

Poison = Literal["nan", "huge"]
"""The contents of uninitialized memory: NaN (the maximum for integers), or huge numbers (the minimum)."""

UNINITIALIZED = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    prims.empty_strided.default,
    prims.empty_permuted.default,
}
"""Operators that return uninitialized memory."""
_CRASHES = {aten.grid_sampler_2d_backward.default: 2}
"""Kernels of PyTorch that access memory out of bounds if the argument at this position is not finite."""
_WIDER_DTYPE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


def allocates(gm: fx.GraphModule, names: Collection[str] | None = None) -> bool:
    """Whether the graph, or its calls with these names, makes uninitialized memory."""
    return any(
        node.target in UNINITIALIZED and (names is None or node.name in names)
        for graph in (gm, *subgraphs(gm).values())
        for node in graph.graph.nodes
    )


RUN_ERRORS = (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError, KeyError)
_SEED = 20
_GRAPH_CALLING_OPS = {"cond", "while_loop", "map_impl", "scan", "invoke_subgraph"}
"""Operators that call a graph that they get, so that we can run it our way."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context of a run: this seed for all devices, no gradients, no autocast. Restores all on exit."""
    with (
        seeded_generators(seed),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        disable_current_modes(),
    ):
        yield


class Run(fx.Interpreter):
    """Runs a graph with uninitialized memory poisoned; one with collectives as several processes at once.

    Args:
        gm: the graph.
        poison: the contents of uninitialized memory.
        keep: whether to keep each node's value in ``values``, by name, as it was when computed.
        others: whether to simulate the other processes that the graph communicates with.

    Attributes:
        values: the values of the nodes, if they are kept.
        current: the node that is running: the one at fault if the run raises.
    """

    def __init__(
        self, gm: fx.GraphModule, poison: Poison = "nan", keep: bool = False, others: bool = True
    ) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self.values: dict[str, Any] = {}
        self.current: fx.Node | None = None
        self.extra_traceback = False  # the node is named in our own message
        self._poison, self._keep, self._is_accepted = poison, keep, False
        self._writes = any(map(is_mutating, gm.graph.nodes))
        self._constants: dict[str, Tensor] = {}
        self._peers = [self._make_peer() for _ in range(count_processes(gm) - 1)] if others else []
        self._positions = {node: at for at, node in enumerate(placeholders(gm))} if self._peers else {}

    def _make_peer(self) -> Run:
        """Return a runner for another process."""
        return Run(self.module, self._poison, others=False)  # type: ignore[arg-type]

    def __call__(self, inputs: Sequence[Any], seed: int = 0) -> list[Any]:
        """Run on ``inputs``, which the graph may mutate. Return the outputs as a list.

        Raises:
            Unsupported: the graph would wait for other processes, has results of effects, or non-strided
                tensors.
        """
        self._refuse_unknown()
        with seeded(seed):
            result = self.run(*inputs, enable_io_processing=False)
        return list(result) if isinstance(result, (list, tuple)) else [result]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph. Args: those of :meth:`torch.fx.Interpreter.run`."""
        raise_if_out_of_time()
        self.reset()
        return super().run(*args, **kwargs)

    def reset(self) -> None:
        """Drop what the last run has computed."""
        for run in (self, *self._peers):
            run._constants.clear()
            run.env = {}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Read an attribute as of the start of the run. Args: of :meth:`torch.fx.Interpreter.get_attr`."""
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, fx.GraphModule):
            return self._runnable(value)
        if self._writes and isinstance(
            value, Tensor
        ):  # maybe to a constant: the next run must start with the same value
            return self._constants.setdefault(str(target), value.detach().clone())
        return value

    def _refuse_unknown(self) -> None:
        if not self._is_accepted:
            refuse_unknown(self.module, _GRAPH_CALLING_OPS)  # type: ignore[arg-type]
            _refuse_effects_and_layouts(self.module)  # type: ignore[arg-type]
        self._is_accepted = True

    def run_calls(self, names: Collection[str], values: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
        """Run only some calls.

        Args:
            names: of the calls.
            values: the values of the other nodes, by name.
            seed: see :meth:`__call__`.

        Returns:
            The values of these calls, by name.
        """
        self._refuse_unknown()
        self.reset()
        found = {}
        with seeded(seed):
            for node in self.module.graph.nodes:  # type: ignore[union-attr]
                if node.op != "call_function" or node.name not in names:
                    continue
                for value in node.all_input_nodes:
                    if value not in self.env:
                        is_held = value.op == "get_attr"
                        self.env[value] = self.run_node(value) if is_held else values[value.name]
                        for other in self._peers:
                            other.env[value] = self.env[value]
                self.env[node] = self.run_node(node)
                found[node.name] = self.env[node]
        return found

    def inner(self, gm: fx.GraphModule) -> Run:
        """Return the runner of a graph that an operator of this graph calls."""
        return Run(gm, self._poison)

    def _runnable(self, gm: fx.GraphModule) -> Callable[..., Any]:
        node = self.current
        if node is None or any(str(user.target) not in _GRAPH_CALLING_OPS for user in node.users):
            return gm
        run = self.inner(gm)
        return lambda *args: run.run(*args, enable_io_processing=False)

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        if n.op == "call_function" and communicates(n.target):
            result, *theirs = self._simulate_collective(n)
        else:
            # Effects are not repeated: a call without results is skipped, one with results was rejected.
            result = self._evaluate(n) if effect_of(n) is None else (self.env[n.args[0]], None)  # type: ignore[index]
            theirs = self._peer_values(n, result) if self._peers and n.op != "output" else []
        for other, value in zip(self._peers, theirs, strict=False):
            other.env[n] = value
            for dead in self.user_to_last_uses.get(n, ()):
                other.env.pop(dead, None)
        if self._keep and n.op != "output":
            self.values[n.name] = tree_map(copied, result) if self._writes else result
        return result

    def _evaluate(self, n: fx.Node) -> Any:
        # As in the base class, without its record of the traced node: half of the time of a deep graph.
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        _refuse_crash(n.target, args)
        result = getattr(self, n.op)(n.target, args, kwargs)
        if n.target in UNINITIALIZED:
            _fill(result, self._poison)
        return result

    def _peer_values(self, n: fx.Node, mine: Any) -> list[Any]:
        """The values of a non-collective node in the other processes."""
        if n.op != "placeholder":
            with torch.random.fork_rng([]) if uses_rng(n) else nullcontext():
                return [other.run_node(n) for other in self._peers]
        if not differs_by_process(n):
            return [cloned([mine])[0] for _ in self._peers]
        seeds = [len(self._peers) * self._positions[n] + number for number in range(len(self._peers))]
        values = [made_up([mine], "random", torch.Generator().manual_seed(seed))[0] for seed in seeds]
        # Float64 values are rounded to the dtypes of the graph.
        return [as_recorded_dtype(as_recorded_dtype(v, n.meta.get("val")), mine) for v in values]

    def _simulate_collective(self, n: fx.Node) -> list[Any]:
        return simulate_collective(
            n.target, [run.fetch_args_kwargs_from_env(n) for run in (self, *self._peers)]
        )


def _refuse_crash(target: Any, args: Sequence[Any]) -> None:
    """Raise RuntimeError instead of a call that would crash the process."""
    at = _CRASHES.get(target)
    if at is not None and not bool(args[at].isfinite().all()):
        raise RuntimeError(f"argument {at} of {target} is not finite, for which its kernel may crash")


def _refuse_effects_and_layouts(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        effect, value = effect_of(node), node.meta.get("val")
        if effect is not None and not (isinstance(effect, OpOverload) and not effect._schema.returns):
            raise Unsupported(
                f"node {node.name!r} calls {effect}, whose effects may change what it returns: it is not run again"
            )
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
                raise Unsupported(
                    f"node {node.name!r} is a tensor of layout {tensor.layout}, whose values are not compared"
                )
    for inner in subgraphs(gm).values():
        _refuse_effects_and_layouts(inner)


class DefinedRun(Run):
    """Runs a graph in its own dtypes, with fused kernels computing their definition, rounded once.

    What kernels themselves lose is not the fault of a pass.
    """

    def _make_peer(self) -> Run:
        return DefinedRun(self.module, self._poison, others=False)  # type: ignore[arg-type]

    def inner(self, gm: fx.GraphModule) -> Run:
        return DefinedRun(gm, self._poison)

    def _evaluate(self, n: fx.Node) -> Any:
        result = super()._evaluate(n)
        return recompute_by_definition(n.target, *self.fetch_args_kwargs_from_env(n), result)


class ExactRun(Run):
    """Runs a graph in float64, as far as operators allow: the yardstick for the errors of other runs.

    Floating inputs, constants and every cast are widened. Random operators run in their own precision, so
    that they draw the same samples, and so do those without float64 support.

    Attributes:
        inputs: the widened inputs, which show the graph's writes to its inputs.
        max_relative_error: the largest relative error that an operator in its own precision may have made.
    """

    def __init__(
        self, gm: fx.GraphModule, poison: Poison = "nan", keep: bool = False, others: bool = True
    ) -> None:
        super().__init__(gm, poison, keep, others)
        self.inputs: list[Any] = []
        self.max_relative_error = 0.0

    def reset(self) -> None:
        """Drop what the last run has computed, and its inputs."""
        super().reset()
        self.inputs = []

    def _make_peer(self) -> Run:
        return ExactRun(self.module, self._poison, others=False)  # type: ignore[arg-type]

    def results(self, inputs: Sequence[Any]) -> list[Any] | None:
        """Return outputs on copies of inputs, then these after the run; None if an operator cannot run."""
        try:
            return [*self(cloned(inputs), _SEED), *self.inputs]
        except RUN_ERRORS:
            return None

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Take an input, floats as float64. Args: those of :meth:`torch.fx.Interpreter.placeholder`."""
        self.inputs.append(tree_map(as_float64, super().placeholder(target, args, kwargs)))
        return self.inputs[-1]

    def inner(self, gm: fx.GraphModule) -> Run:
        return ExactRun(gm, self._poison)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Read an attribute, floats as float64. Args: those of :meth:`torch.fx.Interpreter.get_attr`."""
        return tree_map(_constant_in_float64, super().get_attr(target, args, kwargs))

    def _evaluate(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super()._evaluate(n)
        if uses_rng(n):
            result = self._in_own_precision(n)
        else:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            _refuse_crash(n.target, args)
            try:
                result = call_in_float64(n.target, args, kwargs)
            except (RuntimeError, TypeError, NotImplementedError, AssertionError):
                result = self._in_own_precision(n)
                self.max_relative_error = max([self.max_relative_error, *map(_precision, n.all_input_nodes)])
        if n.target in UNINITIALIZED:
            _fill(result, self._poison)
        return result

    def _in_own_precision(self, n: fx.Node) -> Any:
        """Run a call in the dtypes of the graph, and convert its result to float64."""
        narrow = map_arg((n.args, n.kwargs), lambda a: as_recorded_dtype(self.env[a], a.meta.get("val")))
        target: Any = n.target
        result = target(*narrow[0], **narrow[1])
        if isinstance(n.target, OpOverload) and n.target._schema.is_mutable:
            wide = self.fetch_args_kwargs_from_env(n)
            for a, b in zip(tree_leaves(wide), tree_leaves(narrow), strict=True):
                if isinstance(a, Tensor) and a is not b:
                    a.copy_(b)
        return tree_map(as_float64, result)


def _precision(node: fx.Node) -> float:
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.finfo(value.dtype).eps
    return 0.0


class _Facts(NamedTuple):
    """What is needed to call an operator in float64."""

    takes_dtypes: bool = False
    half_to_float: int | None = None
    is_of_torch: bool = False


_NO_FACTS = _Facts()


@functools.cache
def _facts(target: OpOverload) -> _Facts:
    if target is aten.view.dtype:  # reinterprets bits
        return _NO_FACTS
    names = [a.name for a in target._schema.arguments]
    position = names.index("half_to_float") if "half_to_float" in names else None
    return _Facts(any("dtype" in n for n in names), position, target.namespace in ("aten", "prims"))


def call_in_float64(target: Any, args: Any, kwargs: Any) -> Any:
    """Call with floating tensors, and floating dtypes among the arguments, as float64.

    Args:
        target: the operator or function.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    args, kwargs = map_aggregate((args, kwargs), _to_float64)
    facts = _facts(target) if isinstance(target, OpOverload) else _NO_FACTS
    if facts.takes_dtypes:
        args, kwargs = map_aggregate(
            (args, kwargs), lambda a: _WIDER_DTYPE.get(a, a) if type(a) is torch.dtype else a
        )
    if facts.half_to_float is not None:  # float64 needs no wider softmax
        args = tuple(False if i == facts.half_to_float else a for i, a in enumerate(args))
    if not kwargs and (known := compute_in_float64(target, args)) is not None:
        return known
    result = recompute_by_definition(target, args, kwargs, target(*args, **kwargs))
    is_narrow = isinstance(result, Tensor) and result.dtype is torch.float32
    if not is_narrow or not facts.is_of_torch:
        return result
    # From integers alone PyTorch computes numbers of the default dtype: a quotient, an exponential.
    args, kwargs = map_aggregate((args, kwargs), _integers_as_float64)
    with suppress(RuntimeError, IndexError):  # an index, or a condition
        return target(*args, **kwargs)
    return result


def _to_float64(value: Any) -> Any:
    return unrounded(value) if type(value) is float else as_float64(value)


def _integers_as_float64(value: Any) -> Any:
    is_integer = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return value.double() if is_integer else value


def _constant_in_float64(value: Any) -> Any:
    wide = as_float64(value)
    is_float = isinstance(wide, Tensor) and wide.dtype is torch.float64
    number = uniform_value(wide) if is_float else None
    return wide if number is None else torch.full_like(wide, number)


def as_float64(value: Any) -> Any:
    """Convert a floating tensor to float64; return anything else as it is."""
    if isinstance(value, Tensor) and value.dtype in _WIDER_DTYPE:
        return value.to(_WIDER_DTYPE[value.dtype])
    return value


def as_recorded_dtype(value: Any, example: Any) -> Any:
    """Cast a tensor to the dtype of another one; return anything else as it is."""
    if isinstance(value, Tensor) and isinstance(example, Tensor):
        return value.to(example.dtype)
    return value


def copied(value: Any) -> Any:
    """Copy a tensor to its own memory; return anything else as it is."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _fill(result: Any, poison: Poison) -> None:
    if not isinstance(result, Tensor) or not result.numel():
        return
    if result.dtype is torch.bool:
        result.fill_(poison == "nan")
    elif result.is_floating_point():
        result.fill_(float("nan") if poison == "nan" else torch.finfo(result.dtype).max / 4)
    elif result.is_complex():
        result.fill_(complex("nan") if poison == "nan" else 1e30)
    else:
        info = torch.iinfo(result.dtype)
        result.fill_(info.max if poison == "nan" else info.min)
