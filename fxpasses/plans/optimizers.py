"""Optimizers of torch: what a plan of their ``step`` asks of them, and their state, which is made before the first step.

What an optimizer holds of its parameters (their options, which a scheduler changes, and their state, which the first step makes) is seen where
traced code may read it alone: a function that calls ``step`` leaves that to ``step``, which is always a frame of its own.
"""

from __future__ import annotations

import inspect
import logging
import os
import types
from collections.abc import Sequence
from typing import Any

import torch

from fxpasses.plans.code import attribute_names, global_names, strings_of
from fxpasses.plans.origin import OF_TORCH

log = logging.getLogger(__name__)

OF_PARAMETERS = frozenset({"state", "param_groups"})
"""The attributes of an optimizer that hold something of each parameter."""
_CALLED = "_opt_called"
"""What a scheduler has ``step`` write on its optimizer, and asks for in Python."""
_HOME = os.path.join(OF_TORCH, "optim", "")


def lasting_parts(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer that belong to no parameter."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in OF_PARAMETERS and name != _CALLED
    }


def parts_of_parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The values of the others."""
    return [value for name, value in vars(optimizer).items() if name in OF_PARAMETERS]


def may_read_parts(codes: Sequence[types.CodeType]) -> bool:
    """Whether code that was traced may read what an optimizer holds of its parameters."""
    for code in codes:
        names = {*attribute_names(code), *strings_of(code)}
        anything = not _is_of_torch(code) and (
            "__dict__" in names or not {"getattr", "vars"}.isdisjoint(global_names(code))
        )
        if anything or not OF_PARAMETERS.isdisjoint(names):
            return True
    return False


def steps_inside(model: Any, codes: Sequence[types.CodeType]) -> bool:
    """Whether a function that is no ``step`` of torch's has one traced as part of it: Dynamo makes the state while it traces."""
    return not _is_step(_code_of(model)) and any(map(_is_step, codes))


def make_state(model: Any, args: Sequence[Any]) -> None:
    """Make the state of an optimizer whose ``step`` is about to run, as Dynamo does when it traces it: what was compiled takes it as it finds it.

    Args:
        model: the function that is called; anything but a ``step`` of torch's, or what that goes on with, is left alone.
        args: what it is called with.
    """
    if not _is_step(_code_of(model)):
        return
    for optimizer in args:
        if isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "_init_group"):
            try:
                _initialize(optimizer)
            except Exception as error:  # noqa: BLE001  (the step itself raises it again)
                log.debug("the state of an optimizer is not made: %s", error)


def _initialize(optimizer: Any) -> None:
    lists = len(inspect.signature(optimizer._init_group).parameters) - 1
    for group in optimizer.param_groups:
        # As Dynamo has it: a new state on a GPU counts its steps there.
        new = "capturable" in group and all(p.is_cuda and p not in optimizer.state for p in group["params"])
        before = group.get("capturable")
        try:
            if new:
                group["capturable"] = True
            optimizer._init_group(group, *([] for _ in range(lists)))
        finally:
            if new:
                group["capturable"] = before


def _code_of(model: Any) -> types.CodeType | None:
    code: types.CodeType | None = getattr(model, "__code__", None)
    return code


def _is_step(code: types.CodeType | None) -> bool:
    return (
        code is not None
        and (code.co_name == "step" or code.co_name.startswith("torch_dynamo_resume_in_step_"))
        and _is_of_torch(code)
    )


def _is_of_torch(code: types.CodeType) -> bool:
    return os.path.realpath(code.co_filename).startswith(_HOME)
