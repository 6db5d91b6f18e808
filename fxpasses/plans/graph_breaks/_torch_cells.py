"""Private torch names for rewriting code: free variables that become parameters."""

from __future__ import annotations

import types
from collections.abc import Collection, Sequence
from typing import Any

from torch._dynamo.bytecode_transformation import create_instruction, transform_code_object


def with_parameters(code: types.CodeType, filled: Sequence[str], closure: Collection[str]) -> types.CodeType:
    """Turn the code's free variables into its own variables, which functions inside it share.

    Args:
        code: takes positional arguments only.
        filled: the free variables that become parameters, after its own. The others have no value at first.
        closure: the free variables that stay.
    """

    def change(instructions: list[Any], options: dict[str, Any]) -> None:
        first = options["co_argcount"]
        free = options["co_freevars"]
        own = tuple(name for name in free if name not in closure)
        names = [
            name for name in options["co_varnames"] if name not in own
        ]  # the frame's code had some of them there
        stay = tuple(name for name in free if name in closure)
        options["co_varnames"] = (*names[:first], *filled, *names[first:])
        options["co_argcount"] = first + len(filled)
        options["co_cellvars"] = (*options["co_cellvars"], *own)
        options["co_freevars"] = stay
        rest = [i for i in instructions if i.opname != "COPY_FREE_VARS"]
        cells = [create_instruction("MAKE_CELL", argval=name) for name in own]
        free_vars = [create_instruction("COPY_FREE_VARS", arg=len(stay))] if stay else []
        instructions[:] = [*free_vars, *cells, *rest]

    changed, _ = transform_code_object(code, change)
    return changed
