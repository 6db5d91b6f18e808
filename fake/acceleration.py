"""``accelerate()``: run torch's own fake-tensor mode on this package's dispatch cache.

``torch.compile`` creates torch's own ``FakeTensorMode`` and ``FakeTensor`` in many places. While acceleration
is on, their dispatch goes through this package's handlers and recipes. A cache miss runs torch's own
dispatch, so graphs and guards do not change. While acceleration is off, no function of torch is patched. The
class-level defaults of attributes that torch sets on each fake tensor stay, because tensors made under
acceleration outlive it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any

import torch

from fake.cache.cached_dispatch import Engine
from fake.errors import AccelerateError, UnsupportedTorchVersionError
from fake.seam import fake_tensor
from fake.seam.dispatch import OpOverload
from fake.seam.dynamo import skip_code
from fake.seam.patches import (
    LEDGER,
    SUPPORTED_VERSIONS,
    Edit,
    Entry,
    Patch,
    PatchConflictError,
    When,
    always,
    is_known_version,
)
from fake.seam.skipped_frames import SKIPPED_FRAMES
from fake.symbols import lean_patches
from fake.symbols.node import OPERATORS
from fake.tensors.tensor import DATA, DEVICE_ATTRIBUTE, HIDDEN_DEFAULTS, FakeTensor, forget
from fake.tracing import containers, shortcuts
from fake.tracing.collector import RARER_COLLECTIONS

_RETIRED_REASON = "tensors of this mode were used while acceleration was off"


class _Switch:
    """Counts nested requests for acceleration, and holds the engine and the modes that used it meanwhile."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.depth = 0
        self.engine = Engine(fake_tensor.FakeTensor, _dispatch_by_torch)
        self.modes: weakref.WeakSet[Any] = weakref.WeakSet()

    def on(self) -> None:
        with self.lock:
            if self.depth == 0:
                if not is_known_version():
                    raise UnsupportedTorchVersionError(
                        "fake.accelerate()", torch.__version__, SUPPORTED_VERSIONS
                    )
                LEDGER.keep(*SKIPPED_FRAMES)
                LEDGER.enter(*PATCHES)
            self.depth += 1

    def off(self) -> None:
        with self.lock:
            if self.depth == 0:
                raise AccelerateError("acceleration is already off")
            if self.depth == 1:
                self._restore()
            self.depth -= 1

    def watch(self, mode: Any) -> None:
        """Remember a mode that dispatches while acceleration is on; another thread may turn it off."""
        with self.lock:
            if self.depth:
                self.modes.add(mode)
            else:
                mode.__dict__["_fake_retired"] = _RETIRED_REASON

    def _restore(self) -> None:
        try:
            LEDGER.leave(*PATCHES, strict=True)
        except PatchConflictError as conflict:
            raise AccelerateError(
                f"{conflict.name} was replaced by something else while acceleration was on: "
                "undo that first, then turn acceleration off"
            ) from None
        for mode in list(self.modes):
            # From now on torch may mutate tensors behind the cache's back: never trust their cached metadata.
            mode.__dict__["_fake_retired"] = _RETIRED_REASON
        self.modes.clear()


def _dispatch_by_torch(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    if not isinstance(func, OpOverload):
        return _TORCH_DISPATCH(mode, func, types, args, kwargs)  # torch caches some higher-order operators
    return _TORCH_DISPATCH_IMPL(mode, func, types, args, kwargs)


_TORCH_DISPATCH = fake_tensor.FakeTensorMode.dispatch
_TORCH_DISPATCH_IMPL = fake_tensor.FakeTensorMode._dispatch_impl
_TORCH_FROM_REAL = fake_tensor.FakeTensorConverter.from_real_tensor
_DEVICE = torch.ops.prim.device.default


def _mode_dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if func is _DEVICE:
        return getattr(args[0], DEVICE_ATTRIBUTE)
    if not self.cache_enabled or self.cache_crosscheck_enabled or "_fake_retired" in self.__dict__:
        return _TORCH_DISPATCH(self, func, types, args, kwargs or {})
    handler = _SWITCH.engine.handlers.get(id(func))
    if handler is None:
        handler = _SWITCH.engine.handler(func)
    if self._cache_token is None:
        _SWITCH.watch(self)
    return handler(self, func, types, args, kwargs)


skip_code(_mode_dispatch.__code__)


def _from_real_tensor(self: Any, *args: Any, **kwargs: Any) -> Any:
    made = _TORCH_FROM_REAL(self, *args, **kwargs)
    if isinstance(made, fake_tensor.FakeTensor):
        forget(made)
    return made


def _set_data(self: Any, value: torch.Tensor) -> None:
    forget(self)
    DATA.__set__(self, value)


def _set_class_defaults() -> Callable[[], None]:
    """Put the defaults of hidden attributes on torch's class, for good. Recipes do not set these attributes,
    and their tensors are read after acceleration is off: by a backward pass compiled later, by guards and by
    Inductor."""
    for name, value in HIDDEN_DEFAULTS.items():
        if name not in vars(fake_tensor.FakeTensor):
            setattr(fake_tensor.FakeTensor, name, value)
    return lambda: None


def _patch(owner: Any, attribute: str, value: Any) -> Patch:
    return Patch(
        owner,
        attribute,
        always(value),
        adds=True,
        when=When.COMPILATION,
        lost="time: torch's own dispatch of fake tensors takes several times as long",
    )


_OWN_PATCHES = LEDGER.add(
    Edit(
        "torch._subclasses.fake_tensor.FakeTensor: what torch sets on each fake tensor, on the class as well",
        _set_class_defaults,
        when=When.COMPILATION,
        lost="the same as without the patches of FakeTensor",
    ),
    _patch(fake_tensor.FakeTensorMode, "_cache_token", None),
    _patch(fake_tensor.FakeTensorMode, "dispatch", _mode_dispatch),
    _patch(fake_tensor.FakeTensorMode, "__torch_dispatch__", _mode_dispatch),
    _patch(fake_tensor.FakeTensor, "__deepcopy__", FakeTensor.__deepcopy__),
    _patch(fake_tensor.FakeTensor, "data", property(DATA.__get__, _set_data)),
    _patch(fake_tensor.FakeTensorConverter, "from_real_tensor", _from_real_tensor),
)
PATCHES: tuple[Entry, ...] = (
    *_OWN_PATCHES,
    *containers.PATCHES,
    *lean_patches.PATCHES,
    *shortcuts.PATCHES,
    *OPERATORS,
)
"""Every patch that acceleration applies to torch."""

_SWITCH = _Switch()


def engine() -> Engine:
    """Return the dispatch cache for torch's own class of fake tensors."""
    return _SWITCH.engine


class accelerate(ContextDecorator):
    """Run torch's own tracing on this package's fake dispatch: same graphs, same guards, less time.

    As a context manager or decorator it can be nested; ``accelerate.enable()`` and ``accelerate.disable()``
    switch it for the whole process. It is process-wide either way: every thread that traces meanwhile is
    accelerated. The context manager is meant to span one compilation; inside it, the garbage collector also
    runs less often.

    Raises:
        UnsupportedTorchVersionError: this release of torch is not supported (on entry).
        AccelerateError: another tool replaced the same functions in the meantime (on exit).

    >>> import torch, fake
    >>> with fake.accelerate():
    ...     compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    ...     print(compiled(torch.zeros(2)))
    tensor([1., 1.])
    >>> fake.accelerate.is_enabled()
    False
    """

    def __enter__(self) -> accelerate:
        _SWITCH.on()
        LEDGER.enter(RARER_COLLECTIONS)
        return self

    def __exit__(self, *_: object) -> None:
        _SWITCH.off()  # if this raises, acceleration stays on, and so do rarer collections
        LEDGER.leave(RARER_COLLECTIONS)

    @staticmethod
    def enable() -> None:
        """Turn acceleration on for the process, until :meth:`disable` has been called as many times."""
        _SWITCH.on()

    @staticmethod
    def disable() -> None:
        """Undo one :meth:`enable`."""
        _SWITCH.off()

    @staticmethod
    def is_enabled() -> bool:
        """Return whether torch's classes are currently patched."""
        return _SWITCH.depth > 0

    @staticmethod
    def cache_clear() -> None:
        """Empty the cache behind acceleration."""
        _SWITCH.engine.clear()
