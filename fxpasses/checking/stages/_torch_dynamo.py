"""Private names of Dynamo that the checks rely on: its caches of compiled code, and the sizes it recorded."""

from __future__ import annotations

import collections
import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch._dynamo import pgo
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from fake.seam.dynamo import codes_seen, convert_frame, reset_code
from fake.seam.patches import LEDGER, Setting, When

_CAN_ISOLATE = "isolate_recompiles" in inspect.signature(torch.compile).parameters


def compile_isolated(
    function: Callable[..., Any],
    backend: Callable[..., Any] | str,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """Call ``torch.compile`` with its own entries in Dynamo's caches.

    A graph break compiles the user's own functions, whose cache is shared by all compilations. After eight
    backends Dynamo silently falls back to eager for such a function.

    Args:
        function: what to compile.
        backend: of ``torch.compile``.
        dynamic: of ``torch.compile``.
        options: of ``torch.compile``.
    """
    isolation: dict[str, Any] = {"isolate_recompiles": True} if _CAN_ISOLATE else {}
    return torch.compile(function, backend=backend, dynamic=dynamic, options=options, **isolation)


@contextlib.contextmanager
def discard_dynamo_state() -> Iterator[None]:
    """On exit, forget what this thread compiled inside with Dynamo, and the sizes that it recorded.

    What Dynamo knew before stays, and what other threads compile meanwhile.
    """
    known = {id(code) for code in codes_seen() if _debug_get_cache_entry_list(code)}
    own, compiled = threading.get_ident(), list[CodeType]()

    def hook(code: CodeType, new_code: CodeType) -> None:
        if threading.get_ident() == own and id(code) not in known:
            compiled.append(code)

    handle = convert_frame.register_bytecode_hook(hook)
    with LEDGER.in_force(*_EMPTY_CODE_STATE):
        try:
            yield
        finally:
            handle.remove()
            for code in compiled:
                reset_code(code)


_EMPTY_CODE_STATE = LEDGER.add(
    Setting(
        pgo,
        "_CODE_STATE",
        lambda _: collections.defaultdict(pgo.CodeState),
        when=When.COMPILATION,
        versions=None,
        lost="checks that leave no sizes behind, which Dynamo would make symbolic in the user's next compilation",
    )
)
