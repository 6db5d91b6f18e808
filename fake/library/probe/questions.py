"""What the samples of a probe leave open, and the calls that would decide it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fake.library.probe.experiments import Observation
from fake.library.probe.facts import Facts, TensorFact
from fake.library.probe.rule import FakeRule, UndecidedError, call_text

_MOST = 20
_OTHER_SIZE = 23
"""A prime that no variation uses: candidates that agree on every observation differ on it, if at all."""


def open_questions(rule: FakeRule, observations: Sequence[Observation], optional: Sequence[str]) -> list[str]:
    """Questions with the calls that would answer them, at most :data:`_MOST`.

    Asked are calls that the kernel answered but the rule does not, calls close to the samples on which rules that fit
    all the evidence disagree, and parameters (of ``optional``) that no sample passes.

    Args:
        rule: the derived rule.
        observations: calls with what the kernel returned.
        optional: parameters that have a default.
    """
    if not rule.decided:
        return list(rule.problems[:_MOST])
    questions: dict[Any, str] = {}
    for facts in _calls(observations):
        try:
            rule.describe_facts(facts)
        except UndecidedError as undecided:
            kind = (undecided.what, facts.ranks(), facts.categories())
            questions.setdefault(kind, f"{undecided.what}: {undecided.call}")
    unseen = [n for n in optional if len({repr(o.facts.values.get(n)) for o in observations}) == 1]
    if unseen and observations:
        call = call_text(observations[0].facts)
        for name in unseen:
            questions[name] = f"no call passes {name} anything but one value: {call}, with another {name}"
    return list(questions.values())[:_MOST]


def _calls(observations: Sequence[Observation]) -> Iterator[Facts]:
    """Each observed call that returned fresh tensors, and the samples with one size changed."""
    fresh = [o for o in observations if o.writes is None and not any(f.alias for f in o.outputs or ())]
    yield from (o.facts for o in fresh)
    for observation in fresh:
        if observation.sample:
            yield from _resized(observation.facts)


def _resized(facts: Facts) -> Iterator[Facts]:
    """The call with every size of a value changed wherever it occurs: most operators need equal sizes equal."""
    sizes = {size for _, tensor in facts.tensors for size in tensor.shape if size > 1}

    def change(value: Any, old: int) -> Any:
        if isinstance(value, TensorFact) and old in value.shape and value.is_contiguous():
            shape = tuple(_OTHER_SIZE if size == old else size for size in value.shape)
            strides: list[int] = []
            step = 1
            for size in reversed(shape):
                strides.insert(0, step)
                step *= size
            return replace(value, shape=shape, strides=tuple(strides))
        return [change(v, old) for v in value] if isinstance(value, list) else value

    for old in sorted(sizes):
        yield Facts({name: change(value, old) for name, value in facts.values.items()})
