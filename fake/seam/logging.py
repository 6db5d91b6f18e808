"""``torch._logging``: which of torch's logs are enabled."""

from __future__ import annotations

import torch

log_state = torch._logging._internal
"""The module that holds the state of the logs; its names are rebound when a log is turned on."""


def structured_log_is_on() -> bool:
    """Return whether graphs and guards are written to torch's structured log."""
    return bool(log_state.GET_DTRACE_STRUCTURED or log_state.trace_log.handlers)
