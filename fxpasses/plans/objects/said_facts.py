"""What a walk says about what it meets: a sequence of facts, from which a digest is made."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from fxpasses.plans.errors import NoPlan

WeakReference = tuple[str, weakref.ReferenceType[Any]]
"""Where a weak reference was met, and the reference."""


class Facts:
    """The facts.

    Attributes:
        story: if ``keep_facts``, each fact that went into a digest, and where it was met.

    Args:
        keep_facts: whether the facts are kept.
    """

    def __init__(self, *, keep_facts: bool) -> None:
        self.story: list[tuple[str, tuple[Any, ...]]] | None = [] if keep_facts else None
        self._lines: list[str] = []
        self._path: list[str] = []

    def _emit(self, *facts: Any) -> None:
        self._lines.append(repr(facts))
        if self.story is not None:
            self.story.append(("".join(self._path), facts))

    def _refusal(self, reason: str) -> NoPlan:
        return NoPlan(reason, "".join(self._path))

    def _digest_since(self, start: int) -> str:
        return hashlib.sha256("\n".join(self._lines[start:]).encode()).hexdigest()

    def _emit_weak_references(
        self, references: Sequence[WeakReference], numbers: Mapping[int, int], *, allow_unknown: bool = False
    ) -> list[WeakReference]:
        """Say which objects weak references refer to. Returns those to objects that were not met yet.

        Args:
            references: the references.
            numbers: of the objects that were met, by ``id``.
            allow_unknown: whether others may be met later.

        Raises:
            NoPlan: nothing in the model holds an object.
        """
        unknown = []
        for path, reference in references:
            number = numbers.get(id(reference()))
            if number is not None:
                self._emit("weak reference", number)
            elif allow_unknown:
                unknown.append((path, reference))
            else:  # this walk would keep it alive
                raise NoPlan("a weak reference to what nothing of the model holds", path)
        return unknown
