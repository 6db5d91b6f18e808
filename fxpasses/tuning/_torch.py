"""Private names of torch that tuning relies on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import OptimizedModule
from torch.autograd.profiler import profile

from fake.seam.autograd_engine import function_of, keeps_graph
from fxpasses.plans._torch import storage_address
from fxpasses.plans._torch_frames import skipped_by_dynamo


def is_compiled(model: object) -> bool:
    """Whether the model is already the result of ``torch.compile``, which cannot be compiled again."""
    compiled = isinstance(model, OptimizedModule) or hasattr(model, "_torchdynamo_orig_callable")
    return compiled or getattr(model, "_compiled_call_impl", None) is not None


def is_profiling() -> bool:
    """Whether the user is profiling. The profiler that measures memory would end that profile."""
    return torch.autograd._profiler_enabled()  # type: ignore[attr-defined,no-any-return]


_LOG_LEVEL = "KINETO_LOG_LEVEL"


@contextlib.contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Silence the profiler, which reports that it starts, that it stops, and that there is no GPU.

    It reads ``KINETO_LOG_LEVEL`` when it is first used.
    """
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "6"
    try:
        yield
    finally:
        os.environ.pop(_LOG_LEVEL, None)


def peak_bytes(step: Callable[[], object]) -> int:
    """Return the peak memory of tensors made inside of ``step``, as the allocators report it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with _quiet_profiler(), profile(profile_memory=True) as recorded:
        step()
    results = recorded.kineto_results
    events = [e for e in results.events() if e.name() == "[memory]"] if results is not None else []
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def element_address(value: Tensor) -> int:
    """Return the address of a tensor's first element. Args: as for ``storage_address``."""
    return storage_address(value) + int(value.storage_offset()) * value.element_size()


def lazy_copy(value: Tensor) -> Tensor | None:
    """Return a copy that shares memory with a tensor until one of them is written to, which moves that one.

    Returns ``None`` if something could write to the tensor without asking torch for a pointer: shared memory,
    a NumPy array (which keeps a storage from being resized), or DLPack (which holds the tensor, or another
    one of its memory).
    """
    storage = value.untyped_storage()
    held = torch._C._storage_Use_Count(storage._cdata) - 1  # not counting `storage`
    by_torch = value._use_count()  # type: ignore[attr-defined]
    if held > 1 or by_torch > 1 or not storage.resizable():
        return None
    try:
        return torch._lazy_clone(value.detach())
    except RuntimeError:  # memory that is not torch's own
        return None


def watch_backward(inputs: Sequence[Any], failed: Callable[[Exception], None]) -> Callable[[Any], bool]:
    """Report errors of a compiled graph's backward pass, including errors of compiling it.

    Errors of how the pass is called are not reported.

    Args:
        inputs: the inputs of a call of the graph that follows.
        failed: is called with the error.

    Returns:
        a function of the call's results, which says whether there is such a pass.
    """
    before = set(_nodes(inputs))

    def watch(outputs: Any) -> bool:
        found, seen = [*_nodes((*outputs, *inputs))], set(before)
        while found:
            node = found.pop()
            if node in seen:
                continue
            seen.add(node)
            function = function_of(node)
            if hasattr(function, "_backward_impl"):
                function._backward_impl = staticmethod(_telling(function, function._backward_impl, failed))
                return True
            found += [following for following, _ in node.next_functions if following is not None]
        return len(seen) > len(before)

    return watch


def _nodes(values: Iterable[Any]) -> list[Any]:
    return [v.grad_fn for v in values if isinstance(v, Tensor) and v.grad_fn is not None]


def _telling(
    function: Any, run: Callable[..., Any], failed: Callable[[Exception], None]
) -> Callable[..., Any]:
    def watched(ctx: Any, given: list[Any]) -> Any:
        try:
            return run(ctx, given)
        except Exception as error:
            if not (keeps_graph() and function.metadata.bw_donated_idxs):  # else retain_graph is invalid
                failed(error)
            raise

    return skipped_by_dynamo(watched)  # in a compiled function, the backward pass runs after a graph break
