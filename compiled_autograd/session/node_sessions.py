"""Capture without a ``with`` block: capture backward passes that reach a node of a given class.

A compiler of forward graphs knows the class of the autograd node that its graph creates, but not where the
user will call ``backward``. It registers the class, and every pass that reaches such a node is captured.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from compiled_autograd import _torch
from compiled_autograd.session.compilers import as_compiler
from compiled_autograd.session.fallback import is_unknown_torch
from compiled_autograd.session.session import Session, sessions
from fake.seam.patches import LEDGER, When
from fake.wrong_arguments import check_dynamic


class NodeSessions:
    """Node classes through which backward passes are captured, each with its session."""

    def __init__(self) -> None:
        self._sessions: weakref.WeakKeyDictionary[type, Session] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def add(self, node_class: type, session: Session) -> None:
        """Capture passes that reach a node of this class from now on."""
        _torch.free_compilation_stacks()  # they would keep node classes of dead functions alive
        with self._lock:
            if node_class not in self._sessions:
                # The patches stay in force as long as the class lives: the engine must replace torch's until
                # then.
                entries = LEDGER.of(When.SESSION)
                LEDGER.enter(*entries)
                weakref.finalize(node_class, LEDGER.leave_from_finalizer, *entries)
            self._sessions[node_class] = session

    def find(self, roots: Sequence[Any]) -> Session | None:
        """Return the session of a pass from these tensors: that of the first registered node found."""
        if not self._sessions:
            return None
        pending = [root.grad_fn for root in roots if getattr(root, "grad_fn", None) is not None]
        seen = set(pending)
        while pending:
            node = pending.pop()
            session = self._sessions.get(type(node))
            if session is not None:
                return session
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    pending.append(following)
        return None


node_sessions = NodeSessions()


def capture_through(node_class: type, compiler_fn: Any, dynamic: bool = True) -> None:
    """Capture every backward pass, on any thread, that reaches an autograd node of ``node_class``.

    This works like ``with enable(compiler_fn, dynamic)``, for as long as the class exists. ``enable`` and
    ``disable`` blocks around a pass take precedence.

    Args:
        node_class: the class of a ``grad_fn``, from a custom ``autograd.Function`` or a compiled graph.
        compiler_fn: as for ``enable``.
        dynamic: as for ``enable``.

    Raises:
        InvalidCompilerError: if ``compiler_fn`` cannot be a compiler.
        TypeError: if ``node_class`` is not a class of Python nodes. C++ node classes are immortal and shared.
    """
    if not isinstance(node_class, type) or _torch.function_of(node_class) is None:
        raise TypeError(
            f"capture_through: node_class is {node_class!r}; pass type(tensor.grad_fn) of the result of an "
            "autograd.Function"
        )
    check_dynamic("capture_through", dynamic)
    if not is_unknown_torch():
        node_sessions.add(node_class, Session(as_compiler(compiler_fn), bool(dynamic)))


def capture_later() -> AbstractContextManager[None]:
    """Wrap the compilation of a forward graph whose node will be passed to `capture_through` afterwards.

    As inside ``enable``, hooks in a function compiled with ``fullgraph=True`` are left to the captured pass.
    An ``enable`` or ``disable`` block around this one takes precedence.
    """
    return contextlib.nullcontext() if is_unknown_torch() else sessions.expected()
