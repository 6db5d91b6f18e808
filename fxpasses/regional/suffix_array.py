"""Repeated substrings of a sequence of integers, by suffix array.

Uses prefix doubling (Manber and Myers, "Suffix arrays: a new method for on-line string searches", 1990),
longest common prefixes after Kasai et al. ("Linear-time longest-common-prefix computation in suffix arrays",
2001), and one stack over them that yields each class of equal substrings that cannot be extended without
losing a member (Abouelhoda et al., "Replacing suffix trees with enhanced suffix arrays", 2004).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Repeat:
    """A substring that occurs more than once.

    Attributes:
        length: the number of integers in it.
        starts: where it occurs, ascending; occurrences may overlap.
    """

    length: int
    starts: tuple[int, ...]


def suffix_array(sequence: Sequence[int]) -> np.ndarray:
    """Return the starts of all suffixes in lexicographic order.

    >>> suffix_array([2, 1, 2, 1]).tolist()
    [3, 1, 2, 0]
    """
    n = len(sequence)
    rank = np.unique(np.asarray(sequence, dtype=np.int64), return_inverse=True)[1].astype(np.int64)
    order = np.argsort(rank, kind="stable")
    width = 1
    while n > 1 and width < n:
        second = np.full(n, -1, dtype=np.int64)
        second[:-width] = rank[width:]
        pair = rank * (n + 1) + second + 1
        order = np.argsort(pair, kind="stable")
        in_order = pair[order]
        new = np.concatenate(([0], np.cumsum(in_order[1:] != in_order[:-1])))
        rank = np.empty(n, dtype=np.int64)
        rank[order] = new
        if new[-1] == n - 1:
            break
        width *= 2
    return order


def common_prefixes(sequence: Sequence[int], order: np.ndarray) -> list[int]:
    """Return the length of the prefix that each suffix in ``order`` shares with the one before it."""
    n = len(sequence)
    values = [int(v) for v in sequence]
    starts = order.tolist()
    rank = [0] * n
    for i, start in enumerate(starts):
        rank[start] = i
    shared = [0] * n
    length = 0
    for start in range(n):
        if rank[start] == 0:
            length = 0
            continue
        other = starts[rank[start] - 1]
        limit = n - max(start, other)
        while length < limit and values[start + length] == values[other + length]:
            length += 1
        shared[rank[start]] = length
        length = max(length - 1, 0)
    return shared


def repeated_substrings(sequence: Sequence[int], shortest: int, fewest: int, most: int = 400) -> list[Repeat]:
    """Find classes of repeated substrings, sorted by how much they cover, largest first.

    Args:
        sequence: the integers.
        shortest: the minimum length of a substring.
        fewest: the minimum number of occurrences.
        most: the maximum number of classes to return.

    >>> repeated_substrings([1, 2, 3, 1, 2, 3, 9, 1, 2, 3], shortest=2, fewest=3)[0]
    Repeat(length=3, starts=(0, 3, 7))
    """
    n = len(sequence)
    if n < shortest * fewest:
        return []
    order = suffix_array(sequence)
    found: list[tuple[int, int, int, int]] = []
    for length, low, high in _intervals(common_prefixes(sequence, order)):
        count = min(high - low + 1, n // length) if length else 0
        if length >= shortest and count >= fewest:
            found.append(((count - 1) * length, length, low, high))
    found.sort(key=lambda item: (-item[0], -item[1]))
    return [
        Repeat(length, tuple(np.sort(order[low : high + 1]).tolist()))
        for _, length, low, high in found[:most]
    ]


def not_overlapping(starts: Sequence[int], length: int) -> list[int]:
    """Drop each occurrence that overlaps the previously kept one.

    >>> not_overlapping([0, 2, 3, 6], 3)
    [0, 3, 6]
    """
    taken: list[int] = []
    end = -1
    for start in starts:
        if start >= end:
            taken.append(start)
            end = start + length
    return taken


def _intervals(shared: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield maximal intervals of suffixes that share a prefix: its length, first and last index."""
    stack: list[tuple[int, int]] = [(0, 0)]
    for i in range(1, len(shared) + 1):
        length = shared[i] if i < len(shared) else -1
        low = i - 1
        while stack and stack[-1][0] > length:
            top, low = stack.pop()
            yield top, low, i - 1
        if not stack or stack[-1][0] < length:
            stack.append((length, low))
