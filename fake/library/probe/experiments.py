"""Run the kernel on the samples, and on chosen variations of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fake.library.opcheck.call_memory import same_bits
from fake.library.opcheck.sample_calls import Call, flat_tensors
from fake.library.probe.call_facts import Facts, OutputFact, bind, describe_outputs, facts_of
from fake.library.probe.forked_calls import Crash, run_isolated
from fake.library.probe.probed_calls import DATA_CHANGES, changed, variations
from fake.library.random_state import seeded_generators


@dataclass(frozen=True)
class Observation:
    """One call that the kernel accepted.

    Attributes:
        outputs: the outputs, or None if the result is not made of strided tensors.
        sample: whether it is a sample rather than a variation.
        writes: an argument that the call mutated, or None.
    """

    facts: Facts
    outputs: tuple[OutputFact, ...] | None
    sample: bool
    writes: str | None = None


@dataclass
class CallRecorder:
    """Calls an operator and records what it did.

    Attributes:
        op: the real kernel, or the operator with one.
        names: the parameters' names, or None.
        budget: the number of calls to spend on one sample.
        isolate: make the calls in a forked process, so that a crashing kernel costs only one call.
        observations: the accepted calls.
        crashes: ``(arguments, what happened)`` of the calls that ended their process.
        container: list or tuple if the operator returns one.
    """

    op: Callable[..., Any]
    names: Sequence[str] | None
    budget: int = 90
    isolate: bool = False
    observations: list[Observation] = field(default_factory=list)
    crashes: list[tuple[Facts, str]] = field(default_factory=list)
    container: type | None = None

    def record_sample(self, sample: Call) -> bool:
        """Run a sample and its variations; returns whether the sample itself ran."""
        sample = changed(sample, torch.Tensor.detach)

        def steps(first: int) -> Iterator[tuple[Observation, type | None] | None]:
            for number, call in enumerate(itertools.islice(self._calls(sample), first, None), first):
                found = self._observe(call)
                yield found
                if number == 0 and found is None:
                    return

        accepted = False
        for number, found in enumerate(run_isolated(steps) if self.isolate else steps(0)):
            if isinstance(found, Crash):
                call = next(itertools.islice(self._calls(sample), number, None))
                self.crashes.append((facts_of(bind(self.names, call.args, call.kwargs)), found.reason))
                if number == 0:
                    break
            elif found is not None:
                observation, container = found
                self.observations.append(observation)
                if number == 0:
                    accepted, self.container = True, container
        return accepted

    def _calls(self, sample: Call) -> Iterator[Call]:
        yield sample
        yield from itertools.islice(variations(sample), self.budget)

    def _observe(self, call: Call) -> tuple[Observation, type | None] | None:
        found = self._run(call)
        if found is None or call.kind not in ("", "size", "flag"):
            return found
        observation, container = found
        return self._run_with_other_data(call, observation), container

    def _run(self, call: Call) -> tuple[Observation, type | None] | None:
        copied = call.copy()
        bound = bind(self.names, copied.args, copied.kwargs)
        before = [(name, leaf, leaf.clone()) for name, value in bound.items() for leaf in flat_tensors(value)]
        try:
            facts = facts_of(bound)
            with torch.no_grad(), seeded_generators(0):
                result = self.op(*copied.args, **copied.kwargs)
        except Exception:  # noqa: BLE001  refused inputs say nothing about the outputs
            return None
        container = list if isinstance(result, list) else tuple if isinstance(result, tuple) else None
        sample, outputs = not call.kind, describe_outputs(result, bound)
        for name, leaf, copy in before:
            if not same_bits(leaf, copy):
                return Observation(facts, outputs, sample, name), container
        return Observation(facts, outputs, sample), container

    def _run_with_other_data(self, call: Call, first: Observation) -> Observation:
        """Replace sizes that change with the data by None."""
        outputs = first.outputs
        for change in DATA_CHANGES:
            if outputs is None:
                break
            found = self._run(changed(call, change, "value"))
            others = None if found is None else found[0].outputs
            if others is None or len(others) != len(outputs):
                continue
            merged = []
            for mine, theirs in zip(outputs, others, strict=True):
                if len(mine.shape) == len(theirs.shape):
                    shape = tuple(
                        a if a == b else None for a, b in zip(mine.shape, theirs.shape, strict=True)
                    )
                    mine = replace(mine, shape=shape)
                merged.append(mine)
            outputs = tuple(merged)
        return replace(first, outputs=outputs)
