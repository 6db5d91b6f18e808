"""Rules for views.

With plain sizes, eager's own C++ code makes the view on meta: torch's Python version gives sizes of 1 another
stride. For contiguous tensors with symbolic sizes, the strides follow from the sizes without further guards.
torch's engine splits and merges dimensions one by one and adds a guard for each comparison, although a
contiguous tensor can be viewed in every shape with as many elements.
"""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch

from fake.kernels.checks.check_registry import bind
from fake.kernels.outputs import all_dense, contiguous_strides, is_symbolic
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.seam.dispatch import check
from fake.seam.fake_tensor import in_kernel_invocation_manager, torch_result, wrap
from fake.seam.symbolic_shapes import Mod, has_unbacked, hint, statically_known_true
from fake.symbols.expr import without_common_factor


@rule("aten::view", "aten::_unsafe_view")
def view(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Answer ``view`` with plain sizes, or of a tensor that is known to be contiguous and not empty.

    Args:
        mode: see ``Rule``.
        func: the overload.
        args: the tensor and the new shape, in which one size may be -1.
        kwargs: empty.

    Raises:
        RuntimeError: the shape has another number of elements (eager's error).
    """
    self, shape = args
    if not is_symbolic(args, kwargs):
        return _run_meta_kernel(mode, func, args, kwargs) if all_dense(args, kwargs) else NotImplemented
    if has_unbacked((self, shape)) or not _is_statically_dense(self):
        return NotImplemented
    sizes = _infer_shape(self, list(shape))
    with mode:
        return self.as_strided(sizes, contiguous_strides(sizes), self.storage_offset())


@rule("aten::diagonal")
def _diagonal(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Keep the storage offset of an empty diagonal, which torch's kernel for symbolic sizes changes."""
    if not is_symbolic(args, kwargs) or has_unbacked((args, kwargs)):
        return NotImplemented
    bound = bind(func, args, kwargs)
    self, offset = bound["self"], bound["offset"]
    rank = self.dim()
    if offset == 0 or not all(-rank <= bound[name] < rank for name in ("dim1", "dim2")):
        return NotImplemented
    rows, columns = bound["dim1"] % rank, bound["dim2"] % rank
    if rows == columns:
        return NotImplemented
    height, width = self.shape[rows] + min(offset, 0), self.shape[columns] - max(offset, 0)
    if torch.sym_min(height, width) > 0:
        return NotImplemented
    kept = [dim for dim in range(rank) if dim not in (rows, columns)]
    sizes = [self.shape[dim] for dim in kept]
    strides = [self.stride(dim) for dim in kept]
    with mode:
        return self.as_strided(
            [*sizes, 0], [*strides, self.stride(rows) + self.stride(columns)], self.storage_offset()
        )


@rule("aten::split.Tensor")
def _split(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Split into equal parts with eager's own code, in one step instead of torch's two."""
    return NotImplemented if is_symbolic(args, kwargs) else _run_meta_kernel(mode, func, args, kwargs)


@rule("aten::rot90")
def _rot90(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """A quarter turn is a transposed view of a flip."""
    bound = bind(func, args, kwargs)
    result, dims = torch_result(mode, func, args, kwargs), bound["dims"]
    if bound["k"] % 2 == 0 or is_symbolic(args, kwargs):
        return result
    with mode:
        return bound["self"].flip(dims[bound["k"] % 4 == 1]).transpose_(*dims)


def _run_meta_kernel(mode: FakeTensorMode, func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return the answer of the C++ kernel for meta tensors."""
    with in_kernel_invocation_manager(mode):
        views = func(*args, **kwargs)
    return wrap(mode, func, args, kwargs, views)


def _is_statically_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is statically known to be non-empty and row-major. Adds no guard."""
    if not all(statically_known_true(size > 0) for size in tensor.shape):
        return False
    expected = contiguous_strides(tensor.shape)
    return all(
        statically_known_true(size == 1) or statically_known_true(step == wanted)
        for size, step, wanted in zip(tensor.shape, tensor.stride(), expected, strict=True)
    )


def _infer_shape(self: torch.Tensor, shape: list[Any]) -> list[Any]:
    """Replace -1 in a shape by a size. Guards only that the numbers of elements agree."""
    inferred = [dim for dim, size in enumerate(shape) if statically_known_true(size == -1)]
    elements = math.prod(self.shape)
    problem = f"shape '{[hint(s) for s in shape]}' is invalid for input of size {hint(elements)}"
    if len(inferred) > 1:
        raise RuntimeError("only one dimension can be inferred")
    if not inferred:
        check(elements == math.prod(shape), lambda: problem)
        return shape
    (dim,) = inferred
    known = math.prod(size for other, size in enumerate(shape) if other != dim)
    check(known != 0, lambda: problem)
    return [*shape[:dim], _exact_quotient(elements, known, problem), *shape[dim + 1 :]]


def _exact_quotient(number: Any, divisor: Any, problem: str) -> Any:
    """Return ``number // divisor``, with a guard that there is no remainder.

    The guard is stated without common factors, so that later divisions can reuse it.
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
