"""In-memory storage of recipes: one table per operator, a common limit, counters."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

from fake.cache.recipe import Recipe
from fake.seam.fake_tensor import DispatchCacheInfo


def drop_older_half(tables: Iterable[dict[Any, Any]]) -> int:
    """Drop the first, and so oldest, half of each table's entries; returns how many remain."""
    kept = 0
    for table in tables:
        for key in list(itertools.islice(table, (len(table) + 1) // 2)):
            del table[key]
        kept += len(table)
    return kept


class Bypass:
    """A negative entry: the call cannot be rebuilt. It is called like a recipe, and dispatches."""

    __slots__ = ("dispatch", "func", "reason")

    def __init__(self, reason: str, func: Any, dispatch: Any) -> None:
        self.reason, self.func, self.dispatch = reason, func, dispatch

    def __call__(self, mode: Any, args: Any, kwargs: Any) -> Any:
        return self.dispatch(mode, self.func, (), args, kwargs, self.reason)


class Store:
    """All tables of one engine.

    A table maps keys to compiled recipes (or :class:`Bypass`); ``new_recipes`` keeps the descriptions for the
    disk. Reading a table takes no lock; writing, evicting and clearing do. When the number of entries reaches
    ``limit``, the older half of every table is dropped: a working set that fits never costs more than a few
    misses.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self.limit = limit
        self.lock = threading.RLock()
        self.tables: dict[Any, dict[Any, Any]] = {}
        self.new_recipes: dict[Any, dict[Any, Recipe]] = {}
        self.size = 0
        self._hits = itertools.count()
        self.hit = self._hits.__next__
        """Count one hit: atomic, and cheap enough for the hot path (handlers bind it)."""
        self.clear()

    def clear(self) -> None:
        """Drop all entries and reset the counters. Tables stay the same objects,
        because handlers hold them."""
        with self.lock:
            self.drop_entries()
            self.misses = 0
            self.bypasses: Counter[str] = Counter()
            self._hits_before_clear = self._total_hits()

    def drop_entries(self) -> None:
        """Drop all entries; keep the counters."""
        with self.lock:
            for table in self.tables.values():
                table.clear()
            self.new_recipes.clear()
            self.size = 0

    def table(self, func: Any) -> dict[Any, Any]:
        """Return the table of an operator; the same object for the lifetime of the store."""
        with self.lock:
            return self.tables.setdefault(func, {})

    def hit_count(self) -> int:
        """Return the number of hits since the last clear."""
        return self._total_hits() - self._hits_before_clear

    def _total_hits(self) -> int:
        return int(repr(self._hits)[len("count(") : -1])  # the only way to read it without counting

    def insert(self, func: Any, table: dict[Any, Any], key: Any, value: Any, recipe: Recipe | None) -> None:
        """Add an entry, making room first if the limit is reached.

        Args:
            func: the operator.
            table: the operator's table in this store.
            key: the key of the call.
            value: rebuilds the outputs, or holds the reason why that is impossible.
            recipe: its description for the disk; None to keep it off the disk.
        """
        with self.lock:
            if self.size >= self.limit:
                self._evict()
            if key not in table:
                self.size += 1
            table[key] = value
            if recipe is not None:
                self.new_recipes.setdefault(func, {})[key] = recipe

    def remove(self, table: dict[Any, Any], key: Any) -> None:
        """Drop one entry, if it is still present."""
        with self.lock:
            if table.pop(key, None) is not None:
                self.size -= 1

    def take_new_recipes(self) -> dict[Any, dict[Any, Recipe]]:
        """Return the descriptions added since the last call, by operator."""
        with self.lock:
            taken = {func: table for func, table in self.new_recipes.items() if table}
            self.new_recipes = {}
            return taken

    def _evict(self) -> None:
        self.size = drop_older_half(self.tables.values())
        for func, new_recipes in self.new_recipes.items():
            for key in new_recipes.keys() - self.tables[func].keys():
                del new_recipes[key]

    def count_miss(self) -> None:
        """Count a call that was dispatched and recorded."""
        with self.lock:
            self.misses += 1

    def count_bypass(self, reason: str) -> None:
        """Count a call that the cache could not serve."""
        with self.lock:
            self.bypasses[reason] += 1

    def info(self) -> Any:
        """Return hits, misses, bypasses by reason, and number of entries (torch's own
        ``DispatchCacheInfo``)."""
        with self.lock:
            return DispatchCacheInfo(self.hit_count(), self.misses, dict(self.bypasses), self.size)
