"""Private torch names used here: process groups by name, their store, and graphs that Inductor lowers."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.resume_execution import IS_TRACING_RESUME_PROLOGUE_VARNAME, TORCH_DYNAMO_RESUME_IN_PREFIX
from torch.distributed.device_mesh import DeviceMesh

from fake.seam.dispatch import disable_current_modes
from fake.seam.dynamo import code_that_compiles
from fake.seam.fake_tensor import FakeTensor
from fake.seam.inductor import GraphLowering
from fake.seam.patches import LEDGER


@contextmanager
def silent_process_group(ranks: int) -> Iterator[None]:
    """Inside, this process is rank 0 of ``ranks``, and collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


_RUN = LEDGER.thread_patch(
    GraphLowering, "run", lost="ranks that differ because Inductor moved collectives in one of them"
)


def lowered_graphs(seen: Callable[[fx.Graph], None]) -> AbstractContextManager[None]:
    """Inside, ``seen`` gets each graph that Inductor lowers in this thread, after its passes; none nested."""

    def run(self: GraphLowering, *args: Any) -> Any:
        if type(self) is GraphLowering:
            seen(self.graph)
        return _RUN.torchs(self, *args)

    return LEDGER.using((_RUN, run))


_TRUNCATED = LEDGER.thread_patch(
    torch.nn.init,
    "_no_grad_trunc_normal_",
    lost="simulations of models that are initialized with truncated normals: drawing them looks at values",
)


def skip_trunc_normal() -> AbstractContextManager[None]:
    """Inside, ``trunc_normal_`` is a no-op: it redraws values until they fit, and fake tensors have none."""
    return LEDGER.using((_TRUNCATED, lambda tensor, *_, **__: tensor))


_SWAP = LEDGER.thread_patch(
    torch.utils,
    "swap_tensors",
    lost="simulations of models that are converted to another type or device as they are made (`model.bfloat16()`)",
)


def convert_fakes_in_place() -> AbstractContextManager[None]:
    """Inside, ``Module.to`` and the like convert fake parameters in place.

    Torch would swap tensors, but not those with weak references, which a fake mode holds.
    """

    def swap(a: torch.Tensor, b: torch.Tensor) -> None:
        if isinstance(a, FakeTensor) and isinstance(b, FakeTensor):
            a.data = b.data
        else:
            _SWAP.torchs(a, b)

    return LEDGER.using((_SWAP, swap))


_MESH = LEDGER.thread_patch(
    DeviceMesh,
    "__init__",
    lost="simulations of fully sharded models that are tensor parallel: the mesh of both looks up its ranks in a tensor",
)


def real_meshes() -> AbstractContextManager[None]:
    """Inside, device meshes use real tensors even in fake modes: a mesh reads their values."""

    def init(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with disable_current_modes():
            _MESH.torchs(self, *args, **kwargs)

    return LEDGER.using((_MESH, init))


def original_name_and_start(code: CodeType) -> tuple[str, int]:
    """Return the name of a function, and where its own code begins.

    A function that resumes after a graph break contains all the code that broke, and jumps into it. Dynamo
    makes such functions from the original code. For one restored from a plan it does not know that, and nests
    one in the other.
    """
    name, start, marks = code.co_name, 0, 0
    if name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX):
        # Dynamo's prologue sets a variable at its start and right before it jumps. The code after it may have
        # another such prologue.
        for instruction in dis.get_instructions(code):
            marks += instruction.argval == IS_TRACING_RESUME_PROLOGUE_VARNAME
            if marks == 2 and instruction.opcode in dis.hasjrel:
                start = instruction.argval
                break
    while name.startswith(f"{TORCH_DYNAMO_RESUME_IN_PREFIX}_{TORCH_DYNAMO_RESUME_IN_PREFIX}_"):
        inner, _, line = name.removeprefix(f"{TORCH_DYNAMO_RESUME_IN_PREFIX}_").rpartition("_at_")
        name = f"{inner.rpartition('_at_')[0]}_at_{line}"
    return name, start
