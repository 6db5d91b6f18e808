"""Process-wide state while C++ walks the nodes of a pass: its hook and its cache of graphs.

`Walks` sets and restores this state, and holds one lock meanwhile. Threads with other backward passes wait
for a walk, which runs no user code, but never for a whole pass. C++ refuses a pass of another thread that
starts during a walk.

C++ leaks a reference to everything that a capture returns to it. So it gets a `Handle`, which is emptied when
graphs are discarded, and reused for a later capture.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from compiled_autograd import _torch
from compiled_autograd.config import config
from compiled_autograd.errors import StrayPassError
from compiled_autograd.session.fallback import is_concurrent_capture
from compiled_autograd.session.log import cpp_logger
from compiled_autograd.session.session import sessions
from fake.tracing.collector import collection_paused


class Handle:
    """C++'s reference to one captured graph."""

    __slots__ = ("graph", "result", "size")

    def __init__(self) -> None:
        self.graph: Any = None
        """The `CapturedGraph`, or None once it is discarded."""
        self.size = 0
        """How many autograd nodes the graph has."""
        self.result: tuple[Any, ...] = ()
        """What ``end_capture`` returns for it. C++ leaks a reference to this tuple."""

    def __call__(self, *_: Any) -> Any:
        raise AssertionError("C++ calls the runtime wrapper, which knows what to do with a handle")


class Walks:
    """The only owner of C++'s hook and cache."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread: int | None = None
        self._begun = 0
        self._pause: contextlib.ExitStack | None = None
        self._used_handles: list[Handle] = []
        self._free_handles: list[Handle] = []
        self._size = 0

    # Walking

    @contextlib.contextmanager
    def walking(self, make_recorder: Callable[[], Any], dynamic: bool) -> Iterator[Callable[[], None]]:
        """Let C++ capture this thread's passes. Yield a function that ends the walk before the block ends."""
        with self._lock:
            outer = self._thread
            if outer is None and (
                self._size > config.keep_nodes or (self._used_handles and _torch.is_cache_empty())
            ):
                self.forget_graphs()
            self._begun += 1
            self._thread = threading.get_ident()
            try:
                _torch.set_verbose_logger(cpp_logger())
                before = _torch.set_autograd_compiler(make_recorder, dynamic)
            except BaseException:
                self._thread = outer
                raise
            ended = False

            def end() -> None:
                nonlocal ended
                if not ended:
                    ended = True
                    _torch.set_autograd_compiler(*before)
                    self._thread = outer
                    self._resume_collector()
                    self._lock.release()

            self._lock.acquire()
        try:
            yield end
        finally:
            end()

    def is_walking_elsewhere(self) -> bool:
        """Whether another thread is walking."""
        return self._thread is not None and self._thread != threading.get_ident()

    def pause_collector(self) -> None:
        """Pause garbage collection until this walk ends: a capture creates thousands of lasting objects."""
        if self._pause is None:
            self._pause = contextlib.ExitStack()
            self._pause.enter_context(collection_paused())

    def _resume_collector(self) -> None:
        if self._pause is not None and self._thread is None:
            self._pause.close()
            self._pause = None

    def run_uncaptured(self, run_backward: Callable[[], Any]) -> Any:
        """Run a pass with torch's own engine. Waits while another thread walks.

        C++ checks whether its hook is set after it has released the GIL. A pass that sees the hook of another
        thread's walk is refused before anything has run, and is retried.
        """
        if self._thread == threading.get_ident():  # C++ called Python in the middle of a walk
            before = _torch.set_autograd_compiler(None, False)
            try:
                return run_backward()
            finally:
                _torch.set_autograd_compiler(*before)
        while True:
            if self.is_walking_elsewhere():
                with self._lock:
                    pass
            begun, outer = self._begun, _passes.count
            _passes.count += 1
            mine = _passes.count
            try:
                return run_backward()
            except StrayPassError:
                continue
            except NotImplementedError as error:
                # If this pass began another one, it was let in, and the refusal is not about it.
                concurrent = self._begun != begun or self.is_walking_elsewhere()
                if not (concurrent and _passes.count == mine and is_concurrent_capture(error)):
                    raise
            finally:
                _passes.count = outer

    def set_by_torch(self, compiler: Any, dynamic: bool) -> Any:
        """Replace ``set_autograd_compiler``, which torch uses to switch its own compiled autograd.

        Torch saves the hook that it finds and restores it later, so it must never find the hook of a walk.
        """
        with self._lock:
            return _torch.set_autograd_compiler(compiler, dynamic)

    def cleared_by_torch(self) -> None:
        """``clear_cache`` for ``torch._dynamo.reset()``. It must not run while C++ walks the cache."""
        with self._lock:
            _torch.clear_cache()
        _torch.free_compilation_stacks()

    # Graphs

    def handle(self, runtime_wrapper: Callable[..., Any], graph: Any, size: int) -> tuple[Any, ...]:
        """Return what to give to C++ for a graph of ``size`` autograd nodes.

        Args:
            runtime_wrapper: called by C++ with the graph and its arguments.
            graph: the captured graph.
            size: the number of its autograd nodes.

        Returns:
            ``(runtime_wrapper, handle)``, as C++ expects.
        """
        handle = self._free_handles.pop() if self._free_handles else Handle()
        handle.graph, handle.size = graph, size
        if not handle.result:
            handle.result = (runtime_wrapper, handle)
        self._used_handles.append(handle)
        self._size += size
        return handle.result

    def forget_graphs(self) -> None:
        """Clear C++'s cache, and the handles that it keeps."""
        with self._lock:
            _torch.clear_cache()
            for handle in self._used_handles:
                handle.graph = None
            self._free_handles += self._used_handles
            self._used_handles.clear()
            self._size = 0
            sessions.records.captures.clear()  # the records hold the graphs


class _Passes(threading.local):
    count = 0


_passes = _Passes()

walks = Walks()
