"""``torch._dynamo``: its settings, its backends and what it compiles frames with."""

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
    """Whether Dynamo has looked at any code since it was reset: then some may have compiled code."""
    return bool(convert_frame.input_codes.seen)


def codes_seen() -> list[CodeType]:
    """The code objects that Dynamo has looked at."""
    return [code for reference in convert_frame.input_codes.seen if (code := reference()) is not None]


def code_that_compiles() -> CodeType | None:
    """The code of the frame that Dynamo compiles in this thread; None outside of a compilation."""
    try:
        return InstructionTranslator.current_tx().f_code  # type: ignore[no-any-return]
    except AttributeError:
        return None


def custom_ops_profiles() -> object | None:
    """The operator profiles that draft export collected, if it is running."""
    return getattr(config, "_custom_ops_profile", None)


compile_session: Any = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)
"""Sets what ``torch.compiler.is_compiling()`` answers; versions without it have no flag that asks for it."""
