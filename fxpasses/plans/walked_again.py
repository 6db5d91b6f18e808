"""Parts of walks that are not made again where only the objects among the arguments are others, such as the cache of a request: that over the model, and
those over the globals that a plan reads.

A walk numbers what it meets. Over objects of the same content it gives the same numbers, so that what came after them comes after others as well, as long
as nothing of it has changed, and it says nothing of these objects.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from fxpasses.plans.reads import OF_OBJECTS, Read, walk_reads
from fxpasses.plans.same_tensors import SameTensors
from fxpasses.plans.walk import Walk


class WalkedAgain:
    """What was walked over for one model."""

    def __init__(self) -> None:
        self._model: Walk | None = None
        self._tensors = SameTensors(())
        self._digest = ""
        self._parts: dict[Hashable, _Part] = {}

    def over(self, model: Any, objects: Sequence[Any]) -> tuple[Walk, list[Any]]:
        """A walk over a model and objects among the arguments, and what :meth:`Walk.over` returns.

        Args:
            model: the model.
            objects: the objects.

        Raises:
            NoPlan: they hold something that cannot be seen into.
        """
        if objects and (self._model is None or not self._model.watch.holds() or not self._tensors.hold()):
            self._model = None  # which keeps what the model may have left behind
            self._parts.clear()
            walk = Walk(leaves_open=True)
            self._digest = walk.add("model", model)
            self._model, self._tensors = walk, SameTensors(walk.tensors)
        if self._model is None or not objects or any(map(self._model.has_met, objects)):
            walk = Walk(leaves_open=True)
            return walk, walk.over(model, objects)
        walk = self._model.fork(watched=True)
        return walk, [self._digest, walk.over_objects(objects)]

    def read(
        self, plan: Hashable, reads: Sequence[Read], expected: str, walk: Walk, digest: Sequence[Any]
    ) -> Walk | None:
        """A walk, gone on over what a plan reads; ``None`` where that is not what it was.

        Args:
            plan: the plan.
            reads: what it reads.
            expected: the digest that this had.
            walk: over the model and the objects.
            digest: of that walk.

        Raises:
            NoPlan: something cannot be seen into.
        """
        number = next((i for i, read in enumerate(reads) if read[0] in OF_OBJECTS), len(reads))
        part = self._parts.get(plan)
        gone_on = None if part is None or part.digest != digest else part.after(walk)
        if part is None or gone_on is None:
            gone_on = walk.fork()
            part = _Part(walk, gone_on, digest, walk_reads(gone_on, reads[:number]))
            self._parts[plan] = part
        said = f"{part.said}:" if 0 < number < len(reads) else part.said
        if not expected.startswith(said):
            return None
        rest = expected.removeprefix(said)
        return gone_on if walk_reads(gone_on, reads[number:], rest) == rest else None


class _Part:
    """What a walk has met since it was forked from another one.

    Args:
        before: that one.
        after: the walk, as it is now.
        digest: of the first one.
        said: what the second one has said since.
    """

    def __init__(self, before: Walk, after: Walk, digest: Sequence[Any], said: str) -> None:
        self.digest, self.said, self._watch = digest, said, after.watch.copy()
        self._tensors = SameTensors(after.tensors[len(before.tensors) :])
        self._new = _since(vars(before), vars(after))
        self._met = frozenset(self._new.get("_numbers", ()))
        self._referred = _referred_to(vars(before), vars(after)) if self._new else None

    def after(self, walk: Walk) -> Walk | None:
        """A walk, gone on in the same way; ``None`` where it might meet something else. Args: one over objects of the same content."""
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


def _since(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What has come to the lists, sets and dictionaries of a walk; nothing where anything was taken from them."""
    found: dict[str, Any] = {}
    for name, now in after.items():
        was = before[name]
        if name == "_path":  # the last one
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
    """The objects met among the arguments that a walk has met again since, by their numbers; ``None`` where what it says may be otherwise for others: it says
    something of objects that are not kept, of weak references, or of memory while the arguments hold tensors."""
    first, tensors = after["of_model"]
    again = [line for line in after["_lines"][len(before["_lines"]) :] if line.startswith(_AGAIN)]
    numbers = {int(line[len(_AGAIN) : -1]) for line in again}
    kept = {n: before["_kept"][n] for n in numbers if first <= n < len(before["_kept"])}
    weak = before["_weak"] or any(line.startswith(_WEAK) for line in after["_lines"][len(before["_lines"]) :])
    return None if weak or len(before["tensors"]) > tensors or None in kept.values() else kept


_AGAIN, _WEAK = "('same as', ", "('weak reference', "
"""How a walk says that it has met something before, or a weak reference."""
