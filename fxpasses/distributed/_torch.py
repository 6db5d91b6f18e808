"""What this folder uses of torch's private names: process groups by name, their store, and the graphs that Inductor lowers."""

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
    """Within, this process is rank 0 of so many, and collectives do nothing."""
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
    """Within, ``seen`` is told each graph that Inductor lowers in this thread, as its own passes have left it; graphs inside not."""

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


def nothing_drawn() -> AbstractContextManager[None]:
    """Within, ``trunc_normal_`` leaves tensors as they are: fake ones have no values to draw again until they fit."""
    return LEDGER.using((_TRUNCATED, lambda tensor, *_, **__: tensor))


_SWAP = LEDGER.thread_patch(
    torch.utils,
    "swap_tensors",
    lost="simulations of models that are converted to another type or device as they are made (`model.bfloat16()`)",
)


def converted_in_place() -> AbstractContextManager[None]:
    """Within, ``Module.to`` and the like give fake parameters their new type: torch would swap tensors, and not those to which there are weak references, as a fake mode has."""

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
    """Within, a device mesh is made of real tensors, in fake modes, too: it looks at their values."""

    def init(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with disable_current_modes():
            _MESH.torchs(self, *args, **kwargs)

    return LEDGER.using((_MESH, init))


def goes_on(code: CodeType) -> tuple[str, int]:
    """The name of a function, and where in its code it begins: one that goes on behind a graph break holds the whole code that broke, and jumps into it.

    Dynamo makes such functions of the first code. Of one that a plan has kept, it does not know that, and makes one inside of the other.
    """
    name, start, marks = code.co_name, 0, 0
    if name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX):
        # Dynamo's prologue sets a variable at its begin and right before it jumps. Behind it is the code that broke, which may have such a prologue.
        for instruction in dis.get_instructions(code):
            marks += instruction.argval == IS_TRACING_RESUME_PROLOGUE_VARNAME
            if marks == 2 and instruction.opcode in dis.hasjrel:
                start = instruction.argval
                break
    while name.startswith(f"{TORCH_DYNAMO_RESUME_IN_PREFIX}_{TORCH_DYNAMO_RESUME_IN_PREFIX}_"):
        inner, _, line = name.removeprefix(f"{TORCH_DYNAMO_RESUME_IN_PREFIX}_").rpartition("_at_")
        name = f"{inner.rpartition('_at_')[0]}_at_{line}"
    return name, start
