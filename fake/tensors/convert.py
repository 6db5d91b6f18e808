"""Convert tensors with data to fake ones: memoized, views and storages preserved, nothing kept alive."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fake.errors import UnsupportedFakeTensorException
from fake.seam import fake_tensor
from fake.seam.dispatch import DisableTorchFunctionSubclass, TensorBase, has_storage, has_symbols, no_dispatch
from fake.seam.guards import TracingContext
from fake.seam.symbolic_shapes import CallMethodItemSource, DimDynamic, FloatTensorSource, RandomValueSource
from fake.symbols.node import adopt as adopt_symbol
from fake.tensors.tensor import FakeTensor, forget
from fake.wrong_arguments import check_type

_ITEM_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.float64)


class FakeTensorConverter(fake_tensor.FakeTensorConverter):
    """Converts tensors to fake tensors of a mode, each once.

    Tensors that share a storage become fake tensors that share one; parameters stay parameters, ``.grad`` is
    converted along, and wrapper subclasses are rebuilt by their flatten protocol (all of that is torch's
    ``MetaConverter``). The memo holds fake tensors weakly and is keyed by the identity of the real ones.
    """

    def from_real_tensor(  # type: ignore[override]
        self,
        fake_mode: Any,
        t: torch.Tensor,
        make_constant: bool = False,
        shape_env: Any = None,
        *,
        source: Any = None,
        symbolic_context: Any = None,
        trace: bool = True,
    ) -> Any:
        """Return the fake tensor of ``t`` in ``fake_mode``.

        Args:
            make_constant: keep ``t`` as the known value.
            shape_env: the environment that creates symbols for dynamic sizes; None makes all sizes static.
            source: how a compiled function reaches the tensor (Dynamo).
            symbolic_context: which sizes are dynamic.
            trace: write the conversion to torch's structured log.

        Raises:
            UnsupportedFakeTensorException: ``t`` is quantized, or a kind of tensor without a meta version.
        """
        if not symbolic_context and not source and shape_env:
            source, symbolic_context = context_of_trace(t, source, symbolic_context)
        known = self._get_memo(t)
        if known is not None:
            return known
        if t.is_quantized:
            raise UnsupportedFakeTensorException("quantized nyi in meta tensors")
        constant = t if make_constant else None
        made: list[Any] = []

        def make(make_meta: Callable[[], torch.Tensor], device: torch.device) -> Any:
            with no_dispatch():
                fake = FakeTensor(fake_mode, make_meta(), device, constant=constant)
            forget(fake)  # the meta converter may still change its storage, and take views of it then
            made.append(fake)
            return fake

        out = self.meta_converter(
            t,
            shape_env=shape_env,
            callback=make,  # type: ignore[arg-type]
            source=source,
            symbolic_context=symbolic_context,
            trace=trace,
        )
        if out is NotImplemented:
            raise UnsupportedFakeTensorException("meta converter nyi")
        for fake in made:
            if has_symbols(fake):
                for number in (*fake.shape, *fake.stride(), fake.storage_offset()):
                    adopt_symbol(number)
            forget(fake)  # the meta converter sets strides and conjugate bits after creating them
        if made and not has_symbols(out):
            _grow_storage(t, out)
        _copy_grad_dtype(t, out)
        if source is not None and shape_env is not None and not self.export:
            _remember_item(t, out, source, symbolic_context, shape_env)
        if make_constant:
            self.add_constant_storage_mapping(out)
        return out

    def from_meta_and_device(  # type: ignore[override]
        self,
        fake_mode: Any,
        t: torch.Tensor,
        device: torch.device,
        pytype: type[torch.Tensor] | None = None,
        dispatch_keys: torch.DispatchKeySet | None = None,
    ) -> Any:
        """Return a fake tensor over the meta tensor ``t`` that stands for a tensor on ``device``.

        Args:
            fake_mode: the mode that the tensor belongs to.
            t: the meta tensor; the same one always yields the same fake tensor.
            device: the device that the fake tensor reports.
            pytype: the class that it stands for.
            dispatch_keys: the dispatch keys of the tensor that it stands for.
        """
        if t.device.type != "meta":
            raise AssertionError(f"tensor's device must be `meta`, got {t.device.type} instead")
        known = self._get_memo(t)
        if known is not None:
            return known
        out = FakeTensor(fake_mode, t, device, pytype=pytype, dispatch_keys=dispatch_keys)
        self.set_tensor_memo(t, out)
        return out


def context_of_trace(t: torch.Tensor, source: Any, symbolic_context: Any) -> tuple[Any, Any]:
    """Return what Dynamo decided about the sizes of a tensor that it has already seen.

    Args:
        t: the tensor.
        source: where Dynamo finds it, if known.
        symbolic_context: what the caller asks for.

    Returns:
        The source and the symbolic context; unchanged if Dynamo has not seen the tensor.
    """
    tracing = TracingContext.try_get()
    if tracing is not None and t in tracing.tensor_to_context:
        symbolic_context = tracing.tensor_to_context[t]
        source = symbolic_context.tensor_source
    return source, symbolic_context


def _grow_storage(real: torch.Tensor, fake: torch.Tensor) -> None:
    """Grow the fake storage if the real one is larger than its tensor (a loaded slice, for example)."""
    if type(real) not in (torch.Tensor, torch.nn.Parameter) or not has_storage(real):
        return  # sparse, or in the middle of a function transform
    size, storage = real.untyped_storage().nbytes(), fake.untyped_storage()
    if size > storage.nbytes():
        storage.resize_(size)


def _copy_grad_dtype(t: torch.Tensor, out: Any) -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        return
    inner = fake_tensor.from_functional_tensor(t.elem) if isinstance(t, fake_tensor.FunctionalTensor) else t
    if inner.requires_grad and inner.is_leaf and inner.grad_dtype != inner.dtype and out.is_leaf:
        out.grad_dtype = inner.grad_dtype


def _remember_item(t: torch.Tensor, out: Any, source: Any, symbolic_context: Any, shape_env: Any) -> None:
    """Make ``item()`` of a scalar input a symbol with a known source. Of floats, only float64 is exact."""
    if (
        not fake_tensor.is_plain_tensor(t)
        or t.dim() != 0
        or t.device.type != "cpu"
        or t.dtype not in _ITEM_DTYPES
        or isinstance(source, RandomValueSource)
    ):
        return
    with no_dispatch():
        value = t.item()
    if math.isnan(value) or math.isinf(value):
        return
    item_source = source.base if isinstance(source, FloatTensorSource) else CallMethodItemSource(source)
    symbol = shape_env.create_unspecified_symbol(
        value, source=item_source, dynamic_dim=DimDynamic.DYNAMIC, symbolic_context=symbolic_context
    )
    if t.dtype == torch.int64:
        out.item_memo = shape_env.create_symintnode(symbol, hint=value, source=item_source)
    elif t.dtype == torch.float64:
        out.item_memo = shape_env.create_symfloatnode(symbol, hint=value, source=item_source)


class FakeCopyMode(torch.overrides.TorchFunctionMode):
    """``copy.deepcopy`` of a module under this mode makes the same module with fake tensors.

    >>> import copy, torch
    >>> from fake import FakeCopyMode, FakeTensorMode
    >>> with FakeCopyMode(FakeTensorMode()):
    ...     copied = copy.deepcopy(torch.nn.Linear(2, 3))
    >>> type(copied.weight).__name__, isinstance(copied.weight, torch.nn.Parameter)
    ('FakeTensor', True)
    """

    def __init__(self, fake_mode: Any) -> None:
        check_type("FakeCopyMode", "fake_mode", fake_mode, fake_tensor.FakeTensorMode, "a FakeTensorMode")
        self.fake_mode = fake_mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is TensorBase.clone:  # how a Parameter copies itself
            return func(self.fake_mode.from_tensor(args[0], static_shapes=True), **kwargs)
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self.fake_mode.from_tensor(tensor, static_shapes=True)
            return memo[id(tensor)]
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
