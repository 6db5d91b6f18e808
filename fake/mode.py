"""``FakeTensorMode``: a mode in which operators run on shapes, dtypes and devices alone."""

from __future__ import annotations

import operator
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fake.cache.cached_dispatch import Engine
from fake.cache.key import plain_key
from fake.cache.subgraphs import CacheView
from fake.dispatch.steps import dispatch as dispatch_steps
from fake.errors import ContractError
from fake.kernels import composites, lazy_parameters
from fake.seam.aot_autograd import config as functorch_config
from fake.seam.dispatch import TorchDispatchMode, TorchDispatchModeKey
from fake.seam.dynamo import config as dynamo_config, skip_code
from fake.seam.fake_tensor import FakeTensorMode as TorchFakeTensorMode, nested_tensor_module
from fake.seam.patches import LEDGER
from fake.seam.skipped_frames import SKIPPED_FRAMES
from fake.seam.symbolic_shapes import LocalSource, Source, SymbolicContext, TorchShapeEnv
from fake.symbols.contract import Dim, Dims, declare_on, parse_dims, symbolic_context as context_of_dims
from fake.symbols.node import OPERATORS, lean_state
from fake.tensors import modules
from fake.tensors.convert import FakeTensorConverter
from fake.tensors.tensor import DEVICE_ATTRIBUTE, FakeTensor, adopt, disown
from fake.wrong_arguments import check_type

ENGINE = Engine(FakeTensor, dispatch_steps, is_own=True)
"""The process's dispatch cache, shared by all modes (mode settings are part of the keys)."""

_MODE_PATCHES = (*modules.PATCHES, *lazy_parameters.PATCHES)
"""Patches in force while a mode exists: its tensors keep the mode alive, and are used outside of it, too."""

_PERMANENT_PATCHES = (*composites.PATCHES, *SKIPPED_FRAMES)
"""Patches that stay from the first mode on: undoing them takes as long as making ten modes, and real tensors
never reach them."""

_CACHE_SETTINGS = frozenset(
    (
        "allow_fallback_kernels",
        "allow_meta",
        "static_shapes",
        "allow_scalar_outputs",
        "shape_env",
        "_allow_unsafe_data_ptr_access",
    )
)
_HANDLER_SETTINGS = frozenset(("cache_enabled", "cache_crosscheck_enabled"))


def cache_info() -> Any:
    """Return the process-wide dispatch cache's hits, misses, bypasses by reason, and size."""
    return ENGINE.store.info()


def cache_clear() -> None:
    """Empty the process-wide dispatch cache and reset its counters."""
    ENGINE.clear()


class _AnyFakeModeMeta(type(TorchFakeTensorMode)):  # type: ignore[misc]
    """Accepts any fake mode as an instance: where this class replaces torch's, torch's modes pass, too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, TorchFakeTensorMode)


class FakeTensorMode(TorchFakeTensorMode, metaclass=_AnyFakeModeMeta):
    """A dispatch mode in which tensors have no data.

    It derives from torch's class so that Dynamo, AOTAutograd, ``make_fx`` and export accept it. Construction,
    dispatch, cache and converter are this package's.

    Args:
        allow_fallback_kernels: run an operator that has no meta kernel for real, on zeros. Off by default,
            unlike in torch's own mode; such an operator then raises ``FallbackNotAllowedError``.
        allow_non_fake_inputs: convert real tensors passed to operators instead of raising an error.
        shape_env: the environment for symbolic sizes; None for plain integers.
        static_shapes: make ``from_tensor`` ignore ``shape_env``; by default,
            True only if there is no ``shape_env``.
        export: for ``torch.export``: scalar inputs get no symbolic ``item()``.
        cache_custom_ops: cache operators that are not torch's own, keyed by their registered fake kernel.
            Correct only if the kernels depend on nothing but their arguments.

    Attributes:
        cache_enabled: serve results from the cache (False under real-tensor propagation).
        cache_crosscheck_enabled: compare each cache hit with a fresh dispatch, and raise if they differ.

    >>> import torch
    >>> from fake import FakeTensorMode
    >>> with FakeTensorMode() as mode:
    ...     y = torch.nn.Linear(8, 2)(torch.randn(3, 8))
    >>> y
    FakeTensor(..., size=(3, 2), grad_fn=<AddmmBackward0>)
    """

    supports_higher_order_operators = True
    uses_rules = True
    cache_custom_ops = False
    cache = CacheView(ENGINE.store)  # type: ignore[assignment]
    """Static entries of the process's dispatch cache, for inspection: ``(operator, ...)`` keys to recipes."""
    _cache_token: Any = None
    _handlers: Any

    def __init__(
        self,
        *,
        allow_fallback_kernels: bool = False,
        allow_non_fake_inputs: bool = False,
        shape_env: Any = None,
        static_shapes: bool | None = None,
        export: bool = False,
        cache_custom_ops: bool = False,
    ) -> None:
        check_type("FakeTensorMode", "shape_env", shape_env, (TorchShapeEnv, type(None)), "a fake.ShapeEnv()")
        TorchDispatchMode.__init__(self)
        LEDGER.keep(*_PERMANENT_PATCHES)
        entries = _MODE_PATCHES if shape_env is None else (*_MODE_PATCHES, *OPERATORS)
        LEDGER.enter(*entries)
        weakref.finalize(self, LEDGER.leave_from_finalizer, *entries).atexit = False
        self._mode_key = TorchDispatchModeKey.FAKE
        self._thread = threading.local()
        self.allow_fallback_kernels = allow_fallback_kernels
        self.allow_non_fake_inputs = allow_non_fake_inputs
        self.cache_custom_ops = cache_custom_ops
        self.propagate_real_tensors = functorch_config.fake_tensor_propagate_real_tensors
        self.fake_tensor_converter = FakeTensorConverter(copy_data=self.propagate_real_tensors, export=export)
        self.static_shapes = shape_env is None if static_shapes is None else static_shapes
        self.allow_scalar_outputs = False
        self._allow_unsafe_data_ptr_access = functorch_config.fake_tensor_allow_unsafe_data_ptr_access
        self.allow_meta = functorch_config.fake_tensor_allow_meta
        self.shape_env = shape_env
        self._stack_trace = traceback.extract_stack()
        self._stack = None
        self.nt_tensor_id_initial_count = nested_tensor_module._tensor_id_counter
        self.nt_tensor_id_counter = self.nt_tensor_id_initial_count
        self.cache_crosscheck_enabled = dynamo_config.fake_tensor_cache_crosscheck_enabled
        self.cache_enabled = dynamo_config.fake_tensor_cache_enabled and not self.propagate_real_tensors

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "in_kernel_invocation":
            self._thread.in_kernel = value
            return
        self.__dict__[name] = value
        if name in _CACHE_SETTINGS:
            self.__dict__["_cache_token"] = None
            if name == "shape_env" and value is not None and not value.should_record_events:
                lean_state(value).adopts = True
        elif name in _HANDLER_SETTINGS:
            self._choose_handlers()

    def _choose_handlers(self) -> None:
        """Choose what ``__torch_dispatch__`` calls: the engine's handlers, or a detour around the cache or
        a cross-check of it."""
        get = self.__dict__.get
        if not get("cache_enabled", True):
            handlers: Any = _SingleHandlerTable(ENGINE.uncached)
        elif get("cache_crosscheck_enabled"):
            handlers = _SingleHandlerTable(ENGINE.crosscheck)
        else:
            handlers = ENGINE.handlers
        self.__dict__["_handlers"] = handlers

    @property
    def in_kernel_invocation(self) -> bool:  # type: ignore[override]
        """Whether this thread runs a meta kernel of the mode: fake tensors then report ``meta``."""
        return getattr(self._thread, "in_kernel", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._thread.in_kernel = value

    @property
    def enter_stack(self) -> list[Any]:  # type: ignore[override]
        """The state to restore on exit from the mode, per thread."""
        try:
            return self._thread.entered
        except AttributeError:
            self._thread.entered = []
            return self._thread.entered

    def dispatch(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operator through the cache.

        Args:
            func: the operator.
            types: the tensor classes involved, as ``__torch_dispatch__`` gets them.
            args: positional arguments.
            kwargs: keyword arguments, or None.

        Returns:
            The fake outputs.
        """
        handler = self._handlers.get(id(func))
        if handler is None:
            handler = ENGINE.handler(func)
        return handler(self, func, types, args, kwargs or {})

    def from_tensor(  # type: ignore[override]
        self,
        tensor: torch.Tensor,
        *,
        static_shapes: bool | None = None,
        source: Any = None,
        symbolic_context: Any = None,
        trace: bool = True,
        name: str | None = None,
        dims: Dims | None = None,
    ) -> Any:
        """Convert a tensor with data to a fake tensor.

        Args:
            static_shapes: whether all sizes are plain integers; defaults to the mode's setting.
            source: how a compiled program reaches the tensor (Dynamo).
            symbolic_context: which sizes are dynamic, in torch's form.
            trace: write the conversion to torch's structured log.
            name: the tensor's name in guards and messages.
            dims: for each dimension a :class:`fake.Dim` (a contract), ``"dynamic"``, ``"auto"`` (equal sizes share a
                symbol), ``"unbacked"`` or ``"static"``; dimensions not listed are
                static. By default all are ``"auto"``.

        Raises:
            ArgumentTypeError: ``tensor`` is not a tensor, or another argument has the wrong type.
            ContractError: ``dims`` is invalid, or asks for symbolic sizes in a mode
                without a shape environment.
            ContractInputError: the tensor itself violates the contract.
        """
        check_type("from_tensor", "tensor", tensor, torch.Tensor, "a tensor")
        check_type("from_tensor", "name", name, (str, type(None)), "what messages call the tensor")
        check_type("from_tensor", "source", source, (Source, type(None)), "a source of Dynamo, or name='x'")
        check_type(
            "from_tensor",
            "symbolic_context",
            symbolic_context,
            (SymbolicContext, type(None)),
            "a torch.fx.experimental.symbolic_shapes.SymbolicContext, or dims={0: 'dynamic'}",
        )
        if name is not None and source is None:
            source = LocalSource(name)
        if dims is not None:
            parsed = parse_dims(dims, name or "the tensor", tensor.dim())
            if self.shape_env is None and any(policy != "static" for policy in parsed.values()):
                raise ContractError(
                    name or "the tensor",
                    "dims",
                    "has symbolic sizes, which need FakeTensorMode(shape_env=fake.ShapeEnv())",
                )
            symbolic_context = context_of_dims(tensor, parsed)
            source = source or LocalSource("input")
            promised = {place: dim for place, dim in parsed.items() if isinstance(dim, Dim)}
            if promised:
                declare_on(self.shape_env, source, promised, tensor.shape)
        return super().from_tensor(
            tensor, static_shapes=static_shapes, source=source, symbolic_context=symbolic_context, trace=trace
        )

    @contextmanager
    def one_level_deeper(self) -> Iterator[bool]:
        """Mark a real dispatch in this thread; yields whether it is the outermost: the user's own call."""
        was_outermost = getattr(self._thread, "is_outermost", True)
        self._thread.is_outermost = False
        try:
            yield was_outermost
        finally:
            self._thread.is_outermost = was_outermost

    @contextmanager
    def still_outermost(self, outermost: bool) -> Iterator[None]:
        """Inside, operators count as called by the user if ``outermost``: eager decomposes composite operators, too."""
        self._thread.is_outermost = outermost
        try:
            yield
        finally:
            self._thread.is_outermost = False

    @contextmanager
    def making_torchs_tensors(self, tensors: Sequence[Any]) -> Iterator[None]:
        """Inside, these tensors and all results have torch's exact class: ``torch.cond`` compares by identity."""
        for tensor in tensors:
            disown(tensor)
        handlers, self._handlers = self._handlers, _SingleHandlerTable(_dispatch_to_torch_class)
        try:
            yield
        finally:
            self._handlers = handlers
            adopt(list(tensors))

    dispatch_outside = dispatch
    """Run an operator on this mode's tensors while no fake mode is active."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to pickle: neither modes nor fake tensors can be pickled."""
        raise TypeError(
            "a FakeTensorMode and its fake tensors cannot be pickled: they have no data. Save tensors without it under "
            "torch.serialization.skip_data(materialize_fake_tensors=True)"
        )

    def _dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:  # type: ignore[override]
        return dispatch_steps(self, func, types, args, kwargs)

    cache_info = staticmethod(cache_info)  # type: ignore[assignment]
    cache_clear = staticmethod(cache_clear)  # type: ignore[assignment]

    def _cache_key(self, *arguments: Any) -> Any:
        """Return the key of a call: ``(func, args, kwargs)`` or torch's ``(state, func, args, kwargs)``."""
        func, args, kwargs = arguments[-3:]
        return plain_key(func, self, tuple(args), kwargs)


def _torch_dispatch(
    self: FakeTensorMode, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
) -> Any:
    if func is _DEVICE:
        # Most calls are this one: autograd asks for the device of every gradient. No meta kernel runs here.
        return _device_of(args[0])
    handler = self._handlers.get(id(func))
    if handler is None:
        handler = ENGINE.handler(func)
    return handler(self, func, types, args, kwargs)


_DEVICE = torch.ops.prim.device.default
_device_of = operator.attrgetter(DEVICE_ATTRIBUTE)

# Set after the class exists: torch wraps a method defined in the body to keep Dynamo out, which costs a microsecond
# a call; marking the code object has the same effect.
skip_code(_torch_dispatch.__code__)
FakeTensorMode.__torch_dispatch__ = _torch_dispatch  # type: ignore[method-assign, assignment]


class _SingleHandlerTable:
    """Stands in for the engine's table of handlers, and returns the same handler for every operator."""

    def __init__(self, handler: Any) -> None:
        self.handler = handler

    def get(self, _: int) -> Any:
        return self.handler


def _dispatch_to_torch_class(mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return disown(ENGINE.uncached(mode, func, types, args, kwargs))
