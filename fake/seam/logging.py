"""``torch._logging``: which of torch's logs are on."""

from __future__ import annotations

import torch

log_state = torch._logging._internal
"""The module that holds what is on; its names are bound anew when somebody turns a log on."""


def structured_log_is_on() -> bool:
    """Whether graphs and guards are written to torch's structured log."""
    return bool(log_state.GET_DTRACE_STRUCTURED or log_state.trace_log.handlers)
