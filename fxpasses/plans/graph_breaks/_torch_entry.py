"""Private torch names for the moment when ``torch.compile`` makes its callable, before anything is traced."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch._dynamo.eval_frame import OptimizeContext
from torch._dynamo.external_utils import wrap_inline

from fake.seam.dynamo import skip_code
from fake.seam.patches import Patch, When
from fxpasses.dynamo._torch import backend_of
from fxpasses.plans._torch import CALLS_OF_MODULES
from fxpasses.plans.graph_breaks._torch_frames import set_hook

INLINE = wrap_inline(len).__code__
"""The code of the function through which Dynamo traces the call of a module that has hooks."""

wrap_inline_call = wrap_inline

MakeCallable = Callable[..., Callable[..., Any] | None]


def surround_callables(make_callable: MakeCallable) -> Patch:
    """Make each callable that ``torch.compile`` creates run inside of what ``make_callable`` returns for it, if not
    None.

    ``OptimizeContext.__call__`` creates them all: for functions, methods, and calls of modules. Torch's
    documented interface for backends begins later, when Dynamo has traced a frame.

    Args:
        make_callable: takes the backend's function and its keyword arguments, then by name ``model`` (a function,
            or the module whose call is compiled), ``compiled``, ``dynamic`` and ``fullgraph``.

    Returns:
        The entry of the ledger.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __call__(self: Any, fn: Any) -> Any:
            compiled = original(self, fn)
            if not isinstance(compiled, types.FunctionType) or self.export or self._package is not None:
                return compiled
            backend, keywords = backend_of(self.callback)
            call = make_callable(
                backend,
                keywords,
                model=_model_of(fn),
                compiled=compiled,
                dynamic=self._dynamic,
                fullgraph=self.fullgraph,
            )
            if call is None:
                return compiled
            surrounded = without_frame_hook(lambda: call, compiled)
            surrounded.planned = call  # type: ignore[attr-defined]
            return surrounded

        return __call__

    def unfit() -> str:
        known = list(inspect.signature(OptimizeContext.__call__).parameters)
        attributes = {*OptimizeContext.__init__.__code__.co_varnames}
        if (
            known == ["self", "fn"]
            and {"callback", "dynamic", "fullgraph", "export", "package"} <= attributes
        ):
            return ""
        return "Dynamo makes its callables in another way than is known"

    return Patch(
        OptimizeContext,
        "__call__",
        make,
        when=When.BACKEND,
        versions=None,
        unfit=unfit,
        lost="time: torch.compile traces what an earlier process has compiled; fxpasses.compile does not",
    )


def _model_of(fn: Any) -> Any:
    """The module whose call ``fn`` is, or ``fn``."""
    if isinstance(fn, types.FunctionType) and fn.__code__ is INLINE:
        fn = fn.__wrapped__  # type: ignore[attr-defined]
    is_call = isinstance(fn, types.MethodType) and fn.__func__ in CALLS_OF_MODULES
    return fn.__self__ if is_call else fn


def without_frame_hook(
    get_call: Callable[[], Callable[..., Any] | None], compiled: Callable[..., Any]
) -> Callable[..., Any]:
    """A function that looks like ``compiled`` and calls what ``get_call`` returns with Dynamo's frame hook off.
    It calls ``compiled`` once that is None."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if (call := get_call()) is None:
            return compiled(*args, **kwargs)
        hook = set_hook(None)
        try:
            return call(*args, **kwargs)
        finally:
            set_hook(hook)

    skip_code(run.__code__)
    return functools.wraps(compiled)(run)
