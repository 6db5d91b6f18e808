"""What each rule and check of ``fake.kernels`` changes: eager against our engine without one of them.

For each entry of torch's operator databases, the sweep first runs with all rules (with ``--refusals``, all
argument checks) and records those that answered (or refused). Then it runs once without each of them. If no
verdict changes without one, either torch has caught up or these samples do not reach it: before removing it
and the tests that name it, try more samples, layouts and ``--symbolic``.
"""

from __future__ import annotations

import argparse
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

import fake
from benchmarks.conformance import refusals
from benchmarks.conformance.isolate import isolated
from benchmarks.conformance.layouts import LAYOUTS
from benchmarks.conformance.subjects import entry_name
from benchmarks.conformance.sweep import Options, sweep
from fake.kernels import rule_registry
from fake.kernels.checks import check_registry as checks

__all__ = ["main"]

FAMILIES = ("structured", "_out_variant")
"""Rules for hundreds of operators at once, which are not in question."""


class Switch:
    """Disables one rule or check, and records which of them are used.

    Attributes:
        left_out: the name of the disabled one, or "".
        working: the names of those that answered or refused since this was cleared.
    """

    def __init__(self) -> None:
        self.left_out = ""
        self.working: set[str] = set()

    def find(self, find: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap ``registry.find`` to skip the disabled rule and record the others."""

        def found(func: Any) -> Any:
            rule = find(func)
            if rule is not None and _name(rule) == self.left_out:
                families = (
                    r for matches, r in rule_registry._registry._families if matches(func) and r is not rule
                )
                rule = next(families, None)
            return None if rule is None else self._noting(rule)

        return found

    def _noting(self, rule: Any) -> Any:
        def answer(*call: Any) -> Any:
            result = rule(*call)
            if result is not NotImplemented:
                self.working.add(_name(rule))
            return result

        answer.__name__ = rule.__name__
        return answer

    def check(self, check: Any) -> Any:
        """Wrap a check to do nothing if it is disabled, and to be recorded when it refuses."""

        def refusing(func: Any, bound: Any) -> None:
            if _name(check) != self.left_out:
                try:
                    check(func, bound)
                except Exception:
                    self.working.add(_name(check))
                    raise

        return refusing

    @contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Disable a rule or check within the context, with empty caches."""
        self.left_out = name
        fake.cache_clear()
        try:
            yield
        finally:
            self.left_out = ""


def _name(function: Any) -> str:
    return f"{function.__module__.split('.')[-1]}.{function.__name__}:{function.__code__.co_firstlineno}"


def changes_of_rules(options: Options, switch: Switch) -> dict[str, list[str]]:
    """Return, for each rule that answered, the cases whose verdict changes without it."""

    def verdicts() -> set[tuple[str, str, str, str]]:
        return {(c.label, c.table, c.layout, str(c.outcome.verdict)) for c in sweep(options).notable}

    switch.working.clear()
    with switch.without(""):
        whole = verdicts()
    found = {}
    for name in sorted(n for n in switch.working if n.split(".")[1].split(":")[0] not in FAMILIES):
        with switch.without(name):
            found[name] = [" ".join(case) for case in sorted(whole ^ verdicts())]
    return found


def changes_of_checks(database: str, entry: Any, options: Options, switch: Switch) -> dict[str, list[str]]:
    """Return, for each check that refused, the calls whose verdict changes without it."""
    found: dict[str, list[str]] = {}
    for attempt in refusals._attempts(database, entry, options):
        switch.working.clear()
        with switch.without(""):
            whole = refusals._judge(attempt, options).verdict
        for name in sorted(switch.working):
            with switch.without(name):
                other = refusals._judge(attempt, options).verdict
            found.setdefault(name, []).extend([f"{attempt.label}: {other}"] if other is not whole else [])
    return found


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks rules", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="names of entries; default: all")
    parser.add_argument("--refusals", action="store_true", help="checks of arguments instead of rules")
    parser.add_argument("--samples", type=int, default=2, help="of each entry at most")
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=["given", "column-major"])
    parser.add_argument("--symbolic", action="store_true")
    chosen = parser.parse_args(argv)
    switch = Switch()
    for known in checks._CHECKS.values() if chosen.refusals else ():
        known[:] = [switch.check(check) for check in known]
    changed: dict[str, list[str]] = defaultdict(list)
    whole = Options("fake", patterns=chosen.patterns, databases=("op", "custom"))
    common: dict[str, Any] = {
        "samples": chosen.samples,
        "layouts": chosen.layouts,
        "symbolic": chosen.symbolic,
    }
    switched = mock.patch.object(rule_registry._registry, "find", switch.find(rule_registry._registry.find))
    with nullcontext() if chosen.refusals else switched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for database, entry in whole.entries():
            one = Options(
                "fake",
                patterns=[entry_name(entry)],
                databases=(database,),
                dtypes=(torch.float32, torch.int64),
                **common,
            )
            if chosen.refusals:
                found = (
                    isolated(
                        lambda d=database, e=entry, o=one: changes_of_checks(d, e, o, switch), seconds=300
                    )
                    or {}
                )  # type: ignore[misc]
            else:
                found = changes_of_rules(one, switch)
            for name, cases in found.items():
                changed[name] += cases
    table = Table("left out", "verdicts that change", "for example")
    for name, cases in sorted(changed.items(), key=lambda item: len(item[1])):
        table.add_row(name, str(len(cases)), cases[0] if cases else "")
    Console(width=150).print(table)
    return 0
