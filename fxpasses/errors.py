"""The errors of fxpasses. Each has fields that say what went wrong and a message that says what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

__all__ = [
    "BisectError",
    "CaptureError",
    "ContractError",
    "FxPassesError",
    "HandoverError",
    "Location",
    "OptionsError",
    "PartitionError",
    "PassError",
    "PatternError",
    "RankMismatchError",
    "ReportError",
    "ShadowedPackageError",
    "ShardingError",
    "StageError",
    "StructureError",
    "UnknownTorchWarning",
    "ValueMismatchError",
]


class FxPassesError(Exception):
    """Base class of all errors that fxpasses raises on purpose."""


class UnknownTorchWarning(UserWarning):
    """The installed torch is not a supported release. Features that rely on its private functions are off."""


class OptionsError(FxPassesError, ValueError):
    """An option is unknown, has the wrong type, or has a value out of range.

    Attributes:
        option: its name as the user wrote it.
        given: the value that was given.
        expected: a description of the accepted values.
        valid: all valid options or values, if an unknown name or word was given.
    """

    def __init__(
        self, option: str, given: object, expected: str = "", *, valid: Iterable[str] = (), problem: str = ""
    ) -> None:
        self.option, self.given, self.expected, self.valid = option, given, expected, tuple(valid)
        super().__init__(
            problem
            or f"option {option!r}: expected {expected}, got {_short_text(given)} ({type(given).__name__})"
        )

    @classmethod
    def for_choice(cls, option: str, given: object, valid: Iterable[str]) -> OptionsError:
        """Create the error for a word that is not among the valid ones. The message suggests the nearest one.

        Args:
            option: the option's name.
            given: its value.
            valid: the accepted words.

        >>> print(OptionsError.for_choice("check", "value", ["structure", "values", "off"]))
        option 'check': expected one of 'structure', 'values', 'off', got 'value'; did you mean 'values'?
        """
        valid = tuple(valid)
        choices = ", ".join(map(repr, valid))
        return cls(
            option,
            given,
            f"one of {choices}",
            valid=valid,
            problem=f"option {option!r}: expected one of {choices}, got {_short_text(given)}{did_you_mean(given, valid)}",
        )


class ShadowedPackageError(FxPassesError, ImportError):
    """A module of the same name is imported instead of a package that ships with fxpasses.

    Attributes:
        package: the name of our package.
        found: the file that is imported instead.
        ours: the directory of our package.
    """

    def __init__(self, package: str, found: str, ours: str) -> None:
        self.package, self.found, self.ours = package, found, ours
        super().__init__(
            f"'import {package}' gives {found}, which shadows the package {package!r} that comes with fxpasses ({ours}). "
            "Rename that file, or move it to where Python does not look for modules: it looks beside the script that "
            "is run, in PYTHONPATH, and in the current directory with 'python -m' and 'python -c'.",
            name=package,
            path=found,
        )


class RankMismatchError(FxPassesError, RuntimeError):
    """The ranks of a job compiled graphs whose collectives do not match. Raised before any of them runs.

    Attributes:
        ranks: the two ranks that differ, or the one that did not answer; empty if the job's store is gone.
        factor: the first compilation factor that differs, ``""`` if there is none or no rank could be asked.
        values: its value on each of the two ranks.
    """

    def __init__(
        self, problem: str, ranks: tuple[int, ...], factor: str = "", values: tuple[str, ...] = ()
    ) -> None:
        self.ranks, self.factor, self.values = ranks, factor, values
        super().__init__(problem)


class ShardingError(FxPassesError, ValueError):
    """A model cannot be sharded as requested. Nothing was changed.

    Attributes:
        parameter: its name, or ``""`` if the problem is not about a single parameter.
    """

    def __init__(self, parameter: str, problem: str) -> None:
        self.parameter = parameter
        super().__init__(f"parameter {parameter!r}: {problem}" if parameter else problem)


class SimulationError(FxPassesError, ValueError):
    """A step cannot be simulated. Names the cluster value, mesh or unknown collective at fault."""


class ReportError(FxPassesError, ValueError):
    """No report page can be made: nothing was recorded, or it was recorded in an unsupported version."""


class BisectError(FxPassesError):
    """A script cannot be bisected: it does not exist, or it fails before anything is compiled."""


class ContractError(FxPassesError, ValueError):
    """A contract is invalid, or passes cannot be put into one pipeline.

    Attributes:
        passes: names of the passes involved: two for a conflict or a duplicate, all of them in order for a
            cycle.
    """

    def __init__(self, problem: str, passes: Iterable[str] = ()) -> None:
        self.passes = tuple(passes)
        super().__init__(problem)


class PatternError(FxPassesError, ValueError):
    """The functions of a pattern cannot be traced, or do not match each other.

    Attributes:
        function: the name of the function at fault.
    """

    def __init__(self, function: str, problem: str) -> None:
        self.function = function
        super().__init__(f"{function}: {problem}")


def _short_text(value: object) -> str:
    from fake.error_text import short_repr  # only once it is known that this is our `fake`

    return short_repr(value)


def did_you_mean(given: object, valid: Iterable[str]) -> str:
    """Return the end of an error message: a suggestion of the nearest valid word, or ``""`` if none is near.

    >>> did_you_mean("Inductr", ["inductor", "eager"]), did_you_mean(3, ["inductor"])
    ("; did you mean 'inductor'?", '')
    """
    if not isinstance(given, str) or not given:
        return ""
    names = {name.lower(): name for name in valid}
    word = given.lower().strip()
    near = get_close_matches(word, names, n=1, cutoff=0.5)
    near = near or [name for name in names if name.startswith(word) or word.startswith(name)]
    return f"; did you mean {names[near[0]]!r}?" if near else ""


def unknown_name(kind: str, given: str, valid: Iterable[str]) -> str:
    """Write a sentence about an unknown name that suggests the nearest valid one and lists all of them.

    Args:
        kind: what is named, such as ``"option"``.
        given: the name.
        valid: the names that exist. If there are more than forty, only up to ten nearest ones are listed.

    >>> unknown_name("option", "memory_budgt", ["memory_budget", "passes"])
    "unknown option 'memory_budgt'; did you mean 'memory_budget'? Valid options: memory_budget, passes."
    """
    names = sorted(valid)
    near = get_close_matches(given, names, n=10, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    if len(names) > 40:
        return (
            f"unknown {kind} {_short_text(given)}{hint} Nearest of {len(names)}: {', '.join(near) or 'none'}."
        )
    return f"unknown {kind} {_short_text(given)}{hint} Valid {kind}{'es' if kind.endswith('s') else 's'}: {', '.join(names)}."


@dataclass(frozen=True)
class Location:
    """The line of the user's program that produced a graph node.

    Attributes:
        node: the node's name in its graph, or "" if no single node is at fault.
        target: what the node calls, as text.
        source: the user's line as ``file:line in function: code``, or "".
        module: the path of the ``nn.Module`` that ran it (``blocks.0.attn``), or "".
    """

    node: str = ""
    target: str = ""
    source: str = ""
    module: str = ""

    def __str__(self) -> str:
        parts = []
        if self.node:
            parts.append(f"node {self.node!r}" + (f" ({self.target})" if self.target else ""))
        if self.module:
            parts.append(f"in module {self.module!r}")
        if self.source:
            parts.append(f"from {self.source}")
        return ", ".join(parts)


class StageError(FxPassesError):
    """A stage of the compilation failed.

    Attributes:
        stage: capture, pass, partition or inductor.
        pass_name: the pass that failed, or "".
        location: the node and the user's source line.
        reason: the underlying error, in one line.
    """

    stage = "compile"

    def __init__(
        self, reason: str, location: Location | None = None, *, pass_name: str = "", graph: str = ""
    ) -> None:
        self.reason, self.location, self.pass_name, self.graph = (
            reason,
            location or Location(),
            pass_name,
            graph,
        )
        where = f" in the {graph} graph" if graph else ""
        who = f" pass {pass_name!r}" if pass_name else ""
        at = f"\n  at {self.location}" if str(self.location) else ""
        super().__init__(
            f"stage {self.stage!r}{who} failed{where}: {reason}{at}"
            + (f"\n  {self.advice}" if self.advice else "")
        )

    advice = ""
    instead = "To run this graph in eager instead, pass options={'on_failure': 'eager'}."

    def advise(self) -> None:
        """Append the options that ``torch.compile`` offers instead. Called on errors that reach the user."""
        self._add(self.instead)

    def _add(self, line: str) -> None:
        if line not in str(self):
            self.args = (f"{self.args[0]}\n  {line}",)


class CaptureError(StageError):
    """The forward and backward passes could not be captured as functional ATen graphs."""

    stage = "capture"


class PassError(StageError):
    """A pass raised an exception or left an invalid graph.

    Attributes:
        repro: with ``options={"check": "values"}``, a file that reproduces the fault on a small graph, or "".
        repro_calls: the number of operator calls in that graph.
        lines: if the pass raised, its frames as ``file:line in function: code``, innermost last.
    """

    stage = "pass"
    lines: tuple[str, ...] = ()
    advice = "Leave the pass out with options={'passes': [...]} to see whether the rest works."
    repro = ""
    repro_calls = 0

    def add_lines(self, lines: Iterable[str]) -> None:
        """Record where in the pass the exception was raised, and add it to the message."""
        self.lines = tuple(lines)
        if self.lines:
            self._add("\n    ".join(["raised in the pass:", *self.lines]))

    def add_repro(self, file: str, calls: int) -> None:
        """Record a repro file, and add it to the message."""
        self.repro, self.repro_calls = file, calls
        shown = f"{file} shows it on a graph of {calls} call{'s' * (calls != 1)}."
        self._add(shown)


class StructureError(PassError):
    """A pass changed the graph's aliasing, effects, outputs or metadata in a way that is not allowed.

    Attributes:
        problem: lint, inputs, metadata, outputs, aliasing, order, mutation or stale alias.
        site: the index of the match site at fault, or ``None``.
    """

    advice = "Correct the pass, or its contract; options={'passes': [...]} leaves it out."

    def __init__(
        self,
        reason: str,
        location: Location | None = None,
        *,
        pass_name: str = "",
        graph: str = "",
        problem: str = "",
        site: int | None = None,
    ) -> None:
        self.problem, self.site = problem, site
        super().__init__(reason, location, pass_name=pass_name, graph=graph)


class ValueMismatchError(PassError):
    """A pass changed what the graph computes (``options={"check": "values"}``).

    Attributes:
        mismatches: which results differ and how: :class:`fxpasses.checking.comparison.values.Mismatch`.
        sites: the match sites where the pass is wrong; empty for a pass that claims none.
        partners: earlier passes without which this pass is correct: the fault lies in their interaction.
    """

    stage = "check"

    def __init__(
        self,
        reason: str,
        location: Location | None = None,
        *,
        pass_name: str = "",
        graph: str = "",
        mismatches: Iterable[object] = (),
        sites: Iterable[object] = (),
        site: str = "",
        partners: Iterable[str] = (),
    ) -> None:
        self.mismatches, self.sites, self.partners = tuple(mismatches), tuple(sites), tuple(partners)
        self.advice = f"Wrong at {site}." if site else ""
        if self.partners:
            others = ", ".join(map(repr, self.partners))
            them = "it" if len(self.partners) == 1 else "them"
            self.advice += f"\n  Only after {others}: without {them}, {pass_name!r} is right here."
        super().__init__(reason, location, pass_name=pass_name, graph=graph)


class PartitionError(StageError):
    """The joint graph could not be split into forward and backward."""

    stage = "partition"


class HandoverError(StageError):
    """Inductor rejected the graph or failed to compile it."""

    stage = "inductor"
    advice = "options={'compiler': 'eager'} runs the same graphs without Inductor."
    instead = (
        "To run only what cannot be lowered in eager, pass options={'on_failure': 'isolate'}; the whole graph, "
        "options={'on_failure': 'eager'}."
    )
