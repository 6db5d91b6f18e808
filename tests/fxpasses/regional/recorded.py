"""A CUDA graph simulated by a dispatch mode: record what a call does to memory, and repeat it without Python.

Operators are recorded with the tensors that they read and wrote. :meth:`Recording.replay` calls them on these
same tensors, and writes their results where they were written before. Like the kernels of a CUDA graph, a
replay sees only the memory of the inputs. A number that Python read from a tensor, or an input read from
another place, shows as a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxpasses.regional.compiled_region import table

_FORWARD = (torch.ops.fxpasses.region_forward.default, torch.ops.fxpasses.region_forward_random.default)
_BACKWARD = torch.ops.fxpasses.region_backward.default
_WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Recording(TorchDispatchMode):
    """Records the operators of a block, those inside of regions, too.

    Attributes:
        calls: each with its arguments and results, which stay where they are.
        waits: names of those that wait for the device: a number, or a size, is read from it.
        regions: how many calls of regions there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, list[torch.Tensor]]] = []
        self.waits: list[str] = []
        self.regions = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let Dynamo call compiled code under this mode, too."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FORWARD or func is _BACKWARD:
            self.regions += 1
            key, tensors, sizes = args
            with self:
                run = table[key].run_backward if func is _BACKWARD else table[key].run_forward
                return run(list(tensors), sizes)
        if any(tag in func.tags for tag in _WAITS):
            self.waits.append(str(func))
        results = func(*args, **kwargs)
        read = {
            t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        made = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor)]
        views = any(t.untyped_storage().data_ptr() in read for t in made)
        if not views or func._schema.is_mutable:
            self.calls.append((func, args, kwargs, [] if views else made))
        return results

    def replay(self) -> None:
        """Do it again, on what is in the memory of the inputs now."""
        with torch.no_grad():
            for func, args, kwargs, made in self.calls:
                results = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, torch.Tensor)]
                for place, value in zip(made, results, strict=False):
                    place.copy_(value)
