"""Every private torch name that the rules rely on, and every difference between torch versions.

Nothing else in :mod:`fake.kernels` reaches into a private module, so that the next torch release is this file's work.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch._C import DisableTorchFunction, _AutoDispatchBelowAutograd, _dispatch_dump
from torch._prims_common import (
    ELEMENTWISE_TYPE_PROMOTION_KIND,
    elementwise_dtypes,
    is_non_overlapping_and_dense_or_false as is_dense,
    suggest_memory_format,
)
from torch._subclasses.fake_impls import get_fast_op_impls, op_implementations_checks
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_false, statically_known_true

from fake._torch import is_tracing
from fake.seam import pytree
from fake.seam.dispatch import (
    DisableAutocast,
    DispatchKey,
    OpOverload,
    TorchDispatchModeKey as _TorchDispatchModeKey,
    check,
    decomposition_table,
    get_dispatch_mode as _get_dispatch_mode,
    has_kernel as _has_kernel,
    is_key_excluded,
    meta_table,
    no_dispatch,
)
from fake.seam.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
)
from fake.seam.symbolic_shapes import Mod
from fake.symbols.expr import without_common_factor

#: The dispatch key of kernels that are made of other operators, autograd included.
COMPOSITE = DispatchKey.CompositeImplicitAutograd

#: The highest dispatch key that tensor subclasses and dispatch modes have, and real tensors outside of modes have not.
PYTHON_SNAPSHOT = DispatchKey.PythonTLSSnapshot.name
BELOW_PYTHON_SNAPSHOT = torch._C._dispatch_keyset_full_after(DispatchKey.PythonTLSSnapshot)

_VIEWS_KEY = DispatchKey.ADInplaceOrView
_STRUCTURED_KEY = DispatchKey.CompositeExplicitAutogradNonFunctional


@functools.cache
def hides_structured_meta(func: OpOverload) -> bool:
    """Whether a Python registration hides ``func``'s structured C++ meta function.

    A structured operator shares one C++ meta function between all its backends: what it says is what eager does.
    torch registers Python versions over many of them, because the C++ ones cannot take symbolic sizes.
    """
    dump = _dispatch_dump(func.name())
    return "Meta (inactive)" in dump and _STRUCTURED_KEY.name in dump


def structured_meta(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run ``func``'s structured C++ meta function, hidden or not.

    The dispatcher keeps it reachable in one place: the composite kernel that runs the meta function, allocates the
    outputs that it asks for, and calls the out variant. On meta tensors nothing is computed.
    """
    return func._op_dk(_STRUCTURED_KEY, *args, **kwargs)


def torchs_answer(mode: FakeTensorMode, func: OpOverload, args: Any, kwargs: Any) -> Any:
    """What torch's own engine answers for ``func`` on symbolic sizes, as fake tensors of ``mode``.

    The same order of preference as ``FakeTensorMode._dispatch_impl``: fast path, decomposition, operator
    implementation, meta kernel. Operators inside a decomposition go through ``mode`` again.
    """
    fast = get_fast_op_impls().get(func)
    if fast is not None:
        return fast(mode, *args, **kwargs)
    if func not in meta_table and not mode.cpp_meta_supports_symint(func) and func in decomposition_table:
        with mode:
            return decomposition_table[func](*args, **kwargs)
    for answers, implementation in op_implementations_checks:
        if answers(func):
            result = implementation(mode, func, *args, **kwargs)
            if result is not NotImplemented:
                return result
    with in_kernel_invocation_manager(mode):
        result = func(*args, **kwargs)
    return wrap(mode, func, args, kwargs, result)


def wrap(mode: FakeTensorMode, func: OpOverload, args: Any, kwargs: Any, result: Any) -> Any:
    """Plain meta tensors as fake tensors on the device that ``func``'s arguments decide; the rest as it is."""
    device = kwargs.get("device") or common_device(func, pytree.tree_leaves((args, kwargs)))

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or mode.is_our_fake(leaf):
            return leaf
        return mode.fake_tensor_converter.from_meta_and_device(mode, leaf, device)

    return pytree.tree_map(one, result)


def active_fake_mode() -> FakeTensorMode | None:
    """The fake tensor mode that operators are dispatched to now, if there is one."""
    return _get_dispatch_mode(_TorchDispatchModeKey.FAKE)


def composite_kernel_exists(func: OpOverload) -> bool:
    """Whether an operator is made of others in C++, autograd and views included."""
    has_kernel = _has_kernel
    return has_kernel(func.name(), COMPOSITE.name) and not has_kernel(func.name(), _VIEWS_KEY.name)


@contextmanager
def in_eager() -> Iterator[None]:
    """Real kernels for real tensors: no mode sees a call, autograd does not record it and autocast does not change it."""
    with no_dispatch(), DisableTorchFunction(), _AutoDispatchBelowAutograd(), DisableAutocast():
        yield


@contextmanager
def views_are_noted() -> Iterator[None]:
    """Inside, views know what they are views of, even where a dispatch mode has taken over."""
    excluded = is_key_excluded(_VIEWS_KEY)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_VIEWS_KEY, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_VIEWS_KEY, excluded)


def autograd_node_type(name: str) -> type | None:
    """The type of the nodes of one of autograd's formulas, such as ``"MaxBackward1"``; ``None`` if this torch has none."""
    found: type | None = getattr(torch._C._functions, name, None)
    return found


def saved_tensor(node: Any, name: str) -> torch.Tensor | None:
    """What a node saved for its formula, without running hooks: ``None`` if a hook packed it."""
    saved = getattr(node, f"_raw_saved_{name}", None)
    if saved is None or saved.unpack_hook is not None:
        return None
    data = saved.data
    return data if isinstance(data, torch.Tensor) else None


def common_device(func: OpOverload, flat_args: list[Any]) -> torch.device:
    """The device of ``func``'s results, or torch's error if its arguments' devices do not mix."""
    return FakeTensor._find_common_device(func, flat_args)[0]


def hint(value: Any) -> Any:
    """The example value behind a symbolic number, recording no guard; ``None`` for an unbacked one."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint
    return value


def has_unbacked(tree: Any) -> bool:
    """Whether a size among tensors and numbers depends on data."""
    return any(
        bool(free_unbacked_symbols(leaf))
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, torch.Tensor | torch.SymInt)
    )


def exact_quotient(number: Any, divisor: Any, problem: str) -> Any:
    """``number // divisor``, guarded to have no remainder.

    The guard is put without factors that both have in common: later divisions can then use it.
    """
    nodes = [n.node for n in (number, divisor) if isinstance(n, torch.SymInt)]
    if not nodes:
        check(number % divisor == 0, lambda: problem)
        return number // divisor
    shape_env = nodes[0].shape_env
    base, by = (n.node.expr if isinstance(n, torch.SymInt) else sympy.Integer(n) for n in (number, divisor))
    positive = {s for s in (base * by).free_symbols if shape_env.bound_sympy(s).lower >= 1}
    base, by = without_common_factor(base, by, positive.__contains__)
    if not shape_env.evaluate_expr(sympy.Eq(Mod(base, by), 0)):
        raise RuntimeError(problem)
    return number // divisor


def conv_backend(input: torch.Tensor, weight: torch.Tensor, given: Mapping[str, Any]) -> Any:
    """The library that eager would compute a convolution with; ``given``: its arguments by name."""
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return torch._C._select_conv_backend(input, weight, None, *(given[name] for name in names), None)
