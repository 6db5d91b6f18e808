"""Settings, in one object that can be patched for the duration of a ``with`` block."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from fake.wrong_arguments import check_type


@dataclasses.dataclass
class Config:
    """Settings for capturing and running backward passes.

    >>> from compiled_autograd import config
    >>> with config.patch(verbose=True):
    ...     config.verbose
    True
    >>> config.verbose
    False
    """

    verbose: bool = False
    """Log every cache hit, every cache miss with its reason, node names and the graph's code
    (logger ``compiled_autograd``; ``TORCH_LOGS="compiled_autograd_verbose"`` does the same)."""

    fallback: bool = True
    """Run a pass that cannot be captured in eager. If off, raise `RefusedError` instead."""

    lower: bool = True
    """Give ``torch.compile`` objects and backends ATen graphs of the segments between Python calls.
    If off, they get the captured graph unchanged."""

    cudagraphs: bool = False
    """Move 0-dim CPU tensors of scalar operands to the GPU, so that a compiled pass can be a CUDA graph.
    This also happens if Inductor's own CUDA graphs are enabled."""

    max_nested_captures: int = 8
    """How many levels of nested backward passes are captured. Deeper ones run in eager."""

    keep_records: int = 64
    """How many captures are kept for cache-miss reasons and for ``explain``."""

    keep_nodes: int = 1_000_000
    """How many autograd nodes all captured graphs may have in total. When the total is larger, the next pass
    discards all graphs, which are captured again when needed."""

    def __setattr__(self, name: str, value: Any) -> None:
        self._check(name, value)
        super().__setattr__(name, value)

    def _check(self, name: str, value: Any) -> None:
        kinds = {field.name: field.type for field in dataclasses.fields(self)}
        if name not in kinds:
            raise AttributeError(f"config has no setting {name!r}; settings are {', '.join(sorted(kinds))}")
        if kinds[name] is bool:
            check_type("config", name, value, bool, "True or False")
        else:
            check_type(
                "config",
                name,
                value,
                lambda given: type(given) is int and given >= 0,
                "an integer, 0 or more",
            )

    @contextlib.contextmanager
    def patch(self, **changes: Any) -> Iterator["Config"]:
        """Change settings for the duration of a ``with`` block.

        Raises:
            AttributeError: if there is no setting of that name, as for a plain assignment.
            ArgumentTypeError: if a value has the wrong type, as for a plain assignment.
        """
        for name, value in changes.items():
            self._check(name, value)
        before = {name: getattr(self, name) for name in changes}
        try:
            for name, value in changes.items():
                setattr(self, name, value)
            yield self
        finally:
            for name, value in before.items():
                setattr(self, name, value)


config = Config()
