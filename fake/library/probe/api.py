"""The entry point of `fake.library.probe`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fake.library import _torch
from fake.library.errors import ProbeError
from fake.library.probe.derive import derive
from fake.library.probe.experiments import Laboratory
from fake.library.probe.facts import optional_parameters, parameter_names
from fake.library.probe.isolation import can_isolate
from fake.library.probe.parameters import fill_defaults, signature_for
from fake.library.probe.questions import open_questions
from fake.library.probe.rule import FakeRule, call_text


def normalize_samples(samples: Sequence[Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Samples as ``(args, kwargs)``; a sample may be a tuple of arguments alone."""
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
    """Run ``op`` on the samples and on variations of them, and derive its fake kernel.

    Args:
        op: the operator, or its kernel. It is called often; it must not have side effects.
        samples: calls that work: ``(args, kwargs)`` pairs or tuples of arguments. The more kinds of calls (flags,
            ranks, optional arguments) they show, the more the rule covers.
        budget: calls to spend on each sample.
        isolate: make the calls in forked processes, so that a kernel that crashes on an input that it should refuse
            costs one call. By default wherever this process can be forked (not once a GPU is in use).

    Returns:
        the rule. Where the evidence does not decide, it raises `UndecidedError` instead of guessing;
        ``rule.open_questions`` has the calls that would decide, ``rule.crashes`` those that ended their process, and
        ``rule.problems`` says why there is no rule at all.

    Raises:
        ProbeError: there is no sample, or the operator refuses all of them.

    >>> import torch
    >>> rule = probe(lambda x, y: x @ y, [(torch.randn(2, 3), torch.randn(3, 4))])
    >>> rule(torch.empty(5, 6, device="meta"), torch.empty(6, 7, device="meta")).shape
    torch.Size([5, 7])
    """
    calls = normalize_samples(samples)
    name = op._qualname if isinstance(op, _torch.TorchCustomOpDef) else getattr(op, "__name__", str(op))
    if isinstance(op, _torch.OpOverload):
        name = _torch.op_overload_name(op)
    if budget < 0:
        raise ProbeError(f"{name}: the budget is {budget} calls; it must be at least 0", op=name)
    if not calls:
        raise ProbeError(f"{name}: probe needs at least one sample call", op=name)
    names, signature = parameter_names(op), signature_for(op)
    calls = [fill_defaults(signature, args, kwargs) for args, kwargs in calls]
    laboratory = Laboratory(op, names, budget, isolate=can_isolate() if isolate is None else isolate)
    accepted = [call for call in calls if laboratory.study(call)]
    crashes = [f"the kernel {reason}: {call_text(facts)}" for facts, reason in laboratory.crashes]
    if not accepted:
        problem = "; ".join(["the operator refuses every sample; each must be a call that works", *crashes])
        raise ProbeError(f"{name}: {problem}", op=name)
    rule = derive(name, names, laboratory, laboratory.container)
    rule.crashes = crashes
    rule.signature = signature
    rule.open_questions = open_questions(rule, laboratory.observations, optional_parameters(op))
    return rule
