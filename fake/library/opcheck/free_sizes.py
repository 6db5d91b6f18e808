"""Find out how the sizes of a call may change: which are free, which change together, and which are fixed.

The sample is a hint. Each dimension is tried alone. One that the kernel refuses to change alone is tried with
the dimensions and numbers of the same size, reduced to the fewest that must change together, and then with
one other dimension or number that grows by as much, or by the same factor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fake.error_text import error_text
from fake.library.opcheck.sample_calls import Call, attempt, flat_tensors, is_permutation, refill_like

#: A size: ("tensor", number of the tensor in the call, dimension) or ("number", leaf of the call, 0).
SizeKey = tuple[str, int, int]

_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29)
#: Sizes at which kernels change their behavior: one block, a whole number of blocks, one more.
_MORE_SIZES = (2, 8, 9, 16, 17, 33, 64, 65, 128)
_MAX_ELEMENTS = 1 << 14


@dataclass(frozen=True)
class SizeGroup:
    """Sizes that change together.

    Attributes:
        sizes: their values in the sample; the first is the one that was queried.
        relation: "same" size, "grow" by as much, or "scale" by the same factor.
        accepted: a value of the first size that the kernel accepts.
        in_output: whether the outputs' sizes change with it (not if the sizes are summed over).
    """

    sizes: dict[SizeKey, int]
    relation: str
    accepted: int
    in_output: bool = True

    @property
    def size(self) -> int:
        """The value of the first size in the sample."""
        return next(iter(self.sizes.values()))

    def at(self, new: int) -> dict[SizeKey, int] | None:
        """Return the values of all sizes when the first is ``new``, or None if that is impossible."""
        if self.relation == "same":
            return dict.fromkeys(self.sizes, new)
        if self.relation == "grow":
            moved = {key: size + new - self.size for key, size in self.sizes.items()}
            return moved if min(moved.values()) >= 0 else None
        if self.size == 0 or new % self.size:
            return None
        return {key: size * (new // self.size) for key, size in self.sizes.items()}


@dataclass(frozen=True)
class SizePlan:
    """The sizes of one call that can change, and how.

    Attributes:
        groups: the sizes that can change.
        fixed_sizes: a dimension that cannot change (as text) → the kernel's reason.
        ties: sizes that always equal another one.
        broadcast: the tensors (by number) that the kernel also accepts with a single element.
    """

    call: Call
    groups: list[SizeGroup]
    fixed_sizes: dict[str, str]
    broadcast: frozenset[int] = frozenset()
    ties: Mapping[SizeKey, SizeKey] = field(default_factory=dict)

    def calls(self, constants: tuple[int, ...] = ()) -> Iterator[Call]:
        """Yield calls with other sizes. ``constants`` are numbers near which the operator may branch."""
        yield from self.all_different()
        few = len(self.groups) > 6
        for group in self.groups:
            size = group.size
            sizes = [group.accepted, 1, 0, 2 * size, size + 1]
            if not few:
                around = [c + step for c in constants for step in (0, 1, -1)]
                sizes += [*around, *_MORE_SIZES]
            # The result of a sum over nothing is an accident of the kernel.
            lowest = 0 if group.in_output or len(group.sizes) == 1 else 1
            for new in dict.fromkeys(s for s in sizes if s >= lowest):
                yield from self.at(group, new)
        for new in (1, 2, 0):
            yield from self._all_at(new)
        yield from self._broadcasts()

    def all_different(self) -> Iterator[Call]:
        """Change every size so that no two are equal: once rising, once falling in argument order."""
        for order in (_PRIMES, tuple(reversed(_PRIMES[: max(len(self.groups), 2)]))):
            sizes: dict[SizeKey, int] = {}
            for index, group in enumerate(self.groups):
                wanted = group.size + order[index % len(order)]
                if group.relation == "scale":
                    wanted = group.size * (2 + index)
                if group.accepted < group.size or (group.accepted - group.size) not in _PRIMES:
                    wanted = group.accepted
                sizes.update(group.at(wanted) or {})
            if sizes:
                yield from self._resized(sizes, "all sizes larger and different")

    def _all_at(self, new: int) -> Iterator[Call]:
        sizes: dict[SizeKey, int] = {}
        for group in self.groups:
            sizes.update((group.at(new) if new or group.in_output else None) or {})
        if len(self.groups) > 1 and sizes:
            yield from self._resized(sizes, f"all sizes {new}")

    def at(self, group: SizeGroup, new: int) -> Iterator[Call]:
        """Yield the call with ``new`` as the first size of ``group``."""
        sizes = group.at(new)
        if sizes is not None and new != group.size:
            where = ", ".join(_key_text(self.call, key) for key in group.sizes)
            yield from self._resized(sizes, f"size {group.size} → {new} ({where})")

    def _resized(self, sizes: Mapping[SizeKey, int], label: str, kind: str = "size") -> Iterator[Call]:
        call = resize(self.call, _with_ties(sizes, self.ties), label, kind)
        if call is None:
            return
        before = max((t.numel() for t in self.call.tensors), default=0)
        if all(t.numel() <= max(_MAX_ELEMENTS, 4 * before) for t in call.tensors):
            yield call

    def _broadcasts(self) -> Iterator[Call]:
        """Make dimensions of one tensor 1, and remove them, while those of its peers (same rank) stay.

        Only for tensors that the kernel accepts with one element: there, all dimensions should broadcast.
        """
        tensors = self.call.tensors
        bound: dict[int, set[int]] = {}
        for group in self.groups:
            members = [p for p in group.sizes if p[0] == "tensor"]
            for _, number, dim in members:
                peers = [tensors[n] for _, n, d in members if n != number and d == dim]
                if group.relation == "same" and any(p.dim() == tensors[number].dim() for p in peers):
                    bound.setdefault(number, set()).add(dim)
        for number, dims in bound.items():
            if number not in self.broadcast:
                continue  # a batch, for example: some of its sizes broadcast inside the kernel by chance
            for dim in sorted(dims):
                if tensors[number].shape[dim] != 1:
                    label = f"dimension {dim} of {_tensor_name(self.call, number)} broadcast from 1"
                    yield from self._resized({("tensor", number, dim): 1}, label, "broadcast")
            if len(dims) == tensors[number].dim():
                for left in range(tensors[number].dim()):
                    label = f"{_tensor_name(self.call, number)} with {left} dimensions, broadcast"
                    shape = list(tensors[number].shape[tensors[number].dim() - left :])
                    yield from _replaced(self.call, tensors[number], shape, label)


def _replaced(call: Call, old: Any, shape: list[int], label: str) -> Iterator[Call]:
    other = call.map(lambda t: refill_like(t, shape) if t is old else t, label, "broadcast")
    other_in_bounds = _in_bounds(call, other)
    if other_in_bounds is not None:
        yield other_in_bounds


def resize(call: Call, sizes: Mapping[SizeKey, int], label: str, kind: str = "size") -> Call | None:
    """Return the call with some sizes changed, or None if a permutation would then be out of bounds.

    Args:
        call: the call in the sample's sizes.
        sizes: the new sizes; sizes not listed stay.
        label: what was changed, for messages.
        kind: the kind of variation.
    """
    numbers = {id(t): n for n, t in enumerate(call.tensors)}

    def change(tensor: Any) -> Any:
        number = numbers[id(tensor)]
        shape = [sizes.get(("tensor", number, dim), size) for dim, size in enumerate(tensor.shape)]
        return tensor if shape == list(tensor.shape) else refill_like(tensor, shape)

    resized = _in_bounds(call, call.map(change, label, kind))
    return resized and resized.replace_leaves(
        {leaf: new for (what, leaf, _), new in sizes.items() if what == "number"}
    )


def _in_bounds(sample: Call, resized: Call) -> Call | None:
    """Clamp integers that may be indices or offsets of a dimension that has shrunk, so that they stay in
    bounds; None if they were a permutation, which clamping would destroy.

    Kernels need not check whether integers are in bounds, and may end the process.
    """
    pairs = list(zip(sample.tensors, resized.tensors, strict=True))
    shrunk = [(old, new) for a, b in pairs for old, new in zip(a.shape, b.shape, strict=False) if new < old]
    limits: dict[int, int] = {}
    for before, tensor in pairs if shrunk else ():
        other = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool
        if other or tensor.layout is not torch.strided or not tensor.numel():
            continue
        reach = max(int(tensor.max()) + 1, -int(tensor.min()))
        beyond = [new for old, new in shrunk if new < reach <= old + 1]
        if beyond and is_permutation(before):
            return None
        if beyond:
            limits[id(tensor)] = min(beyond)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        limit = limits.get(id(tensor))
        return tensor if limit is None else tensor.clamp(-limit, max(limit - 1, 0))

    return resized.map(change)


def _tensor_name(call: Call, number: int) -> str:
    return call.tensor_names()[number]


def _key_text(call: Call, key: SizeKey) -> str:
    what, number, dim = key
    if what == "number":
        return call.leaf_names()[number]
    return f"{_tensor_name(call, number)}.shape[{dim}]"


def _ties(tensors: list[torch.Tensor]) -> dict[SizeKey, SizeKey]:
    """Map each dimension of an integer tensor to that of a floating-point tensor of the same shape."""
    floating = {t.shape: n for n, t in enumerate(tensors) if t.is_floating_point()}
    return {
        ("tensor", n, dim): ("tensor", floating[t.shape], dim)
        for n, t in enumerate(tensors)
        if not t.is_floating_point() and t.shape in floating
        for dim in range(t.dim())
    }


def _with_ties(sizes: Mapping[SizeKey, int], ties: Mapping[SizeKey, SizeKey]) -> Mapping[SizeKey, int]:
    return {**sizes, **{key: sizes[other] for key, other in ties.items() if other in sizes}}


def plan_sizes(op: Any, call: Call, *, tied: bool = False) -> SizePlan:
    """Find out how the sizes of ``call`` may change, by running the kernel.

    Args:
        op: the overload whose kernel is run.
        call: the sample, which the kernel accepts.
        tied: keep integer tensors in the shape of a floating-point tensor if they have it in the sample.
    """
    call = call.detached()
    tensors = call.tensors
    leaves = call.leaves
    dims: list[tuple[SizeKey, int]] = []
    for number, tensor in enumerate(tensors):
        if tensor.layout is torch.strided:
            dims += [(("tensor", number, dim), size) for dim, size in enumerate(tensor.shape)]
    ties = _ties(tensors) if tied else {}
    dims = [(key, size) for key, size in dims if key not in ties]
    numbers = [
        (("number", leaf, 0), value) for leaf, value in enumerate(leaves) if type(value) is int and value > 1
    ]
    search = _Search(op, call, dims, numbers, ties)
    groups: list[SizeGroup] = []
    fixed_sizes: dict[str, str] = {}
    covered: set[SizeKey] = set()
    for index, (key, size) in enumerate(dims[:24]):
        if key in covered:
            continue
        group = search.find(key, size, _PRIMES[index % len(_PRIMES)])
        if group is not None:
            groups.append(group)
            covered |= set(group.sizes)
        else:
            fixed_sizes[f"{_key_text(call, key)} = {size}"] = search.reason
    for key, size in dims[24:]:
        fixed_sizes[f"{_key_text(call, key)} = {size}"] = "not tried: the call has more than 24 dimensions"
    found = [replace(f, in_output=search.changes_output(f)) for f in groups]
    ones = [{("tensor", n, d): 1 for d in range(t.dim())} for n, t in enumerate(tensors)]
    broadcast = frozenset(n for n, sizes in enumerate(ones) if sizes and search.accepts(sizes))
    return SizePlan(call, found, fixed_sizes, broadcast, ties)


@dataclass
class _Search:
    op: Any
    call: Call
    dims: list[tuple[SizeKey, int]]
    numbers: list[tuple[SizeKey, int]]
    ties: dict[SizeKey, SizeKey]
    reason: str = ""

    def changes_output(self, group: SizeGroup) -> bool:
        """Return whether the outputs' sizes change with ``group``."""
        before = attempt(self.op, self.call).value
        sizes = _with_ties(group.at(group.accepted) or {}, self.ties)
        other = resize(self.call, sizes, "a trial")
        if other is None:
            return False
        after = attempt(self.op, other).value
        return [t.shape for t in flat_tensors(before)] != [t.shape for t in flat_tensors(after)]

    def accepts(self, sizes: Mapping[SizeKey, int]) -> bool:
        """Return whether the kernel runs with these sizes."""
        sizes = _with_ties(sizes, self.ties)
        other = resize(self.call, sizes, "a trial")
        if other is None:
            return False
        outcome = attempt(self.op, other)
        if outcome.error is not None and not self.reason:
            lines = error_text(outcome.error).strip().splitlines() or [""]
            self.reason = f"the kernel refuses others: {type(outcome.error).__name__}: {lines[0][:120]}"
        return outcome.error is None

    def find(self, key: SizeKey, size: int, prime: int) -> SizeGroup | None:
        """Return the smallest set of sizes with which ``key`` can change.

        Args:
            key: the size to change.
            size: its value in the sample.
            prime: the first increment to try.

        Returns:
            The sizes that change together, or None if no change is accepted; ``reason`` says why.
        """
        self.reason = ""
        others = [size + prime, 2 * size, size + 1, 3 * size, size - 1]
        # Size 1 may be broadcast against the other sizes: that says nothing about valid sizes.
        candidates = [new for new in dict.fromkeys(others) if new > 1 and new != size]
        for new in candidates:
            if self.accepts({key: new}):
                return SizeGroup({key: size}, "same", new)
        equal = [p for p, s in (*self.dims, *self.numbers) if s == size and p != key]
        for together in self._candidate_sets(key, equal):
            for new in candidates[:3]:
                if self.accepts(dict.fromkeys([key, *together], new)):
                    return SizeGroup(
                        dict.fromkeys(self._smallest_subset(key, together, new), size), "same", new
                    )
        for other, second in (*self.numbers, *self.dims):
            if other != key and self.accepts({key: size + 1, other: second + 1}):
                return SizeGroup({key: size, other: second}, "grow", size + 1)
            if other != key and size and self.accepts({key: 2 * size, other: 2 * second}):
                return SizeGroup({key: size, other: second}, "scale", 2 * size)
        return None

    def _candidate_sets(self, key: SizeKey, equal: list[SizeKey]) -> Iterator[list[SizeKey]]:
        """Yield sets of sizes that may have to change with ``key``, likely and small ones first."""
        if not equal:
            return
        yield from ([other] for other in equal)
        ranks = {p[1]: d for p, _ in self.dims for d in [sum(q[1] == p[1] for q, _ in self.dims)]}
        same = [p for p in equal if p[0] == "tensor" and p[2] == key[2]]
        from_end = [p for p in equal if p[0] == "tensor" and ranks[p[1]] - p[2] == ranks[key[1]] - key[2]]
        numbers = [p for p in equal if p[0] == "number"]
        for likely in (same, from_end, [*from_end, *numbers]):
            if len(likely) > 1:
                yield likely
        if len(equal) <= 8:
            yield from (list(pair) for pair in itertools.combinations(equal, 2))
        yield equal

    def _smallest_subset(self, key: SizeKey, together: list[SizeKey], new: int) -> list[SizeKey]:
        subset = list(together)
        for other in together:
            fewer = [p for p in subset if p != other]
            if fewer and self.accepts(dict.fromkeys([key, *fewer], new)):
                subset = fewer
        return [key, *subset]
