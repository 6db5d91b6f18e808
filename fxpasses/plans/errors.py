"""Errors of plans."""

from __future__ import annotations

from fxpasses.errors import FxPassesError


class NoPlan(Exception):
    """A plan cannot cover something. The compilation continues without one.

    Attributes:
        reason: what, in words that are the same for every program, so that they can be counted.
        where: the attribute, file or name.
    """

    def __init__(self, reason: str, where: str = "") -> None:
        super().__init__(f"{reason}{': ' if where else ''}{where}")
        self.reason, self.where = reason, where


class PlanFileError(FxPassesError):
    """A plan file cannot be used: it is damaged, of another format, or not trusted.

    Attributes:
        path: the file.
        problem: what is wrong with it.
        is_untrusted: whether the only problem is who may write to it.
    """

    def __init__(self, path: object, problem: str, *, is_untrusted: bool = False) -> None:
        super().__init__(f"{path}: {problem}")
        self.path, self.problem, self.is_untrusted = path, problem, is_untrusted


class PlanMismatchError(FxPassesError):
    """A saved plan does not fit the model, the call or the machine.

    Attributes:
        path: the file.
        factor: what differs.
        saved: its value when the plan was made, as text.
        found: its value now.
    """

    def __init__(self, path: object, factor: str, saved: str, found: str) -> None:
        super().__init__(f"{path}: {factor}: {saved} when the plan was made, {found} now")
        self.path, self.factor, self.saved, self.found = path, factor, saved, found
