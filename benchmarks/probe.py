"""Score `probe` blind on torch's own operators, given only the kernel and a few sample calls.

``python -m benchmarks probe`` prints the score. An operator counts as found if its rule is right for all of
its samples, including those that `probe` did not see. It counts as wrong if the rule gives a wrong answer
even once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fake.library.errors import ProbeError
from fake.library.opcheck.sample_calls import flat_tensors
from fake.library.probe.call_facts import bind, describe_outputs, facts_of, parameter_names
from fake.library.probe.rule import UndecidedError
from fake.library.probe.run_probe import probe

__all__ = ["OperatorScore", "few_samples", "functional_operators", "main", "score_operator"]


@dataclass
class OperatorScore:
    """The score of one operator: counts of samples, and notes on failures."""

    name: str
    right: int = 0
    undecided: int = 0
    wrong: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def found(self) -> bool:
        """Whether the rule is right for every sample."""
        return self.wrong == 0 and self.undecided == 0 and self.right > 0


def _samples(info: Any, limit: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    torch.manual_seed(0)
    dtype = torch.float32 if torch.float32 in info.dtypes else sorted(info.dtypes, key=str)[0]
    found = []
    for sample in info.sample_inputs("cpu", dtype):
        found.append(((sample.input, *sample.args), dict(sample.kwargs)))
        if len(found) == limit:
            break
    return found


def functional_operators(
    limit: int = 40, wanted: Callable[[int, str], bool] = lambda number, name: True
) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield ``(name, operator, samples)`` for op_db's operators that return fresh strided tensors.

    ``wanted(position in op_db, name)`` selects operators before their samples are made.
    """
    # Takes seconds and needs torch's test dependencies, which users of `probe` may not have.
    from torch.testing._internal.common_methods_invocations import op_db

    for number, info in enumerate(op_db):
        name = info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")
        if not wanted(number, name):
            continue
        try:
            samples = _samples(info, limit)
        except Exception as error:  # noqa: BLE001  a sample generator that needs what this machine lacks
            print(f"skipped {name}: {error}", file=sys.stderr)
            continue
        samples = [s for s in samples if _is_functional(info.op, s)]
        if samples:
            yield name, info.op, samples


def _is_functional(op: Any, sample: Any) -> bool:
    args, kwargs = sample
    bound = bind(None, args, kwargs)
    before = [(t, t.clone()) for t in flat_tensors(sample)]
    try:
        with torch.no_grad():
            result = op(*args, **kwargs)
    except Exception:  # noqa: BLE001  samples that need another device or library
        return False
    outputs = describe_outputs(result, bound)
    if not outputs or any(o.alias is not None for o in outputs):
        return False
    return all(t.layout is torch.strided and bool(((t == c) | (t != t)).all()) for t, c in before)


def few_samples(op: Any, samples: Sequence[Any], count: int) -> list[Any]:
    """Return at most ``count`` samples that cover different flags, optional arguments and ranks."""
    names = parameter_names(op)
    facts = [facts_of(bind(names, args, kwargs)) for args, kwargs in samples]
    everything = {n for f in facts for n in f.values}

    def features(f: Any) -> set[Any]:
        absent = {(n, "absent") for n in everything if n not in f.values}
        return {*f.kinds(), *f.categories(), *f.ranks(), *absent}

    chosen: list[int] = []
    shown: set[Any] = set()
    for wanted in (
        features,
        lambda f: {(f.categories(), f.ranks())},
        lambda f: {(f.categories(), f.numbers())},
    ):
        for index, f in enumerate(facts):
            if len(chosen) < count and index not in chosen and wanted(f) - shown:
                chosen.append(index)
                shown |= wanted(f)
    return [samples[i] for i in sorted(chosen)]


def score_operator(name: str, op: Any, samples: Sequence[Any], given: int) -> OperatorScore:
    """Derive a rule from at most ``given`` samples and compare it with the kernel on all of them."""
    score = OperatorScore(name)
    try:
        rule = probe(op, few_samples(op, samples, given))
    except ProbeError as error:
        score.undecided = len(samples)
        score.notes.append(str(error))
        return score
    names = parameter_names(op)
    for args, kwargs in samples:
        with torch.no_grad():
            real = describe_outputs(op(*args, **kwargs), bind(names, args, kwargs))
        try:
            answer = rule.describe(*args, **kwargs)
        except UndecidedError as error:
            score.undecided += 1
            score.notes.append(f"undecided: {error}")
            continue
        problem = _difference(real, answer)
        if problem is None:
            score.right += 1
        else:
            score.wrong += 1
            score.notes.append(f"wrong: {problem}")
    return score


def _in_a_child(name: str, op: Any, samples: Sequence[Any], given: int) -> OperatorScore:
    """Run `score_operator` in a forked process: some kernels crash on inputs that they should refuse."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        sender.send(score_operator(name, op, samples, given))

    child = context.Process(target=work)
    child.start()
    sender.close()
    try:
        score = receiver.recv()
    except EOFError:
        child.join()
        score = OperatorScore(
            name, undecided=len(samples), notes=[f"the process died: exit code {child.exitcode}"]
        )
    child.join()
    return score


def _difference(real: Any, answer: Any) -> str | None:
    if len(real) != len(answer):
        return f"{len(answer)} outputs instead of {len(real)}"
    for index, (fact, (shape, strides, dtype)) in enumerate(zip(real, answer, strict=True)):
        fits = len(shape) == len(fact.shape) and all(
            a is None or a == b for a, b in zip(shape, fact.shape, strict=True)
        )
        if not fits:
            return f"output {index} has shape {fact.shape}, the rule says {shape}"
        if dtype != fact.dtype:
            return f"output {index} is {fact.dtype}, the rule says {dtype}"
        if strides is not None and 0 not in fact.shape:
            for size, a, b in zip(fact.shape, fact.strides, strides, strict=True):
                if size > 1 and a != b:
                    return f"output {index} of shape {fact.shape} has strides {fact.strides}, the rule says {strides}"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the score. Return 1 if an operator is wrong without saying so, or if fewer than 80% are found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks probe", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="only every n-th operator")
    parser.add_argument("--offset", type=int, default=0, help="start with this operator")
    parser.add_argument("--given", type=int, default=16, help="samples that probe sees, at most")
    parser.add_argument("--limit", type=int, default=40, help="samples of an operator, at most")
    parser.add_argument("--only", help="only operators whose name contains this")
    parser.add_argument("--verbose", action="store_true", help="say why operators are not found")
    parser.add_argument("--json", help="write the scores to this file")
    options = parser.parse_args(argv)
    if not 0 <= options.offset < options.every:
        parser.error(f"--offset {options.offset} must be at least 0 and less than --every {options.every}")
    if options.given < 1 or options.limit < 1:
        parser.error("--given and --limit must be at least 1")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    scores = []
    start = time.time()

    def wanted(number: int, name: str) -> bool:
        return number % options.every == options.offset and (not options.only or options.only in name)

    for name, op, samples in functional_operators(options.limit, wanted):
        score = _in_a_child(name, op, samples, options.given)
        scores.append(score)
        if options.verbose and not score.found:
            first = next((n for n in score.notes if n.startswith("wrong")), score.notes[:1])
            print(
                f"{name}: {score.right} right, {score.undecided} undecided, {score.wrong} wrong: {first}",
                flush=True,
            )
    if not scores:
        parser.error(f"no functional operator is selected (--only {options.only!r})")
    if options.json:
        with open(options.json, "w") as file:
            json.dump([s.__dict__ for s in scores], file, indent=1)
    found = [s for s in scores if s.found]
    wrong = [s.name for s in scores if s.wrong]
    decided = sum(s.right for s in scores)
    total = sum(s.right + s.wrong + s.undecided for s in scores)
    print(
        f"{len(scores)} functional operators in {time.time() - start:.0f} s: rule right for every sample "
        f"{len(found)} ({len(found) / max(len(scores), 1):.1%}); wrong without saying so {len(wrong)} {wrong}; "
        f"samples answered {decided} of {total}"
    )
    return int(bool(wrong) or len(found) < 0.8 * len(scores))
