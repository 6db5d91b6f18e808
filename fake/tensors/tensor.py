"""``FakeTensor``: a tensor with a shape, a dtype, a device and a storage, but no data.

A fake tensor *is* a meta tensor (``_make_subclass``) that carries the device it stands for. Two hidden
attributes make it cheap: the interned metadata that decides operators' answers, and a plain meta tensor over
the same storage, from which views are made without going through a dispatch mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fake.seam import dispatch
from fake.seam.fake_tensor import FakeTensor as TorchFakeTensor, FakeTensorMode as TorchFakeTensorMode
from fake.seam.pytree import arg_tree_leaves
from fake.tensors.metadata import TensorMetadata, intern

_MEMOS = tuple(
    f"_{name}_memo{suffix}"
    for name in ("nonzero", "item", "unique", "unique_consecutive", "nested_int")
    for suffix in ("", "_vc", "_epoch")
)

HIDDEN_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(_MEMOS),
    "constant": None,
    "real_tensor": None,
    "pytype": None,
    "dispatch_keys": None,
    "_interned": None,
    "_plain": None,
}
"""Class-level defaults, so that creating a tensor on a cache hit sets only four attributes."""


class Unkeyable(Exception):
    """No cache key can describe a value; ``cache_info().bypasses`` counts by ``reason``."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class SymbolicSizes(Unkeyable):
    """The tensor has symbolic sizes: its metadata belongs to a shape environment."""


class _FakeTensorMeta(type(TorchFakeTensor)):  # type: ignore[misc]
    """Makes ``type(x) in (torch.Tensor, ..., torch's FakeTensor)`` true for our tensors.

    Dynamo, functionalization and ``make_fx`` look up the exact type in tuples and dictionaries,
    not by isinstance.
    """

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is TorchFakeTensor

    def __hash__(cls) -> int:
        return hash(TorchFakeTensor)

    def __instancecheck__(cls, instance: object) -> bool:
        """Do the same for isinstance: a fake tensor of any mode is an instance."""
        return isinstance(instance, TorchFakeTensor)

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Do the same for issubclass, which torch's own tensors ask about each other."""
        return issubclass(subclass, TorchFakeTensor)


class FakeTensor(TorchFakeTensor, metaclass=_FakeTensorMeta):
    """A tensor without data, made by :class:`fake.FakeTensorMode`.

    It derives from torch's class so that Dynamo, AOTAutograd, Inductor and export accept it. The constructor
    is ``FakeTensor(mode, meta_tensor, device)``; usually operators and ``mode.from_tensor`` create it.

    Attributes:
        fake_mode: the mode that it belongs to.
        fake_device: the device that it stands for (``device`` is ``meta`` while a meta kernel runs).
        constant: the value, for small tensors known during tracing (``torch.tensor(3.)``), else None.
        real_tensor: the tensor with data that travels along under real-tensor propagation, else None.

    >>> import torch
    >>> from fake import FakeTensorMode
    >>> with FakeTensorMode():
    ...     x = torch.ones(4, 3, device="cuda") @ torch.ones(3, 2, device="cuda")
    >>> x.shape, x.device
    (torch.Size([4, 2]), device(type='cuda', index=0))
    """

    _interned: TensorMetadata | None
    _plain: torch.Tensor | None

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> FakeTensor:
        mode = args[0] if args else kwargs.get("fake_mode")
        if isinstance(mode, TorchFakeTensorMode) and not hasattr(mode, "dispatch_outside"):
            # Where this class has replaced torch's, torch's rules use it by name to create tensors of torch's
            # modes.
            return TorchFakeTensor.__new__(TorchFakeTensor, *args, **kwargs)  # type: ignore[return-value]
        self: Any = TorchFakeTensor.__new__(cls, *args, **kwargs)
        element = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
        if element is not None and dispatch.is_plain_meta(element):
            self._plain = element
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that it stands for; ``meta`` while a meta kernel runs."""
        return dispatch.META_DEVICE if dispatch.meta_in_tls() else self.fake_device

    @device.setter
    def device(self, _: torch.device) -> None:
        raise NotImplementedError("the device of a fake tensor is fixed: use .to(device)")

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The tensor without its autograd history; assigning replaces storage and sizes."""
        return DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        forget(self)
        DATA.__set__(self, value)
        if isinstance(value, TorchFakeTensor):
            setattr(self, DEVICE_ATTRIBUTE, value.fake_device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on fake tensors in their own mode while no fake mode is active."""
        if func is _DEVICE:
            return args[0].device
        if dispatch.active_fake_mode() is not None:
            return NotImplemented  # the mode has declined: let the next subclass try
        for arg in args:  # usually the first one is
            if is_made_here(type(arg)):
                return arg.fake_mode.dispatch_outside(func, types, args, kwargs or {})
        for arg in arg_tree_leaves(*args, **(kwargs or {})):
            if is_made_here(type(arg)):
                return arg.fake_mode.dispatch_outside(func, types, args, kwargs or {})
        return NotImplemented

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce without state for ``torch.save`` under ``skip_data(materialize_fake_tensors=True)``
        of ``torch.serialization``."""
        if getattr(dispatch.serialization_state, "materialize_fake_tensors", False):
            return self._reduce_ex_internal(protocol)  # type: ignore[attr-defined]
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Any:
        if torch.overrides.has_torch_function_unary(self):
            # FakeCopyMode and similar modes recognize the method by identity.
            return torch.overrides.handle_torch_function(torch.Tensor.__deepcopy__, (self,), self, memo)
        # A copy belongs to the same mode; the hidden tensor is an alias, not state. A constant is copied with
        # its data.
        memo.setdefault(id(self.fake_mode), self.fake_mode)
        hidden, self._plain = self._plain, None
        known, self.constant = self.constant, None
        try:
            copied = torch.Tensor.__deepcopy__(self, memo)
        finally:
            self._plain, self.constant = hidden, known
        forget(copied)
        if known is not None:
            with dispatch.no_dispatch():
                copied.constant = known.clone()
            self.fake_mode.fake_tensor_converter.add_constant_storage_mapping(copied)
        return copied


is_made_here = functools.partial(type.__subclasscheck__, FakeTensor)
"""Return whether a class derives from ours: ``issubclass`` would accept torch's, too."""

for _name, _value in HIDDEN_DEFAULTS.items():
    setattr(FakeTensor, _name, _value)

DATA = dispatch.TensorBase.__dict__["data"]
_DEVICE = torch.ops.prim.device.default


def make_fake(
    element: torch.Tensor,
    device: torch.device,
    mode: Any,
    metadata: TensorMetadata | None,
    mark: Callable[[torch.Tensor], None],
    tensor_class: type = FakeTensor,
) -> Any:
    """Make a fake tensor over a plain meta tensor, without the constructor's checks.

    Args:
        mark: makes access to the data pointer raise or warn, as the mode requires.
    """
    made: Any = dispatch.make_subclass(
        tensor_class, element, False, dispatch_device=True, device_for_backend_keys=device
    )
    mark(made)
    made.fake_mode = mode
    setattr(made, DEVICE_ATTRIBUTE, device)
    made._interned = metadata
    made._plain = element
    return made


# 2.11 stores the device in ``fake_device``; later releases normalize it in a property over ``_fake_device``.
DEVICE_ATTRIBUTE = (
    "_fake_device" if isinstance(vars(TorchFakeTensor).get("fake_device"), property) else "fake_device"
)


def adopt(value: Any, tensor_class: type = FakeTensor) -> Any:
    """Give torch's own fake tensors (created by its rules, called as a library) our class, in place."""
    if type(value) is TorchFakeTensor:
        value.__class__ = tensor_class
    elif isinstance(value, (list, tuple)):
        for item in value:
            adopt(item, tensor_class)
    return value


def disown(value: Any) -> Any:
    """The reverse of :func:`adopt`."""
    kind: Any = type(value)
    if kind is FakeTensor:
        for name, default in HIDDEN_DEFAULTS.items():
            value.__dict__.setdefault(name, default)
        object.__setattr__(value, "__class__", TorchFakeTensor)
    elif isinstance(value, (list, tuple)):
        for item in value:
            disown(item)
    return value


def forget(tensor: Any) -> None:
    """Drop the cached metadata of a tensor whose storage or sizes may have changed."""
    tensor._interned = None
    tensor._plain = None


def flags_of(tensor: torch.Tensor) -> int:
    """Return the bits that change an operator's answer: conjugate, negative, inference and zero tensor."""
    return tensor.is_conj() | tensor.is_neg() << 1 | tensor.is_inference() << 2 | tensor._is_zerotensor() << 3


def static_metadata_of(tensor: Any) -> TensorMetadata:
    """Return the interned metadata of a strided fake tensor with plain integer sizes.

    Raises:
        SymbolicSizes: a size, stride or offset is symbolic.
        Unkeyable: the tensor is a constant, carries a real tensor, or is sparse, nested or quantized.
    """
    if tensor.constant is not None:
        raise Unkeyable("constant attribute")
    if tensor.real_tensor is not None:
        raise Unkeyable("real tensor")
    if tensor.layout is not torch.strided:
        raise Unkeyable(f"{tensor.layout} tensor")
    if tensor.is_quantized or tensor.is_nested:
        raise Unkeyable("quantized or nested tensor")
    if dispatch.has_symbols(tensor) or type(tensor.storage_offset()) is not int:
        raise SymbolicSizes("symbolic shape")
    return intern(
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.fake_device,
        tensor.storage_offset(),
        flags_of(tensor),
    )


def plain_of(tensor: Any) -> torch.Tensor:
    """Return a plain meta tensor over a fake tensor's storage (its sizes may differ; views set their own)."""
    plain = tensor._plain
    if plain is None:
        with dispatch.disable_torch_dispatch(), inference_mode(tensor.is_inference()):
            plain = torch.empty((0,), dtype=tensor.dtype, device=dispatch.META_DEVICE)
            plain.set_(tensor.untyped_storage(), 0, (0,), (1,))  # of symbolic sizes it would ask much
        tensor._plain = plain
    return plain


def inference_mode(wanted: bool) -> AbstractContextManager[Any]:
    """Return a context in which new tensors are inference tensors, or in which they are not."""
    return nullcontext() if wanted == torch.is_inference_mode_enabled() else torch.inference_mode(wanted)
