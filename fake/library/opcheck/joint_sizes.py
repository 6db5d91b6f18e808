"""Sizes of operators that C++ defines: those that are equal in the sample change together, and carefully.

Such a kernel may index without checking, so sizes are not tried one by one, and do not shrink where integers may be
indices.
"""

from __future__ import annotations

from collections.abc import Iterator

from fake.library.opcheck.inputs import Call, refill
from fake.library.opcheck.variations import value_variations

_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31)


def joint_size_variations(call: Call) -> Iterator[Call]:
    """Calls with other sizes, storage offsets and values."""
    call = call.detached()
    sizes = sorted({s for t in call.tensors for s in t.shape if s > 1})
    larger = {s: s + _PRIMES[i % len(_PRIMES)] for i, s in enumerate(sizes)}
    if sizes:
        yield _resized(call, larger, "all sizes larger")
    may_shrink = all(t.is_floating_point() or t.is_complex() for t in call.tensors)
    for size in sizes:
        yield _resized(call, {size: larger[size]}, f"size {size} → {larger[size]}")
        if may_shrink:
            yield _resized(call, {size: 1}, f"size {size} → 1")
            yield _resized(call, {size: 0}, f"size {size} → 0")
    yield from (
        v
        for v in value_variations(call)
        if not any(word in v.label for word in ("indices", "integers", "masks"))
    )


def _resized(call: Call, sizes: dict[int, int], label: str) -> Call:
    def change(tensor):  # type: ignore[no-untyped-def]
        shape = [sizes.get(size, size) for size in tensor.shape]
        return tensor if shape == list(tensor.shape) else refill(tensor, shape)

    return call.map(change, label, "size")
