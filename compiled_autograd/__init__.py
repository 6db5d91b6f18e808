"""The backward pass as one graph."""

from compiled_autograd.api import disable, enable, reset, stats
from compiled_autograd.config import config

__all__ = ["config", "disable", "enable", "reset", "stats"]
