"""C++ composites that read data, and so go wrong before a fake tensor mode sees them.

A composite runs at the autograd key, above every mode, so no rule is consulted for it. For the few composites
whose C++ code goes wrong on fake tensors, a Python function is registered in front of them in the dispatcher,
from the first use of a mode of this package. It answers for our fake tensors and redispatches all other
calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fake.kernels.checks import check_arguments
from fake.kernels.out_variants import check_out, out_names, resize_out
from fake.kernels.outputs import is_symbolic
from fake.seam.dispatch import (
    BELOW_PYTHON_SNAPSHOT,
    COMPOSITE,
    PYTHON_SNAPSHOT,
    OpOverload,
    check,
    has_composite_kernel,
    no_dispatch,
    track_views,
)
from fake.seam.patches import LEDGER, Edit, When
from fake.seam.proxy_tensor import is_tracing

aten = torch.ops.aten

#: Composites whose C++ code resizes ``out`` itself, which fails with symbolic sizes.
_RESIZING_COMPOSITES = (
    "inner.out",
    "kron.out",
    "linalg_cond.out",
    "linalg_cond.p_str_out",
    "linalg_matrix_norm.out",
    "linalg_matrix_norm.str_ord_out",
    "linalg_matrix_rank.atol_rtol_float_out",
    "linalg_matrix_rank.atol_rtol_tensor_out",
    "linalg_matrix_rank.out",
    "linalg_matrix_rank.out_tol_tensor",
    "linalg_multi_dot.out",
    "linalg_norm.ord_str_out",
    "linalg_norm.out",
    "linalg_tensorinv.out",
    "linalg_tensorsolve.out",
    "linalg_vecdot.out",
    "nuclear_norm.dim_out",
    "nuclear_norm.out",
    "special_ndtr.out",
    "tensordot.out",
)


def tensor_split(func: OpOverload, self: torch.Tensor, indices: torch.Tensor, dim: int = 0) -> Any:
    """Split at the values of a tensor if they are known or can be symbols of a shape environment.

    Args:
        func: the overload, whose C++ code would read unallocated memory.
        self: the tensor to split.
        indices: the split points, or the number of parts.
        dim: the dimension to split.

    Raises:
        DataDependentOutputException: the values are not known, and there are no symbols.
        RuntimeError: ``indices`` is not int64 (eager's error).
    """
    check(
        indices.dtype is torch.int64,
        lambda: f"{func.name()}: argument 'tensor_indices_or_sections' has to be int64, not {indices.dtype}",
    )
    values = getattr(indices, "constant", None)
    if values is None or values.dim() > 1:
        return func.py_kernels[COMPOSITE](self, indices, dim)
    with no_dispatch():
        positions = values.tolist()
    return torch.tensor_split(self, positions, dim)


def cov(
    func: OpOverload, self: torch.Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None
) -> torch.Tensor:
    """Compute ``at::cov`` without reading the values of the weights or the sign of the factor.

    Args:
        func: the overload; unused.
        self: observations in columns, variables in rows.
        correction: what to subtract from the number of observations.
        fweights: how often each observation counts, integers of shape (observations,), or None.
        aweights: the weight of each observation, of shape (observations,), or None.

    Returns:
        The covariance of the variables, of shape (variables, variables), or a scalar for one.

    Raises:
        RuntimeError: the rank or dtype is wrong (eager's error).
    """
    check(
        self.dim() <= 2, lambda: f"cov(): expected input to have two or fewer dimensions but got {self.dim()}"
    )
    check(self.dtype is not torch.bool, lambda: "cov(): bool dtype is not supported for input")
    integral = fweights is None or not (fweights.is_floating_point() or fweights.is_complex())
    check(
        integral and (fweights is None or fweights.dtype is not torch.bool),
        lambda: f"cov(): expected fweights to have integral dtype but got {fweights.dtype}",
    )
    check(
        aweights is None or aweights.is_floating_point(),
        lambda: f"cov(): expected aweights to have floating point dtype but got {aweights.dtype}",
    )
    observations = self.view(1, -1) if self.dim() < 2 else self
    for name, weight in (("fweights", fweights), ("aweights", aweights)):
        if weight is not None:
            check(
                weight.dim() <= 1, lambda name=name: f"cov(): expected {name} to have one or fewer dimensions"
            )  # type: ignore[misc]
            check(
                weight.numel() == observations.shape[1],
                lambda name=name: f"cov(): expected {name} to have the same numel as there are observations",  # type: ignore[misc]
            )
    weights = [w for w in (fweights, aweights) if w is not None]
    if not weights:
        count = observations.shape[1]
        centred = observations - (observations.sum(1) / count).unsqueeze(1)
        return (torch.mm(centred, centred.t().conj()) / torch.sym_max(count - correction, 0)).squeeze()
    weight = weights[0] if len(weights) == 1 else weights[0] * weights[1]
    total = weight.sum()
    average = (observations * weight).sum(1) / total
    factor = total - correction
    if aweights is not None and correction != 0:
        factor = total - correction * (weight * aweights).sum() / total
    centred = observations - average.unsqueeze(1)
    return (torch.mm(centred, (centred * weight).t().conj()) / factor.clamp(min=0)).squeeze()


def resizing_composite(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Answer an ``out=`` composite; with symbolic sizes, the functional operator determines the results."""
    if not is_symbolic(args, kwargs):
        return func._op_dk(COMPOSITE, *args, **kwargs)
    (name,) = out_names(func)
    out = kwargs.pop(name)
    wanted = func.overloadpacket(*args, **kwargs)
    with out.fake_mode:
        check_out(func, name, out, wanted, casts=True)
        resize_out(out, wanted.shape)
    return out


def one_hot(func: OpOverload, self: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Answer ``one_hot`` with given classes as eager does: scatter into zeros. Subclasses would compare."""
    is_ours = hasattr(getattr(self, "fake_mode", None), "dispatch_outside")
    if not is_ours or isinstance(num_classes, torch.SymInt) or num_classes < 0 or is_tracing():
        return func._op_dk(COMPOSITE, self, num_classes)
    check(self.dtype is torch.int64, lambda: "one_hot is only applicable to index tensor of type LongTensor.")
    empty = not is_symbolic((self,), {}) and self.numel() == 0
    check(num_classes > 0 or not empty, lambda: "Can not infer total number of classes from empty tensor.")
    check(num_classes > 0, lambda: "num_classes should be positive")
    made = self.new_empty(*self.shape, num_classes) if empty else self.new_zeros(*self.shape, num_classes)
    return made if empty else made.scatter_(-1, self.unsqueeze(-1), 1)


def ctc_loss(
    func: OpOverload,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Compute ``at::ctc_loss`` without the tensor of target lengths that it fills to divide by.

    Args:
        func: the overload; unused.
        log_probs: of shape (time, batch, classes) or (time, classes).
        targets: class indices, of shape (batch, length) or concatenated.
        input_lengths: the length of each input.
        target_lengths: the length of each target.
        blank: the class that stands for no label.
        reduction: 0 for none, 1 for the mean, 2 for the sum.
        zero_infinity: whether infinite losses become zero.
    """
    batched = log_probs.dim() == 3
    log_probs = log_probs if batched else log_probs.unsqueeze(1)
    targets = targets.to(log_probs.device, torch.int64)
    result = aten._ctc_loss.default(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[
        0
    ]
    if zero_infinity:
        result = torch.where(result == float("inf"), result.new_zeros(()), result)
    if reduction == 1:
        return (result / result.new_ones(len(target_lengths))).mean()
    if reduction == 2:
        return result.sum()
    return result if batched else result.squeeze(0)


def run_composite(mode: Any, func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Run a composite's own C++ code, as eager does, when it reaches the mode because autograd is off.

    Views of tensors that were made outside of inference mode require gradients if those do. Returns
    ``NotImplemented`` for operators that are not composites.

    Args:
        mode: the mode of the call.
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    if func in _VIEW_OPS:
        with mode, track_views():
            return _VIEW_OPS[func](*args, **kwargs)
    if not has_composite_kernel(func):
        return NotImplemented
    function = next((function for composite, function in _OVERRIDES.values() if composite is func), None)
    with mode, track_views():
        return (
            func._op_dk(COMPOSITE, *args, **kwargs) if function is None else function(func, *args, **kwargs)
        )


#: Operators that return new tensors according to autograd but views according to their kernels; without
#: autograd, those are tracked as views.
_VIEW_OPS = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}


def _overload(name: str) -> OpOverload:
    packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


#: The functions that run for fake tensors, by name of the composite.
_OVERRIDES: dict[str, tuple[OpOverload, Callable[..., Any]]] = {
    "tensor_split.tensor_indices_or_sections": (aten.tensor_split.tensor_indices_or_sections, tensor_split),
    "cov": (aten.cov.default, cov),
    "ctc_loss.IntList": (aten.ctc_loss.IntList, ctc_loss),
    "one_hot": (aten.one_hot.default, one_hot),
    **{name: (_overload(name), resizing_composite) for name in _RESIZING_COMPOSITES},
}


#: Composites whose C++ code refuses arguments that it accepts for tensor subclasses.
_CHECKED_COMPOSITES = {
    "max_pool1d": aten.max_pool1d.default,
    "scaled_dot_product_attention": aten.scaled_dot_product_attention.default,
}


def _register_overrides() -> Callable[[], None]:
    """Register the overrides and checks at a dispatch key above autograd that real tensors do not have.

    Only tensor subclasses and dispatch modes have that key."""
    library = torch.library.Library("aten", "IMPL")
    for name, (func, function) in _OVERRIDES.items():
        library.impl(name, _override(func, function), PYTHON_SNAPSHOT, with_keyset=True)
    for name, func in _CHECKED_COMPOSITES.items():
        library.impl(name, _checked_override(func), PYTHON_SNAPSHOT, with_keyset=True)
    return library._destroy


def _override(func: OpOverload, function: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(_is_ours, args)) or any(map(_is_ours, kwargs.values())):
            return function(func, *args, **kwargs)
        return func.redispatch(keyset & BELOW_PYTHON_SNAPSHOT, *args, **kwargs)

    return dispatch


def _checked_override(func: OpOverload) -> Callable[..., Any]:
    def dispatch(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_ours(args[0]):
            check_arguments(func, args, kwargs)
        return func.redispatch(keyset & BELOW_PYTHON_SNAPSHOT, *args, **kwargs)

    return dispatch


def _is_ours(value: Any) -> bool:
    """Return whether the value's mode uses our rules; fake tensors of torch's modes keep torch's behavior."""
    return getattr(getattr(value, "fake_mode", None), "uses_rules", False)


PATCHES = LEDGER.add(
    Edit(
        f"the dispatcher of aten, key {PYTHON_SNAPSHOT}: {', '.join(sorted({**_OVERRIDES, **_CHECKED_COMPOSITES}))}",
        _register_overrides,
        when=When.USE,
        versions=None,
        lost="these operators read the data of fake tensors, cannot resize out with symbolic sizes, or take what eager refuses",
    )
)
