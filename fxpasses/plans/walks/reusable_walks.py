"""Reuse of walks when only the objects among the arguments differ, such as the cache of a request: the walk
over the model, and those over the globals that a plan reads.

A walk numbers what it meets. Objects of the same content get the same numbers, so what was walked after them
can be reused after others, if none of it has changed and it says nothing about these objects.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from fxpasses.plans.tensors.same_tensors import SameTensors
from fxpasses.plans.walks.reads import OBJECT_READS, Read, walk_reads
from fxpasses.plans.walks.walk import Walk


class ReusableWalks:
    """The reusable walks of one model."""

    def __init__(self) -> None:
        self._model: Walk | None = None
        self._tensors = SameTensors(())
        self._digest = ""
        self._parts: dict[Hashable, _WalkPart] = {}

    def walk_call(self, model: Any, objects: Sequence[Any]) -> tuple[Walk, list[Any]]:
        """A walk over a model and the objects among its arguments, and the result of :meth:`Walk.walk_call`.

        Args:
            model: the model.
            objects: the objects.

        Raises:
            NoPlan: they hold something that cannot be walked.
        """
        if objects and (self._model is None or not self._model.watch.holds() or not self._tensors.hold()):
            self._model = None  # it keeps alive what the model may have dropped
            self._parts.clear()
            walk = Walk(leaves_open=True)
            self._digest = walk.add("model", model)
            self._model, self._tensors = walk, SameTensors(walk.tensors)
        if self._model is None or not objects or any(map(self._model.has_met, objects)):
            walk = Walk(leaves_open=True)
            return walk, walk.walk_call(model, objects)
        walk = self._model.fork(watched=True)
        return walk, [self._digest, walk.walk_objects(objects)]

    def continue_over_reads(
        self, plan: Hashable, reads: Sequence[Read], expected: str, walk: Walk, digest: Sequence[Any]
    ) -> Walk | None:
        """Continue a walk over what a plan reads. ``None`` if any of it has changed.

        Args:
            plan: the plan.
            reads: what it reads.
            expected: the digest of that when the plan was made.
            walk: over the model and the objects.
            digest: of that walk.

        Raises:
            NoPlan: something cannot be walked.
        """
        number = next(
            (i for i, continue_over_reads in enumerate(reads) if continue_over_reads[0] in OBJECT_READS),
            len(reads),
        )
        part = self._parts.get(plan)
        continued = None if part is None or part.digest != digest else part.replay(walk)
        if part is None or continued is None:
            continued = walk.fork()
            part = _WalkPart(walk, continued, digest, walk_reads(continued, reads[:number]))
            self._parts[plan] = part
        reads_digest = f"{part.reads_digest}:" if 0 < number < len(reads) else part.reads_digest
        if not expected.startswith(reads_digest):
            return None
        rest = expected.removeprefix(reads_digest)
        return continued if walk_reads(continued, reads[number:], rest) == rest else None


class _WalkPart:
    """What a walk has met since it was forked.

    Args:
        before: the walk that it was forked from.
        after: the walk now.
        digest: of the first walk.
        reads_digest: what the second walk has said since.
    """

    def __init__(self, before: Walk, after: Walk, digest: Sequence[Any], reads_digest: str) -> None:
        self.digest, self.reads_digest, self._watch = digest, reads_digest, after.watch.copy()
        self._tensors = SameTensors(after.tensors[len(before.tensors) :])
        self._new = _additions(vars(before), vars(after))
        self._met = frozenset(self._new.get("_numbers", ()))
        self._referred = _referred_to(vars(before), vars(after)) if self._new else None

    def replay(self, walk: Walk) -> Walk | None:
        """Continue ``walk``, over equal content, in the same way. ``None`` if it may meet something else."""
        parts = vars(walk)
        if self._referred is None or not self._watch.holds() or not self._tensors.hold():
            return None
        if any(parts["_kept"][number] is not value for number, value in self._referred.items()):
            return None
        if not self._met.isdisjoint(parts["_numbers"]):
            return None
        other = walk.fork()
        other.watch = self._watch.copy()
        other.watch.not_kept = walk.watch.not_kept
        for name, new in self._new.items():
            known = vars(other)[name]
            known.extend(new) if isinstance(known, list) else known.update(new)
        return other


def _additions(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What was added to the lists, sets and dictionaries of a walk. Empty if anything was removed."""
    found: dict[str, Any] = {}
    for name, now in after.items():
        was = before[name]
        if name == "_path":  # the current path only
            continue
        if isinstance(now, list):
            if len(now) < len(was) or not all(map(operator.is_, was, now)):
                return {}
            found[name] = now[len(was) :]
        elif isinstance(now, (set, dict)):
            if not was <= now if isinstance(now, set) else not was.keys() <= now.keys():
                return {}
            found[name] = (
                now - was if isinstance(now, set) else {k: v for k, v in now.items() if k not in was}
            )
    return found


def _referred_to(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[int, Any] | None:
    """The argument objects that a walk has met again since, by number.

    ``None`` if the walk might say otherwise for other objects: it says something about objects that are not
    kept, about weak references, or about memory while the arguments hold tensors.
    """
    first, tensors = after["counts_before_objects"]
    again = [line for line in after["_lines"][len(before["_lines"]) :] if line.startswith(_REPEAT_PREFIX)]
    numbers = {int(line[len(_REPEAT_PREFIX) : -1]) for line in again}
    kept = {n: before["_kept"][n] for n in numbers if first <= n < len(before["_kept"])}
    weak = before["_weak"] or any(
        line.startswith(_WEAK_PREFIX) for line in after["_lines"][len(before["_lines"]) :]
    )
    return None if weak or len(before["tensors"]) > tensors or None in kept.values() else kept


_REPEAT_PREFIX, _WEAK_PREFIX = "('same as', ", "('weak reference', "
"""How a walk says that it has met something before, or a weak reference."""
