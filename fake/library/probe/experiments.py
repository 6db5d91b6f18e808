"""Running the kernel: the samples, and chosen variations of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..opcheck.inputs import flat_tensors
from .facts import Facts, OutputFact, bind, describe_outputs, facts_of
from .variations import DATA_CHANGES, Arguments, change_tensors, copy_arguments, variations

__all__ = ["Laboratory", "Observation"]


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


class Laboratory:
    """Calls an operator and remembers what it did.

    Args:
        op: the real kernel, or the operator with one.
        names: the parameters' names, or None.
        budget: the number of calls to spend on one sample.
    """

    def __init__(self, op: Callable[..., Any], names: Sequence[str] | None, budget: int = 90) -> None:
        self.op = op
        self.names = names
        self.budget = budget
        self.observations: list[Observation] = []
        self.container: type | None = None

    def study(self, sample: Arguments) -> bool:
        """Run a sample and its variations; returns whether the sample itself ran."""
        sample = change_tensors(sample, lambda t: t.detach())
        first = self._run(sample, "sample", sample=True)
        if first is None:
            return False
        first = self._run_with_other_data(sample, first)
        self.observations.append(first)
        for label, arguments in itertools.islice(variations(sample), self.budget):
            found = self._run(arguments, label, sample=False)
            if found is not None:
                if label.startswith(("size", "flag")):
                    found = self._run_with_other_data(arguments, found)
                self.observations.append(found)
        return True

    def _run(self, arguments: Arguments, label: str, *, sample: bool) -> Observation | None:
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
        if sample:
            self.container = (
                list if isinstance(result, list) else tuple if isinstance(result, tuple) else None
            )
        for name, leaf, copy in before:
            if leaf.layout is torch.strided and leaf.shape == copy.shape and not _equal(leaf, copy):
                return Observation(facts, describe_outputs(result, bound), sample, label, name)
        return Observation(facts, describe_outputs(result, bound), sample, label)

    def _run_with_other_data(self, arguments: Arguments, first: Observation) -> Observation:
        """Sizes that change with the data become None."""
        outputs = first.outputs
        for change in DATA_CHANGES:
            if outputs is None:
                break
            other = self._run(change_tensors(arguments, change), "data", sample=False)
            if other is None or other.outputs is None or len(other.outputs) != len(outputs):
                continue
            merged = []
            for mine, theirs in zip(outputs, other.outputs, strict=True):
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
