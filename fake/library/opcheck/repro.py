"""A script that repeats one failed check."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

__all__ = ["generate_repro"]


def generate_repro(
    test: str, op: Any, args: Any, kwargs: Any, *, save_data: bool, dry_run: bool = False
) -> str:
    """The text of a script that runs check ``test`` on ``op``.

    Args:
        test: the name of the check.
        op: the overload.
        args: positional arguments of the sample.
        kwargs: keyword arguments of the sample.
        save_data: store the arguments under the system's temporary directory, in ``opcheck_repros`` (delete it when you are
            done), and make the script load them.
        dry_run: write the text only.
    """
    if save_data:
        folder = Path(tempfile.gettempdir()) / "opcheck_repros"
        path = folder / f"repro_{time.time_ns()}.pt"
        if not dry_run:
            folder.mkdir(exist_ok=True)
            torch.save((args, kwargs), path)
        data = f'args, kwargs = torch.load("{path}")'
    else:
        data = (
            "# Run the test again with PYTORCH_OPCHECK_PRINT_BETTER_REPRO=1 to have the arguments saved here\n"
            "args = ()  # args to the operator\n"
            "kwargs = {}  # kwargs to the operator"
        )
    namespace, name = op._schema.name.split("::")
    line = "# ========================================================="
    return f"""\
{line}
# BEGIN REPRO SCRIPT
{line}
import torch
from fake.library import opcheck

# Import or load the library that defines the operator
op = torch.ops.{namespace}.{name}.{op._overloadname}

{data}
opcheck(op, args, kwargs, test_utils="{test}")
{line}
# END REPRO SCRIPT
{line}
"""
