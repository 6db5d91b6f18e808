"""The entry point of `fake.library.probe`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fake.library.errors import ProbeError
from fake.library.opcheck.sample_calls import Call
from fake.library.probe.call_facts import Facts, TensorFact, optional_parameters, parameter_names
from fake.library.probe.derive import derive
from fake.library.probe.experiments import CallRecorder, Observation
from fake.library.probe.forked_calls import can_isolate
from fake.library.probe.helpers import row_major
from fake.library.probe.operator_parameters import fill_defaults, signature_for
from fake.library.probe.rule import FakeRule, UndecidedError, call_text
from fake.seam import library as _torch

_MAX_QUESTIONS = 20
_UNUSED_SIZE = 23
"""A prime that no variation uses, to separate candidates that agree on every observation."""


def open_questions(rule: FakeRule, observations: Sequence[Observation], optional: Sequence[str]) -> list[str]:
    """Return open questions with the calls that would answer them, at most :data:`_MAX_QUESTIONS`.

    They concern calls that the kernel answered but the rule does not, calls close to the samples on which
    rules that fit all the evidence disagree, and parameters (of ``optional``) that never vary.

    Args:
        rule: the derived rule.
        observations: the calls, with what the kernel returned.
        optional: the parameters that have a default.
    """
    if not rule.decided:
        return list(rule.problems[:_MAX_QUESTIONS])
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
    return list(questions.values())[:_MAX_QUESTIONS]


def _calls(observations: Sequence[Observation]) -> Iterator[Facts]:
    """Yield each observed call that returned fresh tensors, and each such sample with one size changed."""
    fresh = [o for o in observations if o.writes is None and not any(f.alias for f in o.outputs or ())]
    yield from (o.facts for o in fresh)
    for observation in fresh:
        if observation.sample:
            yield from _resized(observation.facts)


def _resized(facts: Facts) -> Iterator[Facts]:
    """Change a size wherever it occurs, for each size: most operators require equal sizes to stay equal."""
    sizes = {size for _, tensor in facts.tensors for size in tensor.shape if size > 1}

    def change(value: Any, old: int) -> Any:
        if isinstance(value, TensorFact) and old in value.shape and value.is_contiguous():
            shape = tuple(_UNUSED_SIZE if size == old else size for size in value.shape)
            return replace(value, shape=shape, strides=row_major(shape))
        return [change(v, old) for v in value] if isinstance(value, list) else value

    for old in sorted(sizes):
        yield Facts({name: change(value, old) for name, value in facts.values.items()})


def normalize_samples(samples: Sequence[Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return samples as ``(args, kwargs)``; a sample may also be just a tuple of arguments.

    Raises:
        ProbeError: ``samples`` is not a list.
    """
    if not isinstance(samples, Sequence) or isinstance(samples, str):
        raise ProbeError(
            f"samples is {samples!r}; pass a list of calls that work: [(x, y), ((x,), {{'dim': 1}})]",
            argument="samples",
        )
    normalized = []
    for sample in samples:
        pair = isinstance(sample, (tuple, list)) and len(sample) == 2
        if pair and isinstance(sample[0], (tuple, list)) and isinstance(sample[1], Mapping):
            normalized.append((tuple(sample[0]), dict(sample[1])))
        else:
            normalized.append((tuple(sample) if isinstance(sample, (tuple, list)) else (sample,), {}))
    return normalized


def probe(
    op: Callable[..., Any], samples: Sequence[Any], *, budget: int = 90, isolate: bool | None = None
) -> FakeRule:
    """Derive a fake kernel by running ``op`` on the samples and on variations of them.

    Args:
        op: the operator, or its kernel. It is called often, and must not have side effects.
        samples: calls that work: ``(args, kwargs)`` pairs or tuples of arguments. The more kinds of calls
            (flags, ranks, optional arguments) they show, the more the rule covers.
        budget: the number of calls to spend on each sample, 0 or more.
        isolate: make the calls in forked processes, so that a kernel that crashes on an input that it should
            refuse costs one call. By default whenever this process can be forked (not once a GPU is in use).

    Returns:
        The rule. It raises `UndecidedError` instead of guessing if the evidence does not decide a call.
        ``rule.open_questions`` lists the calls that would decide, ``rule.crashes`` those that ended their
        process, and ``rule.problems`` says why there is no rule at all.

    Raises:
        ProbeError: there is no sample, or the operator refuses all of them.

    >>> import torch
    >>> rule = probe(lambda x, y: x @ y, [(torch.randn(2, 3), torch.randn(3, 4))])
    >>> rule(torch.empty(5, 6, device="meta"), torch.empty(6, 7, device="meta")).shape
    torch.Size([5, 7])
    """
    pairs = normalize_samples(samples)
    name = op._qualname if isinstance(op, _torch.TorchCustomOpDef) else getattr(op, "__name__", str(op))
    if isinstance(op, _torch.OpOverload):
        name = _torch.op_overload_name(op)
        if _torch.find_schema(name) is None:
            raise ProbeError(
                f"{name} was destroyed: to call it would end the process; look it up in torch.ops again",
                op=name,
            )
    if type(budget) is not int or budget < 0:
        raise ProbeError(
            f"{name}: the budget is {budget!r}; it must be a number of calls, at least 0",
            op=name,
            argument="budget",
        )
    if not pairs:
        raise ProbeError(f"{name}: probe needs at least one sample call", op=name)
    names, signature = parameter_names(op), signature_for(op)
    calls = [Call(*fill_defaults(signature, args, kwargs)) for args, kwargs in pairs]
    recorder = CallRecorder(op, names, budget, isolate=can_isolate() if isolate is None else isolate)
    accepted = [call for call in calls if recorder.record_sample(call)]
    crashes = [f"the kernel {reason}: {call_text(facts)}" for facts, reason in recorder.crashes]
    if not accepted:
        problem = "; ".join(["the operator refuses every sample; each must be a call that works", *crashes])
        raise ProbeError(f"{name}: {problem}", op=name)
    rule = derive(name, names, recorder, recorder.container)
    rule.crashes = crashes
    rule.signature = signature
    rule.open_questions = open_questions(rule, recorder.observations, optional_parameters(op))
    return rule
