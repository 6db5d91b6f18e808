"""Derive a rule from observations: candidates that fit all of them, for ever smaller classes of calls."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from fake.library.probe.candidates import (
    TIER,
    Vocabulary,
    dtype_candidates,
    shape_candidates,
    stride_candidates,
)
from fake.library.probe.experiments import CallRecorder, Observation
from fake.library.probe.rule import FakeRule, Level, Property, evaluate
from fake.library.probe.solve import solve_sizes

_MAX_CANDIDATES = 6
#: A class needs this many observations before a candidate counts as proven.
_MIN_OBSERVATIONS = 3


def derive(op: str, names: list[str] | None, recorder: CallRecorder, container: type | None) -> FakeRule:
    """Return the rule that the laboratory's observations support.

    Args:
        op: the operator's name, for messages.
        names: its parameters, if known.
        recorder: the observations, and the kernel to make more.
        container: the type that the operator returns its outputs in: ``list``, ``tuple`` or None.
    """
    observations = [o for o in recorder.observations if o.outputs is not None]
    rule = FakeRule(
        op, names, Property("sharing of memory"), Property("number of outputs"), [], [], [], [], container
    )
    if not observations:
        rule.problems.append("it returns something else than strided tensors")
        return rule
    for observation in observations:
        rule.seen_kinds |= set(observation.facts.kinds())
        rule.seen_categories |= set(observation.facts.categories())
        for category in observation.facts.categories():
            rule.category_ranks.setdefault(category, {})
        rule.all_names += [n for n in observation.facts.values if n not in rule.all_names]
        for name, tensor in observation.facts.tensors:
            rule.seen_ranks.setdefault(name, set()).add(tensor.dim())
            if not tensor.is_contiguous():
                rule.seen_noncontiguous.add(name)
            for category in observation.facts.categories():
                highest = rule.category_ranks.setdefault(category, {})
                highest[name] = max(highest.get(name, 0), tensor.dim())
    for observation in observations:
        rule.seen_kinds |= {(n, "absent") for n in rule.all_names if n not in observation.facts.values}
    shared = [(o, _shared_argument(o)) for o in observations]
    fresh = [o for o, name in shared if not name]
    # Tensors without elements share no memory, so they prove nothing here.
    if all(o.facts.has_empty() for o in fresh) and any(name for _, name in shared):
        rule.problems.append(
            f"it returns or writes to the memory of {next(n for _, n in shared if n)}: only functional operators are probed"
        )
        return rule
    _fit(
        rule.freshness,
        shared,
        lambda words: [repr(n) for n in dict.fromkeys(n for _, n in shared)],
        _equal,
        few=True,
    )
    counts = [(o, len(o.outputs or ())) for o in fresh]
    _fit(rule.counts, counts, lambda words: _count_candidates(words, counts), _equal, few=True)
    for index in range(max(c for _, c in counts)):
        _derive_output(rule, [o for o, c in counts if c > index], index)
    return rule


def _shared_argument(observation: Observation) -> str:
    """Return the argument whose memory an output shares, or that was mutated; empty if there is none."""
    if observation.writes is not None:
        return observation.writes
    return next((o.alias for o in observation.outputs or () if o.alias is not None), "")


def _count_candidates(words: Vocabulary, counts: Sequence[tuple[Observation, int]]) -> list[Any]:
    seen = [str(n) for n in dict.fromkeys(c for _, c in counts)]
    return [*seen, TIER, *(f"len({name})" for name in (*words.lists, *words.int_lists)), *words.ints]


def _derive_output(rule: FakeRule, observations: list[Observation], index: int) -> None:
    unknown = _dynamic_dimensions(observations, index)
    seen = [(o, _masked_shape(o, index, unknown)) for o in observations]
    shapes = Property(f"shape of output {index}")
    _fit(shapes, seen, shape_candidates, _matches, solve=lambda group: _solve_masked(group, index, unknown))
    dynamic: dict[Any, set[int]] = {}
    for key in shapes.rules:
        level, class_key = key
        members = [s for o, s in seen if shapes.key(o.facts, level) == class_key]
        dynamic[key] = {i for shape in members for i, size in enumerate(shape) if size is None}
    dtypes = Property(f"dtype of output {index}", extra=lambda facts: facts.dtypes())
    _fit(dtypes, [(o, o.outputs[index].dtype) for o in observations], dtype_candidates, _equal, table=True)  # type: ignore[index]
    strides = Property(f"strides of output {index}", extra=lambda facts: facts.contiguous())
    strided = [(o, (o.outputs[index].shape, o.outputs[index].strides)) for o in observations]  # type: ignore[index]
    strided = [(o, s) for o, s in strided if None not in s[0]]
    _fit(strides, strided, stride_candidates, _same_strides, table=True, with_shape=True)
    rule.shapes.append(shapes)
    rule.dtypes.append(dtypes)
    rule.strides.append(strides)
    rule.dynamic.append(dynamic)


def _dynamic_dimensions(observations: Sequence[Observation], index: int) -> set[tuple[int, int]]:
    """Return ``(rank, dimension)`` of every size that other data changed."""
    found = set()
    for observation in observations:
        shape = observation.outputs[index].shape  # type: ignore[index]
        found |= {(len(shape), i) for i, size in enumerate(shape) if size is None}
    return found


def _masked_shape(
    observation: Observation, index: int, unknown: set[tuple[int, int]]
) -> tuple[int | None, ...]:
    shape = observation.outputs[index].shape  # type: ignore[index]
    return tuple(None if (len(shape), i) in unknown else size for i, size in enumerate(shape))


def _solve_masked(group: Sequence[Observation], index: int, unknown: set[tuple[int, int]]) -> list[str]:
    masked = []
    for observation in group:
        outputs = list(observation.outputs or ())
        outputs[index] = replace(outputs[index], shape=_masked_shape(observation, index, unknown))
        masked.append(replace(observation, outputs=tuple(outputs)))
    return solve_sizes(masked, index)


# --- how a candidate's answer is compared ----------------------------------------------------------
def _equal(answer: Any, seen: Any) -> bool:
    return bool(answer == seen)


def _matches(answer: Any, seen: Any) -> bool:
    return (
        isinstance(answer, tuple)
        and len(answer) == len(seen)
        and all(b is None or a == b for a, b in zip(answer, seen, strict=True))
    )


def _same_strides(answer: Any, seen: Any) -> bool:
    shape, strides = seen
    if 0 in shape:
        return True
    fits = isinstance(answer, tuple) and len(answer) == len(strides)
    return fits and all(size == 1 or a == b for size, a, b in zip(shape, answer, strides, strict=True))


# --- fitting ---------------------------------------------------------------------------------------
ObservedValues = Sequence[tuple[Observation, Any]]


def _fit(
    prop: Property,
    seen: ObservedValues,
    candidates: Callable[[Vocabulary], Iterable[Any]],
    agrees: Callable[[Any, Any], bool],
    *,
    solve: Callable[[Sequence[Observation]], list[str]] | None = None,
    table: bool = False,
    with_shape: bool = False,
    few: bool = False,
) -> None:
    """Solve for all calls at once; if that fails, for classes of them, coarsest first.

    Kernels make exceptions for inputs without elements, so these are ignored at first. If the rules found
    without them are wrong for them, the rules do not cover them.
    """
    full = [(o, value) for o, value in seen if not o.facts.has_empty()] or list(seen)
    empty = [(o, value) for o, value in seen if o.facts.has_empty()] if len(full) < len(seen) else []
    _fit_classes(prop, full, candidates, agrees, solve, table, with_shape, few)
    names = list(dict.fromkeys(n for o, _ in seen for n in o.facts.values))
    for observation, value in empty:
        found = prop.find(observation.facts)
        environment = observation.facts.environment(names)
        if with_shape:
            environment["shape"] = value[0]
        if found is not None and not agrees(evaluate(found[1][0], environment), value):
            prop.refuses_empty = True
            return


def _fit_classes(
    prop: Property,
    seen: ObservedValues,
    candidates: Callable[[Vocabulary], Iterable[Any]],
    agrees: Callable[[Any, Any], bool],
    solve: Callable[[Sequence[Observation]], list[str]] | None,
    table: bool,
    with_shape: bool,
    few: bool,
) -> None:
    """Find expressions that fit all calls of a class: coarse classes first, finer ones for what is left."""
    min_observations = 1 if few else _MIN_OBSERVATIONS

    def attempt(group: ObservedValues, level: Level) -> list[str]:
        if len(group) < min_observations and not _has_no_tensors(group):
            return []
        found = _consistent_candidates(group, candidates, agrees, with_shape=with_shape)
        if level == ("class", 3) or few:
            return found
        fixed = _fixed_numbers(group)
        return [] if found and not set(fixed).isdisjoint(re.findall(r"[^\W\d]\w*", found[0])) else found

    for level in _coarse_levels(seen):
        groups = _grouped(prop, seen, level)
        solved = {}
        for key, group in sorted(groups.items(), key=lambda item: len(item[1])):
            solved[key] = attempt(group, level)
            if not solved[key]:
                break
        if all(solved.get(key) for key in groups):
            for key, expressions in solved.items():
                prop.add(level, key, expressions)
            return
    remaining = list(seen)
    for detail in (1, 2, 3):
        level = ("class", detail)
        unsolved: list[tuple[Observation, Any]] = []
        for key, group in _grouped(prop, remaining, level).items():
            expressions = attempt(group, level)
            if not expressions and detail >= 2 and solve is not None and len(group) >= _MIN_OBSERVATIONS:
                expressions = solve([o for o, _ in group])
            if expressions:
                prop.add(level, key, expressions)
            else:
                unsolved += group
        remaining = unsolved
    if remaining and table and prop.extra is not None:
        for key, group in _grouped(prop, seen, ("extra",)).items():
            expressions = _consistent_candidates(group, candidates, agrees, with_shape=with_shape)
            if expressions:
                prop.add(("extra",), key, expressions)


def _grouped(prop: Property, seen: ObservedValues, level: Level) -> dict[Any, list[tuple[Observation, Any]]]:
    groups: dict[Any, list[tuple[Observation, Any]]] = {}
    for observation, value in seen:
        groups.setdefault(prop.key(observation.facts, level), []).append((observation, value))
    return groups


def _coarse_levels(seen: ObservedValues) -> Iterable[Level]:
    """Yield levels: all calls together; by one flag (or one argument's kind); by the rank of one tensor."""
    yield ("all",)
    names = dict.fromkeys(n for o, _ in seen for n in o.facts.values)
    for name in names:
        if len({o.facts.category_of(name) for o, _ in seen}) > 1:
            yield ("by", name)
    for name in dict.fromkeys(n for o, _ in seen for n, _ in o.facts.tensors):
        if len({dict(o.facts.ranks()).get(name) for o, _ in seen}) > 1:
            yield ("rank", name)


def _fixed_numbers(group: ObservedValues) -> list[str]:
    """Return the number arguments with only one observed value: their part in a size cannot be determined."""
    values: dict[str, set[Any]] = {}
    for observation, _ in group:
        for name, number in observation.facts.numbers():
            values.setdefault(name, set()).add(number)
    return [name for name, seen in values.items() if len(seen) == 1]


def _has_no_tensors(group: ObservedValues) -> bool:
    """Return whether no call has a tensor: then nothing can vary, and one observation is enough."""
    return not any(True for o, _ in group for _ in o.facts.tensors)


def _consistent_candidates(
    group: ObservedValues,
    candidates: Callable[[Vocabulary], Iterable[str]],
    agrees: Callable[[Any, Any], bool],
    *,
    with_shape: bool,
) -> list[str]:
    """Return the simplest candidates that fit every observation of a group."""
    words = Vocabulary([o for o, _ in group])
    cases = []
    for observation, value in _rarest_first(group):
        environment = observation.facts.environment(words.names)
        if with_shape:
            environment["shape"] = value[0]
        cases.append((environment, value))
    found: list[str] = []
    # The more contrived a candidate is, the more distinct results it must explain.
    different = len({repr(value) for _, value in group})
    needed = 1
    for candidate in candidates(words):
        if not isinstance(candidate, str):
            needed += 0 if with_shape or _has_no_tensors(group) else 1
            # A number ends a tier: later candidates are too contrived to cast doubt on those already found.
            if found or different < needed:
                break
            continue
        expression = candidate
        if expression in found:
            continue
        if all(agrees(evaluate(expression, environment), value) for environment, value in cases):
            found.append(expression)
            if len(found) == _MAX_CANDIDATES:
                break
    return found


def _rarest_first(group: ObservedValues) -> list[tuple[Observation, Any]]:
    """Sort rare values first: they refute wrong candidates soonest."""
    counts = Counter(repr(value) for _, value in group)
    return sorted(group, key=lambda pair: counts[repr(pair[1])])
