"""The result of a check: passed, or the problem, the evidence, and how to fix it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fake.library.errors import OpCheckError
from fake.notebook import as_html


def describe_tensor(tensor: torch.Tensor) -> str:
    """Describe a tensor as ``float32[2, 3] stride (3, 1) cpu``."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    sizes = ", ".join(str(s) for s in tensor.shape)
    stride = f" stride {tuple(tensor.stride())}" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{dtype}[{sizes}]{stride} {tensor.device}"


@dataclass(frozen=True)
class Evidence:
    """One observation.

    Attributes:
        where: the argument or output that it is about, for example ``"output 0"`` or ``"argument x"``.
        expected: the expected observation.
        actual: the actual observation.
        inputs: the inputs of the call that showed it.
        aspect: what differs, for example ``"sizes"`` or ``"dtype"``; determines the suggested fix.
    """

    where: str
    expected: str
    actual: str
    inputs: str = ""
    aspect: str = ""

    def __str__(self) -> str:
        lines = [f"{self.where}:", f"  expected {self.expected}", f"  got      {self.actual}"]
        return "\n".join([*lines, f"  with     {self.inputs}"] if self.inputs else lines)


class Fault(Exception):
    """Raised by a check that fails; becomes a `CheckFailure`, which adds the names of check and operator."""

    def __init__(self, problem: str, *, evidence: tuple[Evidence, ...] = (), fix: str) -> None:
        super().__init__(problem)
        self.problem, self.evidence, self.fix = problem, evidence, fix


class CheckFailure(OpCheckError):
    """A check failed.

    Attributes:
        check: the check's name.
        problem: one sentence.
        evidence: the observations behind it.
        fix: what to do.
    """

    def __init__(
        self, check: str, op: str, problem: str, *, evidence: tuple[Evidence, ...] = (), fix: str
    ) -> None:
        shown = "".join(f"\n{item}" for item in evidence)
        super().__init__(f"opcheck({op}): {check} failed: {problem}{shown}\nHow to fix: {fix}", op=op)
        self.check = check
        self.problem = problem
        self.evidence = evidence
        self.fix = fix


class Passed(str):
    """The result of a check that passed; equal to ``"SUCCESS"``."""

    note: str

    def __new__(cls, note: str = "") -> Passed:
        self = super().__new__(cls, "SUCCESS")
        self.note = note
        return self


class Verdict(dict[str, Any]):
    """The results of one opcheck: check name → `Passed` or `CheckFailure`. Prints as a report.

    Attributes:
        op: the operator's name.
        also_passed: checks beyond the requested ones that ran and passed, with their notes.
    """

    def __init__(
        self, op: str, results: Mapping[str, Any] = {}, also_passed: Mapping[str, Passed] = {}
    ) -> None:
        super().__init__(results)
        self.op = op
        self.also_passed = dict(also_passed)

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> list[CheckFailure]:
        """The failed checks."""
        return [result for result in self.values() if isinstance(result, CheckFailure)]

    def _repr_html_(self) -> str:
        rows = [(n, "FAIL", r.problem, r.fix) if isinstance(r, CheckFailure) else (n, "ok", getattr(r, "note", ""), "")
                for n, r in (*self.items(), *self.also_passed.items())]  # fmt: skip
        return as_html(str(self).partition("\n")[0], ("check", "verdict", "told", "fix"), rows)

    def __str__(self) -> str:
        lines = [
            f"{self.op}: "
            + ("all checks passed" if self.ok else f"{len(self.failures)} of {len(self)} failed")
        ]
        for name, result in (*self.items(), *self.also_passed.items()):
            if not isinstance(result, CheckFailure):
                first, *more = (
                    result.note.splitlines() if isinstance(result, Passed) and result.note else ("",)
                )
                lines.append(f"  ok    {name} ({first})" if first else f"  ok    {name}")
                lines += [f"          {line}" for line in more]
                continue
            lines.append(f"  FAIL  {name}: {result.problem}")
            for item in result.evidence:
                lines += [f"          {line}" for line in str(item).splitlines()]
            lines.append(f"          fix: {result.fix}")
        return "\n".join(lines)
