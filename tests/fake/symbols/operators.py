"""Operators of ``op_db`` on symbolic sizes: if the guards of a trace accept other sizes, eager must as well.

Each sample is traced with a symbol for every size: once as it is, and once with all sizes less by two than
those of the inputs, so that sizes 0 and 1 occur behind the guards. Then sizes are changed, all equal ones
together and each alone. If the guards accept them, eager must have a result (with the sample's values, zeros
or ones) with the metadata that the trace predicts.

As a program, it sweeps: ``python -m tests.fake.symbols.operators --shard 0/24 --samples 3 [names]``.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree

import fake
from benchmarks.conformance._torch import op_db

Sizes = list[tuple[int, ...]]

LESS = 2
_CRASHES = ("lu_unpack", "nn.functional.ctc_loss")
"""Entries whose kernels crash, or read anything, where sizes do not fit the values."""
_ABOUT_VALUES = (
    "is out of bounds for dim",
    "singular",
    "must be between 1 and",
    "is zero and using it on lu_solve",
)
"""What eager says where values, not sizes, are wrong."""


class Sample:
    """A sample of an entry, its tensors apart."""

    def __init__(self, entry: Any, sample: Any) -> None:
        self._op = entry.op
        self._leaves, self._spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self._places = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self._leaves[place].detach().clone() for place in self._places]

    def run(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return pytree.tree_leaves(self._op(first, *args, **kwargs))


def disagreement(sample: Sample, *, less: int) -> str | None:
    """What is wrong at some sizes, or nothing; nothing either if the sample says nothing of sizes."""
    tensors = sample.tensors
    if not tensors or any(t.layout is not torch.strided or t.is_nested for t in tensors):
        return None
    example = [tuple(size + less for size in t.shape) for t in tensors]
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv(duck_shape=False))
    bases = [torch.empty(sizes, dtype=t.dtype) for sizes, t in zip(example, tensors, strict=True)]
    inputs = [mode.from_tensor(base, name=f"x{place}") for place, base in enumerate(bases)]
    try:
        sample.run(tensors)
        with mode, enable_python_dispatcher():
            smaller = (
                [torch.empty([s - less for s in t.shape], dtype=t.dtype) for t in inputs] if less else inputs
            )
            results = sample.run(smaller)
    except Exception:  # noqa: BLE001 - traces that fail are what the conformance sweep looks for
        return None
    accepts = mode.shape_env.guards.compile()
    if accepts.inputs != tuple(f"x{place}" for place in range(len(inputs))):
        return None  # the guards also depend on a number read from a tensor
    symbols = {
        size.node._expr: (place, dim)
        for place, t in enumerate(inputs)
        for dim, size in enumerate(t.shape)
        if isinstance(size, torch.SymInt)
    }
    for sizes in [example, *_others(example, less)]:
        if not accepts(
            *(torch.empty(s, dtype=t.dtype, device="meta") for s, t in zip(sizes, tensors, strict=True))
        ):
            if sizes is example:
                return f"the example is refused: {accepts.code}"
            continue
        small = [tuple(size - less for size in s) for s in sizes]
        expected = _in_eager(sample, tensors, small)
        if isinstance(expected, Exception):
            if any(text in str(expected) and "size 0" not in str(expected) for text in _ABOUT_VALUES):
                continue
            return f"accepted {small}, which eager refuses: {expected}"
        values = {symbol: sympy.Integer(sizes[place][dim]) for symbol, (place, dim) in symbols.items()}
        found = [_metadata(result, values) for result in results]
        if None not in found and found != [_metadata(result, {}) for result in expected]:
            return f"at {small}: {found}"
    return None


def _others(example: Sizes, less: int) -> Iterator[Sizes]:
    """Other sizes: of all dimensions of one size, and of each dimension by itself."""
    for size in sorted({size for sizes in example for size in sizes}):
        for other in {size + 1, size - 1, less, less + 1, less + 2, 2 * size} - {size, -1}:
            yield [tuple(other if s == size else s for s in sizes) for sizes in example]
    for place, sizes in enumerate(example):
        for dim, size in enumerate(sizes):
            for other in {size + 1, size - 1, less, less + 1} - {size, -1}:
                changed = (*sizes[:dim], other, *sizes[dim + 1 :])
                yield [*example[:place], changed, *example[place + 1 :]]


def _in_eager(sample: Sample, tensors: Sequence[torch.Tensor], sizes: Sizes) -> list[Any] | Exception:
    """The results with one of several values, or the first error."""
    first: Exception | None = None
    for fill in (_repeated, lambda t, size: t.new_zeros(size), lambda t, size: t.new_ones(size)):
        try:
            return sample.run([fill(t, size) for t, size in zip(tensors, sizes, strict=True)])
        except Exception as error:  # noqa: BLE001 - eager may refuse with any error
            first = first or error
    assert first is not None
    return first


def _repeated(tensor: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """The elements of a tensor, over and over."""
    count = torch.Size(sizes).numel()
    flat = tensor.reshape(-1) if tensor.numel() else tensor.new_ones(1)
    return flat.repeat(count // flat.numel() + 1)[:count].reshape(sizes).clone()


def _metadata(result: Any, values: dict[sympy.Symbol, sympy.Integer]) -> Any:
    """Sizes, strides where something is stepped along, offset and dtype; ``None`` if they depend on data."""
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return ()
    numbers = [
        n.node.expr.xreplace(values) if isinstance(n, torch.SymInt) else sympy.Integer(n)
        for n in (*result.shape, *result.stride(), result.storage_offset())
    ]
    if any(n.free_symbols for n in numbers):
        return None
    sizes, strides = numbers[: result.dim()], numbers[result.dim() : -1]
    stepped = [0 if 0 in sizes or n == 1 else step for n, step in zip(sizes, strides, strict=True)]
    return [*map(int, sizes)], [*map(int, stepped)], int(numbers[-1]), result.dtype


def samples(name: str, count: int) -> Iterator[tuple[str, Sample]]:
    """Samples of the entries of one name, evenly spread."""
    for entry in op_db():
        if entry.name != name or not entry.supported_dtypes("cpu"):
            continue
        supported = entry.supported_dtypes("cpu")
        dtype = torch.float32 if torch.float32 in supported else min(supported, key=str)
        torch.manual_seed(0)
        found = list(itertools.islice(entry.sample_inputs("cpu", dtype), 40))
        for place in range(0, len(found), max(1, -(-len(found) // count))):
            yield f"{entry.name} {entry.variant_test_name} #{place}", Sample(entry, found[place])


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep over the entries, or those named; print what is wrong."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--samples", type=int, default=3)
    options = parser.parse_args(arguments)
    index, count = map(int, options.shard.split("/"))
    names = options.names or sorted({entry.name for entry in op_db()} - set(_CRASHES))[index::count]
    counts: Counter[str] = Counter()
    for name in names:
        for label, sample in samples(name, options.samples):
            for less in (0, LESS):
                problem = disagreement(sample, less=less)
                counts["right" if problem is None else "wrong"] += 1
                if problem is not None:
                    print(f"    {label}, {less} less: {problem}", flush=True)
    print(dict(counts))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
