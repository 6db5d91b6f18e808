"""The public functions ``enable``, ``disable``, ``reset`` and ``stats``."""

import contextlib
from collections.abc import Iterator
from typing import Any

from compiled_autograd import _torch
from compiled_autograd.engine import CapturingEngine
from compiled_autograd.runtime import late_hooks, queries
from compiled_autograd.runtime.running import running
from compiled_autograd.session import traced_hooks
from compiled_autograd.session.compilers import as_compiler
from compiled_autograd.session.fallback import is_unknown_torch
from compiled_autograd.session.session import Session, sessions
from compiled_autograd.session.walking import walks
from compiled_autograd.stats import Stats
from fake.seam.patches import LEDGER, When
from fake.seam.skipped_frames import skipped_frames
from fake.wrong_arguments import check_dynamic

LEDGER.add(
    *_torch.session_patches(
        engine=CapturingEngine,
        current_graph_task_id=queries.current_graph_task_id,
        current_autograd_node=queries.current_autograd_node,
        keeps_graph=queries.keeps_graph,
        execution_order=queries.current_graph_task_execution_order,
        will_execute=queries.will_execute,
        push_saved_hooks=queries.push_saved_hooks,
        pop_saved_hooks=queries.pop_saved_hooks,
        register_hook=late_hooks.register_hook,
        register_post_accumulate_grad_hook=late_hooks.register_post_accumulate_grad_hook,
        register_node_hook=late_hooks.register_node_hook,
        remove_hook=queries.remove_hook,
        set_autograd_compiler=walks.set_by_torch,
        clear_cache=walks.cleared_by_torch,
        trace_tensor_hook=traced_hooks.trace_tensor_hook,
        trace_module_hooks=traced_hooks.trace_module_hooks,
    ),
    skipped_frames("compiled_autograd", When.SESSION),
)


@contextlib.contextmanager
def enable(compiler_fn: Any, dynamic: bool = True) -> Iterator[None]:
    """Capture, compile and run every backward pass that this thread starts inside the ``with`` block.

    ``compiler_fn`` is one of

    - a function that takes one `torch.fx.GraphModule` and returns a callable with the same arguments. It gets
      each captured graph as a whole. If it returns ``torch.compile(graph, ...)``, the segments of the graph
      between calls of user code are compiled with those settings, and user code runs unchanged;
    - a function of (GraphModule, example inputs), as for ``torch.compile(backend=...)``, or the name of such
      a backend. It gets those segments as flat ATen graphs.

    With ``dynamic``, every size is symbolic from the first capture on, so passes with other sizes are cache
    hits. Without it, a size becomes symbolic when it changes, which costs one more capture.

    Blocks nest; the innermost wins. What cannot be captured runs in eager (see ``stats().fallback_reasons``).

    Raises:
        InvalidCompilerError: if ``compiler_fn`` is none of these. Nothing is enabled in that case.
        ArgumentTypeError: if ``dynamic`` is not True, False or None (None means False).

    >>> import torch, compiled_autograd
    >>> x = torch.ones(3, requires_grad=True)
    >>> with compiled_autograd.enable(lambda graph: graph):
    ...     (x * x).sum().backward()
    >>> x.grad
    tensor([2., 2., 2.])
    """
    check_dynamic("enable", dynamic)
    session = Session(as_compiler(compiler_fn), bool(dynamic))
    if is_unknown_torch():
        yield
        return
    with sessions.entered(session):
        yield


@contextlib.contextmanager
def disable() -> Iterator[None]:
    """Run this thread's backward passes in eager inside the ``with`` block."""
    with sessions.entered(None):
        yield


def reset() -> None:
    """Discard all captured graphs, their compiled code, and all counts.

    Raises:
        RuntimeError: if called inside a captured backward pass.
    """
    if running.captured() is not None:
        raise RuntimeError("compiled_autograd.reset() inside a backward pass would free the graph that runs")
    walks.forget_graphs()
    sessions.records.clear()
    _torch.free_compilation_stacks()


def stats() -> Stats:
    """Return counts and seconds since the last `reset`: captures, hits, compiles, fallbacks with reasons."""
    return sessions.records.stats()
