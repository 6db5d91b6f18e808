"""The partitioner in the form that Inductor accepts: ``torch._inductor.config.custom_partitioner_fn``."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.fx as fx

from fxpasses.partitioner import _torch
from fxpasses.partitioner.partitioner import check_budget, partition


@dataclasses.dataclass(frozen=True)
class MinCutPartitioner(_torch.CustomPartitionerFn):
    """`partition` with a fixed memory budget, and a cache key for Inductor.

    >>> import torch
    >>> with torch._inductor.config.patch(custom_partitioner_fn=MinCutPartitioner(memory_budget=0.5)):
    ...     compiled = torch.compile(torch.nn.Linear(4, 4))

    Raises:
        PartitionOptionError: if the budget is not between 0 and 1.
    """

    memory_budget: float | None = 1.0

    def __post_init__(self) -> None:
        check_budget("memory_budget", self.memory_budget)

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return partition(gm, joint_inputs, memory_budget=self.memory_budget, **kwargs)

    def uuid(self) -> tuple[str, float | None, bytes]:
        """The partition's cache key: this package's code and the budget."""
        return ("fxpasses.partition", self.memory_budget, _code_hash())


@functools.cache
def _code_hash() -> bytes:
    files = sorted(str(path) for path in Path(__file__).parent.glob("*.py"))
    return _torch.get_hash_for_files(tuple(files))
