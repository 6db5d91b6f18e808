"""Evaluate one graph on one machine. The second of two graphs reuses what the first one computed.

A node of the second graph is not evaluated if the node of its name in the first graph is called with the very
same values. A node that turns out equal to the node of its name, or to a node that the rewrite removed, takes
over that node's value (*adoption*, as in SAT sweeping). So what lies below a rewrite is free, its deeper
levels are whole again, and the first node that is not equal shows where the error is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.exact.dual import Dual
from fxpasses.exact.machine import Machine, UnsupportedCall, is_random
from fxpasses.exact.same_values import Relation, compare, digests
from fxpasses.exact.samples import evaluate_size, symbol_values
from fxpasses.exact.time_limit import raise_if_out_of_time

_copy = torch.ops.aten.copy.default
_as_strided = torch.ops.aten.as_strided.default
_copy_in_place = torch.ops.aten.copy_.default


class Run(fx.Interpreter):
    """Evaluates a graph.

    Args:
        machine: evaluates the calls.
        gm: the graph. Its constants are copied, so that writes to them have no effect outside.
        first: the finished run of the graph before the rewrite.
        signed_zeros: whether 0.0 and -0.0 are different values.

    Attributes:
        values: the value of each node, by name.
        relations: for each evaluated node that both graphs have, how its value relates to that in the first
            graph.
        adopted: for each node that takes its value from a node of the first graph, the name of that node.
        evaluated: how many calls were evaluated.
        mutated_inputs: the final values of the inputs that the graph writes to.
        imprecise_nodes: names of calls whose witnesses come from kernels that may not compute in float64.
        constants: by attribute name, values to use in place of tensors that the graph holds.
    """

    def __init__(
        self, machine: Machine, gm: fx.GraphModule, first: Run | None = None, signed_zeros: bool = False
    ) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._machine, self._first, self._signed_zeros = machine, first, signed_zeros
        self.values: dict[str, Any] = {}
        self.relations: dict[str, Relation] = {}
        self.adopted: dict[str, str] = {}
        self.evaluated = 0
        self._inputs: tuple[Any, ...] = ()
        self.mutated_inputs: dict[str, Any] = {}
        self.imprecise_nodes: set[str] = set()
        self.constants: dict[str, Dual] = {}
        self._calls: dict[str, tuple[Any, Any, Any]] = {}
        random = [node.name for node in gm.graph.nodes if is_random(node.target)]
        self._random_calls = {name: number for number, name in enumerate(random)}
        self._removed_by_digest: dict[Any, str] = {}
        if first is not None:
            names = {node.name for node in gm.graph.nodes}
            for name, value in first.values.items():
                if name not in names and isinstance(value, Dual):
                    for key in digests(value):
                        self._removed_by_digest.setdefault(key, name)

    def evaluate(self, *inputs: Any) -> Any:
        """Return the outputs of the graph."""
        raise_if_out_of_time()
        self._inputs = inputs
        return self.run(*inputs, enable_io_processing=False)

    def outputs(self, returned: Any) -> dict[str, Any]:
        """Return the values that the graph returned and wrote, by name."""
        listed = returned if isinstance(returned, (list, tuple)) else [returned]
        found = {f"output {i}": value for i, value in enumerate(listed)}
        return found | {f"input {name} after the run": value for name, value in self.mutated_inputs.items()}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "get_attr":
            value = self._constant(n)
        elif n.op == "call_function":
            value = self._call(n)
        elif n.op in ("call_method", "call_module"):
            raise UnsupportedCall(n.target, f"a graph of ATen operators has no {n.op}")
        else:
            value = super().run_node(n)
        self.values[n.name] = value
        return value

    def _constant(self, n: fx.Node) -> Any:
        value = self.fetch_attr(str(n.target))
        if not isinstance(value, Tensor):
            return value
        if str(n.target) in self.constants:
            return self._adopt(n, self.constants[str(n.target)])
        made = (
            self._machine.arithmetic.constant(value) if value.is_floating_point() else value.detach().clone()
        )
        return self._adopt(n, made)

    def _call(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        self._calls[n.name] = (n.target, args, kwargs)
        if self._repeats_first_call(n, args, kwargs):
            self.adopted[n.name] = n.name
            if n.name in self._first.mutating_nodes:  # type: ignore[union-attr]
                self._write_input(n, args)
            return self._first.values[n.name]  # type: ignore[union-attr]
        self.evaluated += 1
        if _mutated_input(n) is not None:
            self._write_input(n, args)
            return self._machine.call(_copy, args, kwargs)
        imprecise_before = self._machine.imprecise_calls
        try:
            value = self._evaluate_as_strided(n, args) if n.target is _as_strided else None
            if value is None:
                value = self._machine.call(n.target, args, kwargs, self._random_calls.get(n.name))
        except UnsupportedCall:
            raise
        except Exception as error:
            error.add_note(f"in the exact evaluation of {n.format_node()}")
            raise
        if self._machine.imprecise_calls > imprecise_before:
            self.imprecise_nodes.add(n.name)
        expected = n.meta.get("val")
        if isinstance(expected, Tensor):
            value = self._machine.as_type(value, expected.dtype)
        return self._adopt(n, value)

    def depends_on_imprecise_kernels(self) -> bool:
        """Whether the rewrite removed or added a call whose witness comes from a rough kernel."""
        assert self._first is not None
        return bool(self.imprecise_nodes or self._first.imprecise_nodes - set(self.adopted.values()))

    def _repeats_first_call(self, n: fx.Node, args: Any, kwargs: Any) -> bool:
        """Whether the first graph makes the same call with the very same values, as the same random call."""
        first = self._first
        if first is None or n.name not in first._calls:
            return False
        target, *given = first._calls[n.name]
        if target is not n.target or self._random_calls.get(n.name) != first._random_calls.get(n.name):
            return False
        return _is_identical(given, [args, kwargs])

    @functools.cached_property
    def mutating_nodes(self) -> set[str]:
        """Names of nodes that write to inputs."""
        return {n.name for n in self.module.graph.nodes if _mutated_input(n) is not None}  # type: ignore[union-attr]

    def _evaluate_as_strided(self, n: fx.Node, args: Any) -> Dual | None:
        """The result of ``as_strided`` if its tensor fills a part of memory without gaps, else None."""
        source, known = args[0], n.args[0].meta.get("val")  # type: ignore[union-attr]
        if not isinstance(source, Dual) or not isinstance(known, Tensor) or len(args) < 3:
            return None
        numbers = [*known.stride(), known.storage_offset()]
        try:
            is_known = all(type(number) is int for number in numbers)
            symbols = {} if is_known else symbol_values(self.module, self._inputs)  # type: ignore[arg-type]
            *stride, start = (evaluate_size(number, symbols) for number in numbers)
        except TypeError:  # a size that depends on data
            return None
        count = source.witness.numel()
        if sum((s - 1) * d for s, d in zip(source.shape, stride, strict=True)) + 1 != count:
            return None
        offsets = torch.arange(count).as_strided(source.shape, stride).flatten()
        if len(offsets.unique()) != count:
            return None
        storage_offset = (args[3] if len(args) > 3 and args[3] is not None else start) - start

        def restride(t: Tensor) -> Tensor:
            storage = torch.empty_like(t.flatten()).index_copy(0, offsets, t.flatten())
            return storage.as_strided(args[1], args[2], storage_offset).contiguous()

        return source.map(restride)

    def _write_input(self, n: fx.Node, args: Any) -> None:
        mutated = _mutated_input(n)
        assert mutated is not None
        self.env[mutated] = self.mutated_inputs[str(mutated)] = self._machine.call(_copy, args, {})

    def _adopt(self, n: fx.Node, value: Any) -> Any:
        if self._first is None:
            return value
        if n.name in self._first.values:
            old = self._first.values[n.name]
            relation = compare(old, value, self._machine.arithmetic.field, 0.0, self._signed_zeros).relation
            self.relations[n.name] = relation
            if relation == "equal":
                self.adopted[n.name] = n.name
                return old
        elif isinstance(value, Dual):
            for key in digests(value):
                name = self._removed_by_digest.get(key)
                if name is None:
                    continue
                old = self._first.values[name]
                if (
                    compare(old, value, self._machine.arithmetic.field, 0.0, self._signed_zeros).relation
                    == "equal"
                ):
                    self.adopted[n.name] = name
                    return old
        return value


def _mutated_input(n: fx.Node) -> fx.Node | None:
    """The input that a call writes to, also through the result of an earlier write."""
    if n.target is not _copy_in_place:
        return None
    mutated = n.args[0]
    while isinstance(mutated, fx.Node) and mutated.target is _copy_in_place:
        mutated = mutated.args[0]
    return mutated if isinstance(mutated, fx.Node) and mutated.op == "placeholder" else None


def _is_identical(a: Any, b: Any) -> bool:
    """Whether two arguments are the very same values."""
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_is_identical, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_is_identical(a[k], b[k]) for k in a)
    if isinstance(a, (Dual, Tensor)) or isinstance(b, (Dual, Tensor)):
        return a is b
    return type(a) is type(b) and a == b
