"""Candidate expressions, simplest first, for shapes of any rank, for dtypes and for strides.

A candidate is the text of a Python expression over the arguments that may use the functions of `helpers`. It
is kept if it gives the observed answer for every observation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fake.library.probe.call_facts import TensorFact
from fake.library.probe.experiments import Observation


class Vocabulary:
    """The names that expressions may use, taken from the arguments seen in a group of observations."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        values: dict[str, list[object]] = {}
        for observation in observations:
            for name, value in observation.facts.values.items():
                values.setdefault(name, []).append(value)
        everywhere = len(observations)
        self.names = list(values)

        def named(test: Callable[[Any], bool], *, always: bool = False) -> list[str]:
            return [
                n
                for n, v in values.items()
                if any(test(x) for x in v) and (not always or len(v) == everywhere)
            ]

        self.tensors = [
            n for n, v in values.items() if len(v) == everywhere and all(isinstance(x, TensorFact) for x in v)
        ]
        self.lists = named(lambda x: isinstance(x, list), always=True)
        self.ints = named(lambda x: isinstance(x, int) and not isinstance(x, bool))
        self.int_lists = named(
            lambda x: isinstance(x, tuple) and bool(x) and all(isinstance(i, int) for i in x)
        )
        self.flags = named(lambda x: isinstance(x, bool))
        self.dtypes = named(lambda x: isinstance(x, torch.dtype))
        self.floats = named(lambda x: isinstance(x, (float, complex)))
        elements = min(
            (len(x) for n in self.lists for v in [values[n]] for x in v if isinstance(x, list)), default=0
        )
        self.elements = [f"{n}[{i}]" for n in self.lists for i in range(min(elements, 3))]


#: Separates tiers of candidates: later tiers are tried only if no earlier one has a fit.
TIER = 0


def shape_candidates(words: Vocabulary) -> Iterator[Any]:
    """Yield expressions for the shape of one output, with `TIER` before each less plausible group."""
    tensors = (words.tensors + words.elements)[:5]
    yield from (f"{p}.shape" for p in tensors)
    if len(tensors) > 1:
        yield "broadcast(" + ", ".join(f"{p}.shape" for p in tensors) + ")"
    for p, q in itertools.combinations(tensors, 2):
        yield f"broadcast({p}.shape, {q}.shape)"
    for name in words.lists:
        yield f"broadcast(*[t.shape for t in {name}])"
        for dim in (*words.ints, "0", "1", "-1"):
            yield f"concatenated({name}, {dim})"
            yield f"stacked({name}, {dim})"
    yield "()"
    yield TIER
    yield from _from_arguments(words, tensors)
    yield from _reductions(words, tensors)
    yield TIER
    yield from _replacements(words, tensors)
    yield from _matmuls(words, tensors)
    yield TIER
    yield from _tails(words, tensors)
    yield TIER
    yield from _convolutions(words, tensors)


def _from_arguments(words: Vocabulary, tensors: list[str]) -> Iterator[str]:
    sizes = words.int_lists + words.ints
    for name in sizes:
        yield f"given_shape({name})"
        for p in tensors[:2]:
            yield f"given_shape({name}, {p}.numel())"
            yield f"{p}.shape + given_shape({name})"
            yield f"{p}.shape[1:] + given_shape({name})"
            yield f"given_shape({name}) + {p}.shape"
    for a, b in itertools.permutations(words.ints, 2):
        yield f"({a}, {b})"
    for p in tensors[:2]:
        yield f"({p}.numel(),)"
        yield f"({p}.numel(), {p}.dim())"
        for name in sizes:
            yield f"{p}.shape[:2] + given_shape({name}) * (1 if not isinstance({name}, int) else {p}.dim() - 2)"
            yield f"({name}, {p}.dim())"
        for scale in words.floats:
            yield f"{p}.shape[:2] + tuple(int(s * {scale}) for s in {p}.shape[2:])"
        for name in words.int_lists:
            yield f"padded({p}.shape, {name})"
            yield f"broadcast({p}.shape, {name})"
            yield f"{p}.shape[:2] + tuple({name})"
            yield f"{p}.shape[:-len({name})] + tuple({name})"
            yield f"tuple({p}.shape[d] for d in {name})"
            yield f"tuple(s * r for s, r in zip((1,) * (len({name}) - {p}.dim()) + {p}.shape, {name}))"


def _reductions(words: Vocabulary, tensors: list[str]) -> Iterator[str]:
    dims = [*words.ints, *words.int_lists, "None", "-1", "0", "1", "(-2, -1)", "-2"]
    for p in tensors[:3]:
        for dim in dims:
            for keep in (*words.flags, "False", "True"):
                yield f"reduced({p}.shape, {dim}, {keep})"
    if len(tensors) > 1:
        joint = "broadcast(" + ", ".join(f"{p}.shape" for p in tensors[:2]) + ")"
        for dim in dims:
            for keep in (*words.flags, "False"):
                yield f"reduced({joint}, {dim}, {keep})"


def _replacements(words: Vocabulary, tensors: list[str]) -> Iterator[str]:
    for p in tensors[:2]:
        for dim in (*words.ints, "-1", "0", "1", "-2"):
            size = f"{p}.shape[{dim}]"
            yield f"replaced({p}.shape, {dim}, {size} // 2 + 1)"
            yield f"replaced({p}.shape, {dim}, 2 * ({size} - 1))"
            yield f"replaced({p}.shape, {dim}, {size} // 2)"
            yield f"replaced({p}.shape, {dim}, {size} - 1)"
            yield f"replaced({p}.shape, {dim}, {size} + 1)"
            for number in words.ints:
                if number != dim:
                    yield f"replaced({p}.shape, {dim}, {number})"
                    yield f"replaced({p}.shape, {dim}, {number} // 2 + 1)"
                    yield f"replaced({p}.shape, {dim}, {size} * {number})"
            for q in tensors:
                if q != p:
                    yield f"replaced({p}.shape, {dim}, {q}.numel())"
                    yield f"replaced({p}.shape, {dim}, {q}.shape[0])"
                    yield f"replaced({p}.shape, {dim}, {q}.shape[-1])"
                    yield f"replaced({p}.shape, {dim}, {size} + {q}.shape[{dim}])"
        for a, b in itertools.combinations(words.ints, 2):
            yield f"transposed({p}.shape, {a}, {b})"
            yield f"transposed({p}.shape, {b}, {a})"
        yield f"transposed({p}.shape, -1, -2)"
        yield f"transposed({p}.shape, 0, 1)"
        yield f"{p}.shape[::-1]"


_SLICES = ("", "[1:-1]", "[:-1]", "[:-2]", "[1:]", "[2:]", "[-1:]", "[-2:-1]", "[:1]", "[:2]")


def _matmuls(words: Vocabulary, tensors: list[str]) -> Iterator[str]:
    for p, q in itertools.permutations(tensors[:4], 2):
        yield f"matmul_shape({p}.shape, {q}.shape)"
        yield f"matmul_shape({p}.shape, {q}.shape[::-1])"
        yield f"broadcast({p}.shape[:-2], {q}.shape[:-2]) + {q}.shape[-2:]"
        yield f"broadcast({p}.shape[:-2], {q}.shape[:-2]) + {p}.shape[-2:]"
        yield f"broadcast({p}.shape[:-1], {q}.shape[:-1])"
        yield f"broadcast({p}.shape[:-1], {q}.shape[:-1]) + {p}.shape[-1:]"
        yield f"broadcast({p}.shape[:-2], {q}.shape[:-2]) + ({p}.shape[-2], {q}.shape[-2])"
        yield f"broadcast({p}.shape[:-2], {q}.shape[:-1]) + {p}.shape[-2:-1]"
        yield f"broadcast({p}.shape[:-2], {q}.shape[:-1]) + {p}.shape[-1:]"
        for a, b in itertools.product(_SLICES, _SLICES):
            yield f"{p}.shape{a} + {q}.shape{b}"
            yield f"broadcast({p}.shape{a}, {q}.shape{b})"
    if len(tensors) > 2:
        for p, q, r in itertools.permutations(tensors[:4], 3):
            yield f"broadcast({r}.shape, matmul_shape({p}.shape, {q}.shape))"


def _tails(words: Vocabulary, tensors: list[str]) -> Iterator[str]:
    for p in tensors[:2]:
        m, n = f"{p}.shape[-2]", f"{p}.shape[-1]"
        ends = [m, n, f"min({m}, {n})", "1", "2", "3", *words.ints]
        ends += [f"{q}.shape[-1]" for q in tensors if q != p]
        for end in (*ends, f"{n} * ({n} - 1) // 2", f"{n} - 1", f"{n} + 1", f"{n} // 2 + 1"):
            yield f"{p}.shape[:-1] + ({end},)"
            yield f"{p}.shape + ({end},)"
            yield f"{p}.shape[:-2] + ({end},)"
        for a, b in itertools.product(ends, ends):
            yield f"batched({p}.shape, {a}, {b})"
            yield f"{p}.shape[:-1] + ({a}, {b})"
        for flag in words.flags:
            yield f"batched({p}.shape, {m}, {m} if {flag} else min({m}, {n}))"
            yield f"batched({p}.shape, {n} if {flag} else min({m}, {n}), {n})"
        yield f"batched({p}.shape)"


def _convolutions(words: Vocabulary, tensors: list[str]) -> Iterator[str]:
    """Try which argument of a convolution or pooling is the kernel size, the stride, the padding."""
    numbers = list(dict.fromkeys([*words.ints, *words.int_lists]))[:6]
    for p in tensors[:1]:
        for q in tensors[1:2]:
            yield from (
                f"{p}.shape[:1 - {q}.dim()] + ({q}.shape[0],) + tuple(conv_size({p}.shape[i], {q}.shape[i], "
                f"pair({step}, i, 1), pair({pad}, i, 0), pair({dilation}, i, 1)) for i in range(2 - {q}.dim(), 0))"
                for step, pad, dilation in _choices(numbers, 3)
            )
            for groups in (*words.ints, "1"):
                yield from (
                    f"{p}.shape[:1 - {q}.dim()] + ({q}.shape[1] * ({groups} or 1),) + tuple(conv_transpose_size("
                    f"{p}.shape[i], {q}.shape[i], pair({step}, i, 1), pair({pad}, i, 0), pair({extra}, i, 0), "
                    f"pair({dilation}, i, 1)) for i in range(2 - {q}.dim(), 0))"
                    for step, pad, extra, dilation in _choices([n for n in numbers if n != groups], 4)
                )
        flags = [*words.flags, "False"]
        for spatial in (1, 2, 3):
            for kernel in numbers:
                for step, pad, dilation in _choices(numbers[numbers.index(kernel) + 1 :], 3):
                    for flag in flags:
                        yield (
                            f"{p}.shape[:-{spatial}] + tuple(conv_size({p}.shape[i], pair({kernel}, i, 1), "
                            f"pair({step}, i, pair({kernel}, i, 1)), pair({pad}, i, 0), pair({dilation}, i, 1), {flag}) "
                            f"for i in range(-{spatial}, 0))"
                        )


def _choices(names: list[str], count: int) -> Iterator[tuple[str, ...]]:
    """Yield distinct names in parameter order, or None, for ``count`` places: stride, padding, dilation."""
    for chosen in itertools.product([*names, "None"], repeat=count):
        places = [names.index(c) for c in chosen if c != "None"]
        if places == sorted(set(places)):
            yield chosen


# --- dtypes and strides ---------------------------------------------------------------------------
_DTYPES = (torch.bool, torch.int64, torch.int32, torch.float32, torch.float64, torch.uint8, torch.complex64)


def dtype_candidates(words: Vocabulary) -> Iterator[Any]:
    """Yield expressions for the dtype of one output, simplest first."""
    tensors = (words.tensors + words.elements)[:4]
    bases = [f"{p}.dtype" for p in tensors]
    if len(tensors) > 1:
        bases.append(f"promoted({', '.join(tensors)})")
    for name in words.lists:
        bases.append(f"promoted(*{name})")
    operands = tensors + words.ints + words.floats
    if tensors and len(operands) > len(tensors):
        bases.append(f"promoted({', '.join(operands)})")
        bases += [f"promoted({tensors[0]}, {number})" for number in words.ints + words.floats]
    for pair in itertools.pairwise(tensors):
        bases.append(f"promoted({', '.join(pair)})")
    plain = list(dict.fromkeys(bases))
    for base in plain:
        for given in words.dtypes:
            yield f"{given} or {base}"
            yield f"{given} or floating({base})"
            yield f"{given} or integral_sum({base})"
            yield f"{given} or real({base})"
    yield from plain
    yield from (f"floating({base})" for base in plain)
    yield from (f"real({base})" for base in plain)
    yield from (f"real(floating({base}))" for base in plain)
    yield from (f"integral_sum({base})" for base in plain)
    yield from (f"to_complex({base})" for base in plain)
    for given in words.dtypes:
        yield f"{given} or torch.get_default_dtype()"
        yield f"{given} or torch.int64"
    yield from (str(dtype) for dtype in _DTYPES)
    for flag in words.flags:
        yield f"torch.int32 if {flag} else torch.int64"


def stride_candidates(words: Vocabulary) -> Iterator[Any]:
    """Yield expressions for the strides of one output of ``shape``, simplest first."""
    tensors = (words.tensors + words.elements)[:4]
    yield "row_major(shape)"
    if tensors:
        yield f"elementwise_strides(shape, {', '.join(tensors)})"
    for p in tensors[:2]:
        yield f"elementwise_strides(shape, {p})"
        yield f"suggested_strides(shape, {p})"
        yield f"ordered_strides(shape, {p})"
        yield f"{p}.stride()"
    yield TIER
    yield "transposed(row_major(transposed(shape, -1, -2)), -1, -2)"
    yield "row_major(shape[::-1])[::-1]"
    for dim in (*words.ints, "0", "1"):
        yield f"moved_strides(shape, {dim})"
