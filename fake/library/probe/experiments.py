"""Running the kernel: the samples, and chosen variations of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fake.library.opcheck.inputs import flat_tensors
from fake.library.probe.facts import Facts, OutputFact, bind, describe_outputs, facts_of
from fake.library.probe.isolation import Crash, run_isolated
from fake.library.probe.variations import DATA_CHANGES, Arguments, change_tensors, copy_arguments, variations


@dataclass(frozen=True)
class Observation:
    """One call that the kernel accepted.

    Attributes:
        outputs: None where the result is not made of strided tensors.
        sample: whether it is a sample rather than a variation.
        label: how it varies its sample.
        writes: an argument that the call wrote to, or None.
    """

    facts: Facts
    outputs: tuple[OutputFact, ...] | None
    sample: bool
    label: str
    writes: str | None = None


@dataclass
class Laboratory:
    """Calls an operator and remembers what it did.

    Attributes:
        op: the real kernel, or the operator with one.
        names: the parameters' names, or None.
        budget: the number of calls to spend on one sample.
        isolate: make the calls in a forked process, where a kernel that crashes costs one call only.
        observations: what it did.
        crashes: ``(arguments, what happened)`` of the calls that ended their process.
        container: list or tuple where the operator returns one.
    """

    op: Callable[..., Any]
    names: Sequence[str] | None
    budget: int = 90
    isolate: bool = False
    observations: list[Observation] = field(default_factory=list)
    crashes: list[tuple[Facts, str]] = field(default_factory=list)
    container: type | None = None

    def study(self, sample: Arguments) -> bool:
        """Run a sample and its variations; returns whether the sample itself ran."""
        sample = change_tensors(sample, lambda t: t.detach())

        def steps(first: int) -> Iterator[tuple[Observation, type | None] | None]:
            for number, (label, arguments) in enumerate(
                itertools.islice(self._plan(sample), first, None), first
            ):
                found = self._observe(label, arguments)
                yield found
                if number == 0 and found is None:
                    return

        accepted = False
        for number, found in enumerate(run_isolated(steps) if self.isolate else steps(0)):
            if isinstance(found, Crash):
                _, arguments = next(itertools.islice(self._plan(sample), number, None))
                self.crashes.append((facts_of(bind(self.names, *arguments)), found.reason))
                if number == 0:
                    break
            elif found is not None:
                observation, container = found
                self.observations.append(observation)
                if number == 0:
                    accepted, self.container = True, container
        return accepted

    def _plan(self, sample: Arguments) -> Iterator[tuple[str, Arguments]]:
        yield "sample", sample
        yield from itertools.islice(variations(sample), self.budget)

    def _observe(self, label: str, arguments: Arguments) -> tuple[Observation, type | None] | None:
        found = self._run(arguments, label)
        if found is None:
            return None
        observation, container = found
        if label.startswith(("sample", "size", "flag")):
            observation = self._run_with_other_data(arguments, observation)
        return observation, container

    def _run(self, arguments: Arguments, label: str) -> tuple[Observation, type | None] | None:
        args, kwargs = copy_arguments(arguments)
        bound = bind(self.names, args, kwargs)
        before = [(name, leaf, leaf.clone()) for name, value in bound.items() for leaf in flat_tensors(value)]
        try:
            facts = facts_of(bound)
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                result = self.op(*args, **kwargs)
        except Exception:  # noqa: BLE001  refused inputs say nothing about the outputs
            return None
        container = list if isinstance(result, list) else tuple if isinstance(result, tuple) else None
        sample, outputs = label == "sample", describe_outputs(result, bound)
        for name, leaf, copy in before:
            if leaf.layout is torch.strided and leaf.shape == copy.shape and not _equal(leaf, copy):
                return Observation(facts, outputs, sample, label, name), container
        return Observation(facts, outputs, sample, label), container

    def _run_with_other_data(self, arguments: Arguments, first: Observation) -> Observation:
        """Sizes that change with the data become None."""
        outputs = first.outputs
        for change in DATA_CHANGES:
            if outputs is None:
                break
            found = self._run(change_tensors(arguments, change), "data")
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


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool(((left == right) | (left != left)).all())
