"""Settings, in one object that can be patched for the length of a ``with`` block."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass
class Config:
    """Settings of capturing and running backward passes.

    >>> from compiled_autograd import config
    >>> with config.patch(verbose=True):
    ...     config.verbose
    True
    >>> config.verbose
    False
    """

    verbose: bool = False
    """Log every cache hit and miss with its reason, node names and the graph's code
    (logger ``compiled_autograd``; ``TORCH_LOGS="compiled_autograd_verbose"`` does the same)."""

    fallback: bool = True
    """Run in eager what cannot be captured. Off: raise `RefusedError` instead."""

    lower: bool = True
    """Hand ATen graphs of the segments between Python calls to ``torch.compile`` objects and backends.
    Off: they run the captured graph as it is."""

    cudagraphs: bool = False
    """Move the 0-dim CPU tensors of scalar operands to the GPU, so that a compiled pass can be a CUDA graph.
    Also done where Inductor's own CUDA graphs are switched on."""

    max_nested_captures: int = 8
    """How deep backward passes inside backward passes are captured; deeper ones run in eager."""

    keep_records: int = 64
    """How many captures are remembered for cache-miss reasons and for ``explain``."""

    keep_nodes: int = 1_000_000
    """How many autograd nodes all captured graphs may have together. When they have more, all are forgotten at the
    next pass, and captured again where they are met again."""

    @contextlib.contextmanager
    def patch(self, **changes: Any) -> Iterator["Config"]:
        """Change settings for the length of a ``with`` block; an unknown name raises ``AttributeError``."""
        known = {field.name for field in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise AttributeError(
                    f"config has no setting {name!r}; settings are {', '.join(sorted(known))}"
                )
        before = {name: getattr(self, name) for name in changes}
        try:
            for name, value in changes.items():
                setattr(self, name, value)
            yield self
        finally:
            for name, value in before.items():
                setattr(self, name, value)


config = Config()
