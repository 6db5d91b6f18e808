"""Evaluate calls of ATen operators on dual numbers: by a rule, by a decomposition, or uninterpreted."""

from __future__ import annotations

import operator
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fake.dispatch.communication import communicates
from fake.library.random_state import seeded_generators
from fake.seam.pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten
from fxpasses import _torch
from fxpasses.exact.arithmetic import Arithmetic
from fxpasses.exact.complex_values import (
    Complex,
    ComplexRules,
    complex_to_tensors,
    involves_complex,
    is_complex,
)
from fxpasses.exact.dual import Dual
from fxpasses.exact.fields import LEVELS, Field
from fxpasses.exact.rules import rule_of
from fxpasses.graphs.aliasing import only_checks

_DECOMPOSITIONS: dict[Any, fx.GraphModule | None] = {}
"""Traced decompositions, by operator, constants and metadata."""
_MAX_DECOMPOSITIONS = 4096


class UnsupportedCall(Exception):
    """A call that cannot be evaluated, even as an uninterpreted function.

    Attributes:
        target: the callee.
        reason: why not.
    """

    def __init__(self, target: Any, reason: str) -> None:
        super().__init__(f"{target}: {reason}")
        self.target, self.reason = target, reason


def is_dual(value: Any) -> bool:
    """Whether a value is a dual number, which is a leaf of nested values."""
    return isinstance(value, Dual)


def is_random(target: Any) -> bool:
    """Whether an operator samples random numbers. Attention does so only for dropout, and has rules."""
    if not isinstance(target, _torch.OpOverload) or rule_of(target) is not None:
        return False
    return torch.Tag.nondeterministic_seeded in target.tags


class Machine:
    """Evaluates the operators of one sample.

    Args:
        field: the field of the residues.
        seed: for random operators. The n-th one samples the same numbers in each graph.

    Attributes:
        opaque: by operator, the number of calls that were treated as uninterpreted functions.
        imprecise_calls: how many of these ran kernels that are not known to compute in float64.
    """

    def __init__(self, field: Field, seed: int) -> None:
        self.arithmetic = Arithmetic(field)
        self._seed = seed
        self._complex_rules = ComplexRules(self.arithmetic, self.call)
        self.opaque: Counter[str] = Counter()
        self.imprecise_calls = 0

    def call(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], random_call: int | None = None
    ) -> Any:
        """Return the result of one call.

        Args:
            target: the callee: an operator, or a function of sizes.
            args: its arguments, with a dual number for each float tensor.
            kwargs: its keyword arguments.
            random_call: how many random operators its graph calls before it.

        Raises:
            UnsupportedCall: the call cannot be evaluated, not even as an uninterpreted function.
        """
        if not isinstance(target, _torch.OpOverload):
            return self._call_non_operator(target, args, kwargs)
        if communicates(target):  # other processes may check different graphs, or none
            raise UnsupportedCall(target, "it speaks with other processes")
        if is_random(target):
            return self._call_random(target, args, kwargs, random_call)
        flat, spec = tree_flatten((tuple(args), dict(kwargs)), is_leaf=is_dual)
        if involves_complex(target, flat) and not target._schema.is_mutable:
            try:
                found = self._complex_rules.evaluate(target, args, kwargs)
            except (TypeError, AttributeError):  # an overload that the rule was not written for
                found = NotImplemented
            return self._evaluate_in_floats(target, flat, spec) if found is NotImplemented else found
        has_duals = any(is_dual(x) for x in flat)
        if not has_duals:
            with torch.no_grad():
                result = target(*args, **kwargs)
            if not any(isinstance(t, Tensor) and t.is_floating_point() for t in tree_flatten(result)[0]):
                return result
        if target._schema.is_mutable:
            raise UnsupportedCall(target, "it changes its arguments in place")
        found = NotImplemented
        rule = rule_of(target)
        if rule is not None:
            try:
                found = rule(self.arithmetic, target, *args, **kwargs)
            except (TypeError, AttributeError) as error:  # an overload that the rule was not written for
                raise UnsupportedCall(target, f"its exact rule does not take this call: {error}") from error
        if found is NotImplemented and torch.Tag.nondeterministic_seeded in target.tags:
            raise UnsupportedCall(target, "it calls the RNG inside")
        if found is NotImplemented and not has_duals:
            found = tree_map(self._as_dual, result)  # computed from integers: its value is exact
        if found is NotImplemented:
            found = self._evaluate_decomposition(target, flat, spec)
        return self._uninterpreted(target, flat, spec) if found is NotImplemented else found

    def _call_non_operator(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if target is torch.ops.higher_order.with_effects and _returns_nothing(args[1]):
            token, effect, *given = args
            return token, self.call(effect, given, kwargs) if only_checks(effect) else None
        if isinstance(target, _torch.HigherOrderOperator):
            called = next((value for value in args if isinstance(value, _torch.OpOverload)), target)
            raise UnsupportedCall(called, f"higher-order operators have no exact rules ({target})")
        if target is not operator.getitem and any(is_dual(x) for x in (*args, *kwargs.values())):
            raise UnsupportedCall(target, "not an operator, and it takes a tensor")
        return target(*args, **kwargs)

    def as_type(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast a value to the dtype it has in the graph: inputs, and calls without a rule, are in float64."""
        if isinstance(value, Dual) and dtype.is_floating_point:
            return value.as_type(dtype)
        if is_complex(value) and dtype.is_complex:
            parts = self._complex_rules.to_complex(value)
            return Complex(parts.real.as_type(dtype.to_real()), parts.imag.as_type(dtype.to_real()))
        return value

    def _as_dual(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return self.arithmetic.dual(value)
        return value

    def _evaluate_in_floats(self, target: Any, flat: list[Any], spec: TreeSpec) -> Any:
        """Evaluate a call on complex numbers that has no rule, in floats."""
        values = [x.witness if is_dual(x) else complex_to_tensors(x) for x in flat]
        args, kwargs = tree_unflatten(values, spec)
        try:
            with torch.no_grad():
                result = target(*args, **kwargs)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise UnsupportedCall(
                target, f"it has no exact rule for complex numbers, and does not run: {error}"
            ) from error
        self.opaque[str(target)] += 1
        self.imprecise_calls += 1
        return tree_map(self._as_dual, result)

    def _call_random(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], random_call: int | None
    ) -> Any:
        if random_call is None:
            raise UnsupportedCall(target, "a decomposition that calls the RNG")
        with seeded_generators(self._seed * 1000 + random_call):
            given = tree_map(
                lambda x: x.witness.to(x.dtype) if is_dual(x) else x,
                (tuple(args), dict(kwargs)),
                is_leaf=is_dual,
            )
            with torch.no_grad():
                result = target(*given[0], **given[1])
        return tree_map(self._as_dual, result)

    def _evaluate_decomposition(self, target: Any, flat: list[Any], spec: TreeSpec) -> Any:
        """Trace and evaluate PyTorch's own decomposition; ``NotImplemented`` if there is none."""
        tensor_indices = [i for i, x in enumerate(flat) if isinstance(x, (Dual, Tensor))]
        given = [x.witness.to(x.dtype) if is_dual(x) else x for x in (flat[i] for i in tensor_indices)]
        constants = repr([x for x in flat if not isinstance(x, (Dual, Tensor))])
        key = target, tuple((t.shape, t.dtype) for t in given), constants, str(spec), tuple(tensor_indices)
        if key not in _DECOMPOSITIONS:
            if len(_DECOMPOSITIONS) >= _MAX_DECOMPOSITIONS:
                _DECOMPOSITIONS.clear()
            _DECOMPOSITIONS[key] = _trace_decomposition(target, flat, spec, tensor_indices, given)
        graph = _DECOMPOSITIONS[key]
        return (
            NotImplemented
            if graph is None
            else _DecompositionInterpreter(self, graph).evaluate(*(flat[i] for i in tensor_indices))
        )

    def _uninterpreted(self, target: Any, flat: list[Any], spec: TreeSpec) -> Any:
        """Treat a call as a function of all its arguments: equal ones give equal results in both graphs."""
        keys = [self._hash_arguments(k, str(target), flat) for k in range(LEVELS)]

        def run(cast: Any) -> Any:
            args, kwargs = tree_unflatten([cast(x) if is_dual(x) else x for x in flat], spec)
            with torch.no_grad():
                return target(*args, **kwargs)

        is_imprecise = target.namespace not in ("aten", "prims")
        try:
            result = run(lambda d: d.witness.clone())
        except (RuntimeError, TypeError, NotImplementedError):  # kernels for the graph's own dtypes only
            is_imprecise = True
            try:
                result = run(lambda d: d.witness.to(d.dtype))
            except (RuntimeError, TypeError, NotImplementedError) as error:
                raise UnsupportedCall(target, f"it has no exact rule, and does not run: {error}") from error
        self.opaque[str(target)] += 1
        self.imprecise_calls += is_imprecise or any(
            isinstance(t, Tensor) and t.is_complex() for t in tree_flatten(result)[0]
        )
        field, count = self.arithmetic.field, 0

        def to_dual(value: Any) -> Any:
            nonlocal count
            count += 1
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            positions = torch.arange(value.numel()).view(value.shape)
            residues = [
                field.hash(k, f"result {count}", key * 65537 + positions) for k, key in enumerate(keys)
            ]
            return self.arithmetic.assemble(value.double(), residues, dtype=value.dtype)

        return tree_map(to_dual, result)

    def _hash_arguments(self, level: int, name: str, flat: list[Any]) -> Tensor:
        field = self.arithmetic.field
        digest = torch.zeros((), dtype=torch.int64)
        for position, value in enumerate(flat):
            part = value.residues[level] if is_dual(value) else value
            if isinstance(part, Tensor):
                elements = part.flatten()
                integers = (
                    elements.double().view(torch.int64) if elements.is_floating_point() else elements.long()
                )
                position_hashes = field.hash(level, "at", torch.arange(len(integers)))
                number = (
                    field.hash(level, "element", position_hashes * 16777259 + integers).sum() + part.dim()
                )
            else:
                number = torch.tensor(zlib.crc32(repr(part).encode()))
            digest = field.hash(level, f"{name} {position}", digest * 33 + number)
        return digest


def _returns_nothing(target: Any) -> bool:
    return isinstance(target, _torch.OpOverload) and not target._schema.returns


class _DecompositionInterpreter(fx.Interpreter):
    """Evaluates a decomposition on dual numbers."""

    def __init__(self, machine: Machine, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self._machine = machine

    def evaluate(self, *args: Any) -> Any:
        """Return the results of the graph."""
        return self.run(*args, enable_io_processing=False)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Evaluate one call on dual numbers. Args: those of :meth:`torch.fx.Interpreter.call_function`."""
        return self._machine.call(target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Read an attribute as a dual number. Args: those of :meth:`torch.fx.Interpreter.get_attr`."""
        value = super().get_attr(target, args, kwargs)
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return self._machine.arithmetic.constant(value) if is_float else value


def _trace_decomposition(
    target: Any, flat: list[Any], spec: TreeSpec, tensor_indices: list[int], given: list[Tensor]
) -> fx.GraphModule | None:
    table = _torch.decompositions_of(target)
    if table is None:
        return None

    def call(*tensors: Tensor) -> Any:
        values = list(flat)
        for i, tensor in zip(tensor_indices, tensors, strict=True):
            values[i] = tensor
        args, kwargs = tree_unflatten(values, spec)
        return target(*args, **kwargs)

    try:
        gm = _torch.trace_calls(call, given, table, guards=False)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError):
        return None  # the decomposition rejects these arguments: the operator is opaque for them
    return None if any(node.target is target for node in gm.graph.nodes) else gm
