"""``torch._subclasses``: torch's own fake and functional tensors, and the errors of their kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nested._internal.nested_tensor as nested_tensor_module
from torch import (
    _from_functional_tensor as from_functional_tensor,
    _is_functional_tensor as is_functional_tensor,
)
from torch._subclasses import fake_impls, fake_tensor as torch_fake, functional_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DispatchCacheInfo,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    MetadataMismatchError,
    UnsupportedFakeTensorException,
    UnsupportedMutationAliasingException,
    UnsupportedOperatorException,
    extract_tensor_metadata,
    get_schema_info,
    in_kernel_invocation_manager,
    is_fake,
    maybe_get_fake_mode,
    run_fallback_kernel,
    should_allow_numbers_as_tensors,
    torch_decomp_decompositions,
    unset_fake_temporarily,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch._subclasses.meta_utils import assert_eq, assert_metadata_eq, is_sparse_any
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fake.seam.dispatch import OpOverload, decomposition_table, meta_table
from fake.seam.pytree import tree_leaves, tree_map

DISPATCH_META_HANDLERS = torch_fake._DISPATCH_META_HANDLERS
DISPATCH_HANDLE_DIRECTLY = torch_fake._DISPATCH_HANDLE_DIRECTLY
check_for_subclass = torch_fake._check_for_subclass
fake_tensor_tls = torch_fake.fake_tensor_tls
is_plain_tensor = torch_fake._is_plain_tensor


def fallback_is_possible(func: OpOverload) -> bool:
    """Return whether a mode may run the operator's real kernel on zeros if it allows that: only operators
    that torch tests."""
    return func.namespace in FakeTensorMode._can_run_unsafe_fallback_allowed_namespaces


def torch_result(mode: FakeTensorMode, func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return the answer of torch's own engine for ``func`` on symbolic sizes, as fake tensors of ``mode``.

    The order of preference is that of torch's ``_dispatch_impl``: fast path, decomposition, operator
    implementation, meta kernel. Operators inside a decomposition go through ``mode`` again.

    Args:
        mode: the mode of the fake tensors.
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    fast = fake_impls.get_fast_op_impls().get(func)
    if fast is not None:
        return fast(mode, *args, **kwargs)
    if func not in meta_table and not mode.cpp_meta_supports_symint(func) and func in decomposition_table:
        with mode:
            return decomposition_table[func](*args, **kwargs)
    for applies, implementation in fake_impls.op_implementations_checks:
        if applies(func):
            result = implementation(mode, func, *args, **kwargs)
            if result is not NotImplemented:
                return result
    with in_kernel_invocation_manager(mode):
        result = func(*args, **kwargs)
    return wrap(mode, func, args, kwargs, result)


def wrap(mode: FakeTensorMode, func: OpOverload, args: Any, kwargs: Any, result: Any) -> Any:
    """Turn plain meta tensors into fake tensors on the device that the arguments determine; keep the rest.

    Args:
        mode: the mode of the fake tensors.
        func: the operator that was called.
        args: its positional arguments.
        kwargs: its keyword arguments; a ``device`` among them takes precedence.
        result: the result to wrap.
    """
    device = kwargs.get("device") or common_device(func, tree_leaves((args, kwargs)))

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or mode.is_our_fake(leaf):
            return leaf
        return mode.fake_tensor_converter.from_meta_and_device(mode, leaf, device)

    return tree_map(one, result)


def common_device(func: OpOverload, flat_args: list[Any]) -> torch.device:
    """Return the device of ``func``'s results, or raise torch's error if its
    arguments' devices do not mix."""
    return FakeTensor._find_common_device(func, flat_args)[0]
