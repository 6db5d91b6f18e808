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
from fxpasses.plans.graph_breaks._torch_frames import skipped_by_dynamo


def is_compiled(model: object) -> bool:
    """Whether the model is already the result of ``torch.compile``, which cannot be compiled again."""
    compiled = isinstance(model, OptimizedModule) or hasattr(model, "_torchdynamo_orig_callable")
    return compiled or getattr(model, "_compiled_call_impl", None) is not None


def is_profiling() -> bool:
    """Whether the user is profiling. The profiler that measures memory would end that profile."""
    return torch.autograd._profiler_enabled()  # type: ignore[attr-defined,no-any-return]


_LOG_LEVEL = "KINETO_LOG_LEVEL"


@contextlib.contextmanager
def _silence_profiler() -> Iterator[None]:
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
    with _silence_profiler(), profile(profile_memory=True) as recorded:
        step()
    results = recorded.kineto_results
    events = [e for e in results.events() if e.name() == "[memory]"] if results is not None else []
    allocated = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


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
    storage_uses = torch._C._storage_Use_Count(storage._cdata) - 1  # not counting `storage`
    tensor_uses = value._use_count()  # type: ignore[attr-defined]
    if storage_uses > 1 or tensor_uses > 1 or not storage.resizable():
        return None
    try:
        return torch._lazy_clone(value.detach())
    except RuntimeError:  # memory that is not torch's own
        return None


def watch_backward(inputs: Sequence[Any], on_error: Callable[[Exception], None]) -> Callable[[Any], bool]:
    """Report errors of a compiled graph's backward pass, including errors of compiling it.

    Errors of how the pass is called are not reported.

    Args:
        inputs: the inputs of a call of the graph that follows.
        on_error: is called with the error.

    Returns:
        a function of the call's results, which says whether there is such a pass.
    """
    before = set(_grad_fns(inputs))

    def watch(outputs: Any) -> bool:
        pending, seen = [*_grad_fns((*outputs, *inputs))], set(before)
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            function = function_of(node)
            if hasattr(function, "_backward_impl"):
                function._backward_impl = staticmethod(
                    _report_errors(function, function._backward_impl, on_error)
                )
                return True
            pending += [next_node for next_node, _ in node.next_functions if next_node is not None]
        return len(seen) > len(before)

    return watch


def _grad_fns(values: Iterable[Any]) -> list[Any]:
    return [v.grad_fn for v in values if isinstance(v, Tensor) and v.grad_fn is not None]


def _report_errors(
    function: Any, run: Callable[..., Any], on_error: Callable[[Exception], None]
) -> Callable[..., Any]:
    def watched(ctx: Any, all_args: list[Any]) -> Any:
        try:
            return run(ctx, all_args)
        except Exception as error:
            if not (keeps_graph() and function.metadata.bw_donated_idxs):  # else retain_graph is invalid
                on_error(error)
            raise

    return skipped_by_dynamo(watched)  # in a compiled function, the backward pass runs after a graph break
