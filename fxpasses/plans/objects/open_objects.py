"""The part of a walk that leaves objects open, and later walks the attributes that traced code names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from fxpasses.plans.errors import NoPlan
from fxpasses.plans.objects.named_attributes import EVERYTHING, Names, current_integer
from fxpasses.plans.objects.references import reference_to
from fxpasses.plans.objects.said_facts import Facts, WeakReference
from fxpasses.plans.objects.watched_state import Watch


class OpenObjects(Facts):
    """The open objects of a walk.

    Attributes:
        left_open: those not walked yet: where each was met, and the methods that hold it.
        owners: those whose attributes were walked, in order.
        unwalkable_codes: digests of the code of methods that hold what cannot be walked.
        watch: what has to stay unchanged for the digest to hold.

    Args:
        keep_facts: whether the facts are kept.
        leaves_open: whether objects are left open until :meth:`close`, or walked when met, with all
            attributes.
    """

    def __init__(self, *, keep_facts: bool, leaves_open: bool) -> None:
        super().__init__(keep_facts=keep_facts)
        self.left_open: list[tuple[str, Callable[[], Any], Sequence[str]]] = []
        self.owners: list[Callable[[], Any]] = []
        self.unwalkable_codes = set[str]()
        self.watch = Watch()
        self._leaves_open, self._names = leaves_open, EVERYTHING
        self._in_methods = list[str]()
        self._numbers = dict[int, int]()
        self._weak = list[WeakReference]()

    @abstractmethod
    def _items(self, values: dict[Any, Any], owner: Any = None) -> None:
        """Walk the items of a dictionary, such as an object's attributes."""

    def close(self, names: Names) -> str:
        """Walk the attributes with these names, of all open objects and of those met from now on; returns the
        digest.

        Args:
            names: of attributes.

        Raises:
            NoPlan: they hold something that cannot be walked.
        """
        start = len(self._lines)
        self._leaves_open, self._names = False, names
        for path, reference, methods in self.left_open:
            self._path = [path]
            try:
                self._walk_attributes(reference)
            except NoPlan as error:
                if not methods:
                    raise
                self.unwalkable_codes.update(methods)
                self._emit("unseen", error.reason)
        self.left_open.clear()
        self._weak = self._emit_weak_references(self._weak, self._numbers)
        return self._digest_since(start)

    def _defer_or_walk(self, value: Any) -> None:
        get_owner = reference_to(value) if id(value) in self.watch.not_kept else lambda: value
        if self._leaves_open:
            self.left_open.append(("".join(self._path), get_owner, tuple(self._in_methods)))
        else:
            self._walk_attributes(get_owner)

    def _walk_attributes(self, get_owner: Callable[[], Any]) -> None:
        """Walk the attributes of an object that traced code may read."""
        owner, names, number = get_owner(), self._names, len(self.owners)
        self.owners.append(get_owner)
        state = vars(owner)
        numbers = [name for name in state if (number, name) in names.numbers]
        if names.everything and not numbers:
            self.watch.dictionary(state)
            self._items(state, owner)
            return
        self.watch.keys(state)
        self._emit("named", [name for name in state if names.everything or name in names.named])
        read = {name: item for name, item in state.items() if names.is_read(name, item)}
        for name in numbers:
            self._emit("number", name, current_integer(owner, name) is not None)
            read.pop(name, None)
        for name in read:
            self.watch.entry(state, name)
        self._items(read, owner)
