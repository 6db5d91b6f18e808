"""Private torch names of optimizers: what a plan of ``step`` checks, and the state, which is made before the
first step.

What an optimizer holds of its parameters (their options, which a scheduler changes, and their state, which
the first step makes) is walked only where traced code may read it. A function that calls ``step`` leaves that
to ``step``, which is a frame of its own.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import types
from collections.abc import Sequence
from typing import Any

import torch

from fxpasses.plans.objects.code import attribute_names, global_names, strings_of
from fxpasses.plans.objects.origin import TORCH_FOLDER

log = logging.getLogger(__name__)

Option = tuple[int, str]
"""The number of a parameter group, and the name of a float among its options."""
GROUPS = "param_groups"
PARAMETER_ATTRIBUTES = frozenset({"state", GROUPS})
"""The attributes of an optimizer that hold something for each parameter."""
_STEP_CALLED = "_opt_called"
"""What a scheduler makes ``step`` write on its optimizer, and reads in Python."""
_OPTIM_FOLDER = os.path.join(TORCH_FOLDER, "optim", "")


def non_parameter_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer that belong to no parameter."""
    return {k: v for k, v in vars(optimizer).items() if k not in PARAMETER_ATTRIBUTES and k != _STEP_CALLED}


def current_option(group: dict[str, Any], name: str) -> float | None:
    """The option ``name`` of ``group``, if a graph with a symbol in its place holds for it."""
    value = group.get(name)
    return value if type(value) is float and math.isfinite(value) else None


def may_read_parameters(codes: Sequence[types.CodeType]) -> bool:
    """Whether traced code may read what an optimizer holds of its parameters."""
    for code in codes:
        names = {*attribute_names(code), *strings_of(code)}
        dynamic = "__dict__" in names or not {"getattr", "vars"}.isdisjoint(global_names(code))
        if not PARAMETER_ATTRIBUTES.isdisjoint(names) or (dynamic and not _is_optimizer_code(code)):
            return True
    return False


def is_optimizer_step(code: types.CodeType | None) -> bool:
    """Whether code is ``step`` of one of torch's optimizers, or a resume function of it."""
    return (
        code is not None
        and (code.co_name == "step" or code.co_name.startswith("torch_dynamo_resume_in_step_"))
        and _is_optimizer_code(code)
    )


def init_optimizer_state(optimizers: Sequence[Any]) -> None:
    """Make the state of optimizers whose ``step`` is about to run, as Dynamo does when it traces ``step``.
    Compiled code expects it to exist."""
    for optimizer in optimizers:
        try:
            lists = len(inspect.signature(optimizer._init_group).parameters) - 1
            for group in optimizer.param_groups:
                _init_group_state(optimizer, group, [[] for _ in range(lists)])
        except Exception as error:  # noqa: BLE001  (the step itself raises it again)
            log.debug("the state of an optimizer is not made: %s", error)


def _init_group_state(optimizer: Any, group: dict[str, Any], lists: list[list[Any]]) -> None:
    # As in Dynamo: a new state on a GPU counts its steps there.
    on_device = "capturable" in group and all(p.is_cuda and p not in optimizer.state for p in group["params"])
    before = group.get("capturable")
    try:
        if on_device:
            group["capturable"] = True
        optimizer._init_group(group, *lists)
    finally:
        if on_device:
            group["capturable"] = before


def _is_optimizer_code(code: types.CodeType) -> bool:
    return os.path.realpath(code.co_filename).startswith(_OPTIM_FOLDER)
