"""``torch._dynamo``: its settings, its backends, and the machinery that compiles frames."""

from __future__ import annotations

import contextlib
from types import CodeType
from typing import Any

import torch
from torch._dynamo import config, convert_frame
from torch._dynamo.backends import registry
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import skip_code as skip_code
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, TorchDynamoException as DynamoError
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters, dynamo_timed, get_metrics_context
from torch._dynamo.variables import builder
from torch._dynamo.variables.lazy import LazyVariableTracker as LazyVariableTracker
from torch._dynamo.variables.tensor import TensorVariable

from fake.seam.eval_frame import reset_code as reset_code


def has_seen_frames() -> bool:
    """Return whether Dynamo has seen any code since it was reset: some of it may have compiled code."""
    return bool(convert_frame.input_codes.seen)


def codes_seen() -> list[CodeType]:
    """Return the code objects that Dynamo has seen."""
    return [code for reference in convert_frame.input_codes.seen if (code := reference()) is not None]


def code_that_compiles() -> CodeType | None:
    """Return the code of the frame that Dynamo is compiling in this thread; None outside of a compilation."""
    try:
        return InstructionTranslator.current_tx().f_code  # type: ignore[no-any-return]
    except AttributeError:
        return None


def custom_ops_profiles() -> object | None:
    """Return the operator profiles that draft export has collected, if it is running."""
    return getattr(config, "_custom_ops_profile", None)


compile_session: Any = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)
"""Sets what ``torch.compiler.is_compiling()`` returns; versions without it have no flag that requires it."""
