"""Inputs to run a graph on: copies of real ones, gradients of outputs, and made-up ones of other sizes."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import sympy
import torch
from torch import Tensor, fx

from fake.error_text import describe_error
from fake.seam.pytree import tree_leaves
from fake.seam.symbolic_shapes import hints_of
from fxpasses._torch import shape_env_of
from fxpasses.errors import OptionsError
from fxpasses.exact.samples import Family, sample_input
from fxpasses.graphs.numbers import computable
from fxpasses.graphs.rewriting import value_of

_SIZES = (2, 3, 4, 5, 7, 8, 12, 16, 17, 31, 32, 33, 64, 65, 100, 128)
_MAX_ELEMENTS = 1 << 22
Bindings = Mapping[sympy.Symbol, int]
V = TypeVar("V")


class Unsupported(Exception):
    """An input cannot be copied or made up (a tensor subclass, say), so its graph is not checked by value."""


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the graph's inputs, in order."""
    return list(gm.graph.find_nodes(op="placeholder"))


def cloned(values: Sequence[Any]) -> list[Any]:
    """Copy values with the same strides, preserving shared memory.

    Raises:
        Unsupported: a tensor is not plain strided memory.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if (
            type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__
            or value.layout is not torch.strided
        ):
            raise Unsupported(f"an input of type {type(value).__name__}, layout {value.layout}")
        value = value.detach().as_subclass(Tensor)  # operators do not care about a parameter's own class
        if value.is_conj():  # the memory holds the conjugate
            return one(value.conj()).conj()
        storage = value.untyped_storage()
        copy = storages.setdefault(storage._cdata, storage.clone())
        empty = torch.empty((), dtype=value.dtype, device=value.device)
        return empty.set_(copy, value.storage_offset(), value.shape, value.stride())

    with torch.no_grad():
        return [one(value) for value in values]


def deep_copy(name: str, value: V, done: str) -> V:
    """Copy a model, or what it is called with, so that the copy may be changed.

    Args:
        name: the name of the argument.
        value: what to copy.
        done: what is done with the copy, in words: "tuned".

    Raises:
        OptionsError: it cannot be copied: it holds a lock, a generator, a tensor that was computed.
    """
    try:
        return copy.deepcopy(value)
    except Exception as error:
        problem = (
            f"{name}: {type(value).__name__} cannot be copied, and a copy is what is {done}: {describe_error(error)}; "
            "give the class that this names a __deepcopy__"
        )
        raise OptionsError(name, type(value).__name__, problem=problem) from error


def symbol_bindings(inputs: Sequence[fx.Node], values: Sequence[Any]) -> dict[sympy.Symbol, int]:
    """Return the value of each symbol that is an input, or a size of one.

    Raises:
        Unsupported: the size of a nested tensor's ragged dimension is not a number.
    """
    found: dict[sympy.Symbol, int] = {}
    for node, value in zip(inputs, values, strict=False):
        fake = value_of(node)
        pairs: list[tuple[Any, Any]] = [(fake, value)]
        if isinstance(fake, Tensor) and isinstance(value, Tensor):
            pairs = [
                *zip(fake.shape, value.shape, strict=True),
                *zip(fake.stride(), value.stride(), strict=True),
            ]
        for symbolic, number in pairs:
            if isinstance(symbolic, torch.SymInt) and isinstance(symbolic.node.expr, sympy.Symbol):
                if isinstance(number, torch.SymInt):
                    raise Unsupported(f"a ragged size ({number})")
                found.setdefault(symbolic.node.expr, int(number))
    return found


def make_tangents(
    nodes: Sequence[fx.Node], bound: Bindings, kind: str, generator: torch.Generator
) -> list[Any]:
    """Make values for the tangents of a joint or backward graph.

    Args:
        nodes: the inputs.
        bound: the value of each symbol.
        kind: ``"random"``, ``"ones"`` (the gradient of a sum) or ``"zero"``.
        generator: of the random ones.

    Raises:
        Unsupported: one is not a floating tensor.
    """

    def one(node: fx.Node) -> Any:
        fake = value_of(node)
        if not isinstance(fake, Tensor) or not (fake.is_floating_point() or fake.is_complex()):
            raise Unsupported(f"an output gradient of type {type(fake).__name__}")
        result = _empty_like_fake(fake, bound)
        if kind == "zero":
            return result.zero_()
        if kind == "ones":
            return result.fill_(1)
        return result.copy_(torch.randn(result.shape, generator=generator, dtype=torch.float32))

    with torch.no_grad():
        return [one(node) for node in nodes]


def inputs_from_hints(inputs: Sequence[fx.Node]) -> list[Any]:
    """Make up inputs of the sizes seen at compile time: random numbers, zeros for integers and flags.

    Raises:
        Unsupported: an input is neither a tensor nor a number.
    """
    generator = torch.Generator().manual_seed(0)

    def one(node: fx.Node) -> Any:
        fake = value_of(node)
        if isinstance(fake, torch.SymInt):
            return _evaluate_size(fake, {})
        if fake is None or isinstance(fake, (int, float)):
            return fake
        if not isinstance(fake, Tensor):
            raise Unsupported(f"an input of type {type(fake).__name__}")
        result = _empty_like_fake(fake, {})
        if not fake.is_floating_point():
            return result.zero_()
        return result.copy_(torch.randn(result.shape, generator=generator, dtype=torch.float32))

    with torch.no_grad():
        return [one(node) for node in inputs]


def made_up(
    values: Sequence[Any], family: Family, generator: torch.Generator, scale: float = 1.0
) -> list[Any]:
    """Copy inputs with other values, and the same sizes, strides and dtypes.

    Args:
        values: real inputs.
        family: which kind of values.
        generator: of random numbers.
        scale: a factor for floating values.

    Raises:
        Unsupported: an input cannot be copied.
    """
    copies = cloned(values)
    with torch.no_grad():
        for copy in copies:
            if not isinstance(copy, Tensor) or not copy.numel() or _overlaps_itself(copy):
                continue
            real = torch.view_as_real(copy.conj() if copy.is_conj() else copy) if copy.is_complex() else copy
            real.copy_(sample_input(real.cpu(), family, generator, scale))
    return copies


def is_tangent(node: fx.Node) -> bool:
    """Whether an input of a joint or backward graph is the gradient of an output."""
    return str(node.target).startswith("tangents_")


def describe_input(node: fx.Node) -> str:
    """Name an input, with what it is in the user's program if known."""
    text = node.meta.get("input") or getattr(node.meta.get("desc"), "target", None)
    return f"{node.name} ({text})" if isinstance(text, str) else node.name


def scaled(values: Sequence[Any], factor: float) -> list[Any]:
    """Copy inputs with all floats multiplied by a power of two."""
    copies = cloned(values)
    with torch.no_grad():
        for copy in copies:
            is_float = isinstance(copy, Tensor) and (copy.is_floating_point() or copy.is_complex())
            if is_float and not _overlaps_itself(copy):
                copy.copy_(computable(copy) * factor)
    return copies


def in_memory(value: Tensor) -> Tensor:
    """Return the part of a tensor that may be written: of each dimension that was expanded, the first entry."""
    return value.as_strided(
        [1 if s == 0 else n for n, s in zip(value.shape, value.stride(), strict=True)], value.stride()
    )


def _overlaps_itself(value: Tensor) -> bool:
    return any(s == 0 and n > 1 for n, s in zip(value.shape, value.stride(), strict=True))


def other_sizes(
    inputs: Sequence[fx.Node], real: Bindings, first: Sequence[int] = ()
) -> Iterator[dict[sympy.Symbol, int]]:
    """Yield other values for the symbols, within the ranges and guards recorded during tracing.

    Each symbol alone takes a series of sizes, smallest first, then all of them together. No guard is added.

    Args:
        inputs: the placeholders of the graph.
        real: the values of a call.
        first: sizes to try before the others.
    """
    env = shape_env_of([value_of(node) for node in inputs])
    if env is None or not real:
        return
    fixed = dict(hints_of(env))
    seen = {tuple(real.values())}
    alone = [{symbol: size} for size in (*first, *_SIZES) for symbol in real]
    together = [dict.fromkeys(real, size) for size in _SIZES]
    for change in itertools.chain.from_iterable(itertools.zip_longest(alone, together, fillvalue={})):
        chosen = {**real, **change}
        key = tuple(chosen.values())
        if key not in seen and _satisfies_guards(env, {**fixed, **chosen}):
            seen.add(key)
            yield chosen


def count_elements(gm: fx.GraphModule, sizes: Bindings) -> int:
    """Count the elements of all values of a graph at these sizes, except those that depend on data."""
    held = [value for n in gm.graph.nodes for value in tree_leaves(value_of(n)) if isinstance(value, Tensor)]
    counts = Counter(
        size.node.expr if isinstance(size, torch.SymInt) else size for size in (v.numel() for v in held)
    )
    return sum(times * int(_evaluate(size, sizes) or 0) for size, times in counts.items())


def _satisfies_guards(env: Any, values: Bindings) -> bool:
    for symbol, value in values.items():
        bounds = env.var_to_range.get(symbol)
        if bounds is not None and not (bounds.lower <= value <= bounds.upper):
            return False
        replaced = env.replacements.get(symbol)
        if replaced is not None and _evaluate(replaced, values) not in (None, value):
            return False
    for guard in env.guards:
        if _substitute(guard.expr, values) is sympy.false:
            return False
    return all(_evaluate(expression, values) in (None, 0) for expression in env.divisible)


def _evaluate(expression: sympy.Expr, values: Bindings) -> sympy.Expr | None:
    """Evaluate an expression (of sizes, or of Dynamo's symbolic floats), if the symbols decide it."""
    result = _substitute(expression, values)
    return result if result.is_number else None


def _substitute(expression: Any, values: Bindings) -> sympy.Expr:
    return sympy.sympify(sympy.sympify(expression).xreplace({k: sympy.sympify(v) for k, v in values.items()}))


def resized_inputs(
    inputs: Sequence[fx.Node], real: Sequence[Any], chosen: Bindings, generator: torch.Generator
) -> list[Any]:
    """Make inputs for other sizes, with values like the real ones.

    Integers and flags are sampled from the real values (they may be indices), floating ones have the mean and
    standard deviation of the real ones. An input without symbolic sizes is kept.

    Args:
        inputs: the placeholders of the graph.
        real: the inputs of a call, one for each.
        chosen: the values of the symbols.
        generator: of random numbers.

    Raises:
        Unsupported: an input has more than a few million elements, or another type.
    """

    def one(node: fx.Node, value: Any) -> Any:
        fake = value_of(node)
        if isinstance(fake, torch.SymInt):
            return _evaluate_size(fake, chosen)
        if not isinstance(fake, Tensor):
            return value
        if not any(isinstance(s, torch.SymInt) for s in (*fake.shape, *fake.stride())):
            return cloned([value])[0]
        result = _empty_like_fake(fake, chosen)
        if not value.numel():
            return result.zero_()
        if value.is_floating_point():
            std = value.double().std().item() if value.numel() > 1 else 1.0
            drawn = torch.randn(result.shape, generator=generator) * std + value.double().mean().item()
            return result.copy_(drawn)
        index = torch.randint(value.numel(), result.shape, generator=generator).to(value.device)
        return result.copy_(value.flatten()[index])

    with torch.no_grad():
        return [one(node, value) for node, value in zip(inputs, real, strict=True)]


def _empty_like_fake(fake: Tensor, bound: Bindings) -> Tensor:
    shape = [_evaluate_size(s, bound) for s in fake.shape]
    stride = [_evaluate_size(s, bound) for s in fake.stride()]
    if sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) > _MAX_ELEMENTS:
        raise Unsupported(f"an input of size {shape}")
    return torch.empty_strided(shape, stride, dtype=fake.dtype, device=fake.device)


def _evaluate_size(size: Any, bound: Bindings) -> int:
    if isinstance(size, int):
        return size
    env = size.node.shape_env
    value = _substitute(env.replace(size.node.expr), {**hints_of(env), **bound})
    if not value.is_number:
        raise Unsupported(f"a size that depends on data: {size}")
    return int(value)
