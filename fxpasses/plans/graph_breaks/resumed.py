"""Resume functions, which Dynamo generates for a frame to continue with after a graph break."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

from fxpasses.plans.objects.code import global_accesses

Cells = tuple[types.CellType, ...]
RESUME_PREFIX = "__resume_at"
"""The prefix of such functions' names among the globals of a frame."""


@dataclass(frozen=True)
class ResumeFunction:
    """One such function.

    Attributes:
        code: its own code.
        values: its globals.
        closure: the names of variables in the frame's own closure. Other free variables are cells that each
            call of the frame makes.
        filled: maps names of these that have a value when the function begins to its code with these as
            parameters.
    """

    code: types.CodeType
    values: dict[str, Any]
    closure: tuple[str, ...]
    filled: dict[tuple[str, ...], types.CodeType] = field(default_factory=dict)

    def function(self, cells: Cells = (), code: types.CodeType | None = None) -> types.FunctionType:
        """Make the function, named like its code: its own name would have a number of the process.

        Args:
            cells: for its free variables.
            code: replaces its own.
        """
        return types.FunctionType(code or self.code, self.values, self.code.co_name, None, cells)


def resume_functions(code: types.CodeType, function: types.FunctionType) -> dict[str, ResumeFunction]:
    """What a frame resumes with, by the names of globals that Dynamo chose.

    Args:
        code: what Dynamo wrote for the frame.
        function: whose frame it is.
    """
    found = {}
    for name in dict.fromkeys(name for _, name in global_accesses(code) if name.startswith(RESUME_PREFIX)):
        value = function.__globals__.get(name)
        if not isinstance(value, types.FunctionType):
            continue
        own, values = value.__code__, value.__globals__
        for cell in value.__closure__ or ():
            # If there are free variables, Dynamo's function takes their cells and makes the resume function.
            if isinstance(cell.cell_contents, types.CodeType):
                own = cell.cell_contents
            elif isinstance(cell.cell_contents, dict):
                values = cell.cell_contents
        if own.co_name.startswith("torch_dynamo_resume_in"):
            found[name] = ResumeFunction(own, values, function.__code__.co_freevars)
    return found
