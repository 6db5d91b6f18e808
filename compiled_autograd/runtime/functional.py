"""What a captured graph calls at run time: hooks, Python backwards and accumulation, with eager's semantics.

Each function follows the C++ of the autograd engine: ``python_hook.cpp`` (which results of a hook are
accepted), ``python_function.cpp`` (which gradients a custom Function may return), ``input_buffer.cpp`` (how
gradients add up) and ``accumulate_grad.h`` (when ``.grad`` may steal a buffer). Error messages are eager's,
because callers match on them.

Any gradient here may be ``None``, which is eager's undefined tensor.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from compiled_autograd import _torch
from compiled_autograd.runtime.node_order import edge_of
from compiled_autograd.runtime.running import running

Grad = torch.Tensor | None
ZEROS = "zeros"
"""Marks, in the arguments of `call_backward`, a gradient that C++ found missing and materialized."""
MISSING = "missing"
"""Marks one that C++ found missing and did not materialize."""


def _hook_name(hook: Any) -> str:
    return getattr(hook, "__name__", "<unknown>")


def _check_hook_result(original: Any, result: Any, hook: Any) -> None:
    if result is None:
        return
    if original is None:
        raise RuntimeError("can't replace a None gradient with a non-None value")
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"expected Variable, but hook returned '{type(result).__name__}'")
    prefix = f"hook '{_hook_name(hook)}' has changed the "
    if original.type() != result.type():
        raise RuntimeError(f"{prefix}type of value (was {original.type()} got {result.type()})")
    if original.shape != result.shape:
        raise RuntimeError(f"{prefix}size of value")


def _check_hook_results(originals: tuple[Grad, ...], results: Any, hook: Any) -> None:
    if not isinstance(results, tuple):
        raise TypeError(f"expected tuple, but hook returned '{type(results).__name__}'")
    if len(results) != len(originals):
        raise RuntimeError(
            f"hook '{_hook_name(hook)}' has returned an incorrect number of values "
            f"(got {len(results)}, but expected {len(originals)})"
        )
    for original, result in zip(originals, results, strict=True):
        _check_hook_result(original, result, hook)


def call_tensor_pre_hook(hook: Callable[..., Any], grad: Grad, *, node: int) -> Grad:
    """Call a ``tensor.register_hook`` (or ``retain_grad``) hook: it may replace a gradient, None keeps it.

    Args:
        hook: the user's hook.
        grad: the tensor's gradient.
        node: the index of the autograd node.

    Returns:
        The gradient to continue with.
    """
    if not running.enter(node, "tensor pre-hook", hook):
        return grad
    result = hook(grad)
    if result is None or result is grad:
        return grad
    _check_hook_result(grad, result, hook)
    return result


def call_cpp_pre_hook(hook_id: int, grad: Any, *, node: int) -> Grad:
    """Call a tensor hook registered in C++, which the engine holds for the duration of this call.

    Args:
        hook_id: the engine's id of the hook.
        grad: the tensor's gradient.
        node: the index of the autograd node.
    """
    running.enter(node)
    return _torch.call_cpp_tensor_pre_hooks(hook_id, grad)


def call_pre_hook(hook: Callable[..., Any], grads: Sequence[Grad], *, node: int) -> Sequence[Grad]:
    """Call a hook of ``node.register_prehook``. It may replace all gradients that enter a node.

    Args:
        hook: the user's hook.
        grads: the gradients that enter the node.
        node: the index of the autograd node.

    Returns:
        The gradients to continue with.
    """
    return _call_grads_hook("pre-hook", node, hook, grads)


def _call_grads_hook(
    phase: str, node: int, hook: Callable[..., Any], grads: Sequence[Grad], *more: tuple[Grad, ...]
) -> Sequence[Grad]:
    """Return the result of a hook that gets all of ``grads``. None keeps them."""
    if not running.enter(node, phase, hook):
        return grads
    originals = tuple(grads)
    results = hook(originals, *more)
    if results is None or results is originals:
        return grads
    _check_hook_results(originals, results, hook)
    return results


def call_post_hook(
    hook: Callable[..., Any], outputs: Sequence[Grad], inputs: Sequence[Grad], *, node: int
) -> Sequence[Grad]:
    """Call a hook of ``node.register_hook``. It may replace all gradients that leave a node.

    Args:
        hook: the user's hook.
        outputs: the gradients that leave the node.
        inputs: those that entered it.
        node: the index of the autograd node.

    Returns:
        The gradients to continue with.
    """
    return _call_grads_hook("post-hook", node, hook, outputs, tuple(inputs))


def call_post_accumulate_grad_hook(
    hook: Callable[..., Any], variable: torch.Tensor, *, node: int
) -> torch.Tensor:
    """Call a hook of ``tensor.register_post_accumulate_grad_hook`` on the leaf after its ``.grad`` is set.

    Args:
        hook: the user's hook.
        variable: the leaf.
        node: the index of the autograd node.

    Returns:
        The leaf.

    Raises:
        RuntimeError: if the hook returns another tensor.
    """
    if not running.enter(node, "post-accumulate hook", hook):
        return variable
    result = hook(variable)
    if result is not None and result is not variable:
        raise RuntimeError("Tensor post accumulate grad hooks should return None.")
    return variable


def call_unpack_hook(hook: Callable[..., Any], packed: Any, *, node: int) -> torch.Tensor:
    """Call the unpack hook of a saved tensor, when the node that saved it runs.

    Args:
        hook: the user's hook.
        packed: what the pack hook returned.
        node: the index of the autograd node.

    Returns:
        The saved tensor.
    """
    running.enter(node)
    return hook(packed)


class _Context:
    """A custom Function's context after C++ released its saved tensors: the real context, plus those tensors.

    It reports the real class, and forwards everything else to the real context. When the backward ends, the
    tensors are dropped, so that a stashed context raises the same error as in eager.
    """

    __slots__ = ("_real", "_saved")

    def __init__(self, real: Any, saved: tuple[Any, ...]) -> None:
        object.__setattr__(self, "_real", real)
        object.__setattr__(self, "_saved", saved)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_real"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._real, name)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._real

    def __hash__(self) -> int:
        return hash(self._real)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return type(self._real)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        saved = self._saved
        if saved is None:
            return self._real.saved_tensors
        return tuple(unpack(value) for value in saved)

    @property
    def saved_variables(self) -> tuple[Any, ...]:
        warnings.warn(
            "'saved_variables' is deprecated; use 'saved_tensors'", DeprecationWarning, stacklevel=2
        )
        return self.saved_tensors

    def maybe_clear_saved_tensors(self) -> None:
        object.__setattr__(self, "_saved", None)
        self._real.maybe_clear_saved_tensors()


def unpack(value: Any) -> Any:
    """Return a saved tensor. A packed one, (hook, packed), is unpacked at each access."""
    if isinstance(value, tuple):
        hook, packed = value
        return hook(packed)
    return value


def materialize(ctx: Any, grads: Sequence[Any]) -> tuple[Grad, ...]:
    """Return the engine's gradients for a custom backward: zeros for missing ones if it wants them."""
    wanted = _torch.materializes_grads(ctx)
    result: list[Grad] = []
    for position, grad in enumerate(grads):
        if isinstance(grad, str) and grad == MISSING:
            grad = None
        elif isinstance(grad, str) or (grad is None and wanted and grads_may_be_materialized(ctx, position)):
            metadata = ctx._input_metadata[position]
            grad = torch.zeros(tuple(metadata.shape), dtype=metadata.dtype, device=metadata.device)
        result.append(grad)
    return tuple(result)


def grads_may_be_materialized(ctx: Any, position: int) -> bool:
    """Whether eager has the metadata to create zeros for the output at ``position``."""
    try:
        metadata = ctx._input_metadata[position]
        return isinstance(metadata.dtype, torch.dtype)
    except (RuntimeError, IndexError):
        return False


def _check_backward_results(ctx: Any, results: Any, is_tensor_input: Sequence[bool]) -> tuple[Grad, ...]:
    """Check, like ``PyNode::to_variable_list``, how many gradients a backward returns, and of what kind."""
    if not isinstance(results, tuple):
        results = tuple(results) if isinstance(results, list) else (results,)
    expected = len(is_tensor_input)
    if len(results) > expected and all(extra is None for extra in results[expected:]):
        results = results[:expected]
    name = type(ctx).__name__
    if len(results) != expected:
        raise RuntimeError(
            f"function {name} returned an incorrect number of gradients (expected {expected}, got {len(results)})"
        )
    for position, (result, is_tensor) in enumerate(zip(results, is_tensor_input, strict=True)):
        if result is None:
            continue
        if not is_tensor:
            raise RuntimeError(
                f"function {name} returned a gradient different than None at position {position + 1}, "
                "but the corresponding forward input was not a Variable"
            )
        if not isinstance(result, torch.Tensor):
            raise RuntimeError(f"expected Variable or None (got {type(result).__name__})")
    return results


def call_backward(
    ctx: Any, saved: tuple[Any, ...], grads: Sequence[Any], is_tensor_input: Sequence[bool], *, node: int
) -> tuple[Grad, ...]:
    """Call a Python custom Function's backward: one gradient, or None, per argument of its forward.

    Args:
        ctx: the autograd node.
        saved: the saved tensors, or (hook, packed) pairs.
        grads: one gradient, None, or ``"zeros"`` per output of the forward.
        is_tensor_input: per argument of the forward, whether it was a tensor.
        node: the index of the autograd node.
    """
    running.enter(node)
    view: Any = ctx if running.keeps_graph() else _Context(ctx, saved)
    del saved
    arguments = materialize(ctx, grads)
    del grads
    try:
        # Use the method of the node's class, like the engine, so that a subclass's own apply is honored.
        if getattr(_torch.function_of(ctx), "boxed_grads_call", False):
            boxed = list(arguments)
            del arguments
            results = _torch.BackwardFunction.apply_boxed(view, boxed)
        else:
            results = _torch.BackwardFunction.apply(view, *arguments)
    finally:
        if view is not ctx:
            object.__setattr__(view, "_saved", None)
    return _check_backward_results(ctx, results, is_tensor_input)


def accumulate(left: Grad, right: Grad) -> Grad:
    """Add two gradients that flow into the same input of a node."""
    if left is None:
        return right
    if right is None:
        return left
    if left.layout is torch.sparse_coo and right.layout is torch.strided:
        return right + left
    return left + right


# References: the caller's variable, this function's parameter, and the argument of getrefcount.
_OWNED_BY_CALLER_ONLY = 3
# References: the sparse tensor, and the Python object used for the query.
_OWNED_BY_SPARSE_ONLY = 2


def accumulate_grad(variable: torch.Tensor, grad: Grad, has_post_hooks: bool, node: int) -> None:
    """Add ``grad`` to ``variable.grad``, in place or by stealing the buffer whenever eager does.

    Args:
        variable: the leaf.
        grad: its gradient in this pass.
        has_post_hooks: whether hooks see the leaf afterwards.
        node: the index of the autograd node.
    """
    if grad is None:
        return
    running.enter(node)
    before = variable.grad
    if (
        before is None
        and sys.getrefcount(grad) <= _OWNED_BY_CALLER_ONLY
        and _torch.use_count(grad) <= 1
        and type(grad) is torch.Tensor
        and not torch.is_grad_enabled()
        and variable.requires_grad
        and variable.grad_fn is None
        and grad.dtype is variable.dtype
    ):
        if grad.layout is torch.strided:
            if _same_dense_layout(grad, variable):
                variable.grad = grad
                return
        elif grad.layout is torch.sparse_coo and _owns_indices_and_values(grad):
            variable.grad = torch.sparse_coo_tensor(
                grad._indices(),
                grad._values(),
                grad.shape,
                is_coalesced=grad.is_coalesced(),
                check_invariants=False,
            )
            return
    (updated,) = _torch.functional_operators.AccumulateGrad([grad], variable, before, has_post_hooks)
    if updated is before:
        return
    try:
        variable.grad = updated
    except RuntimeError:
        # C++ sets a .grad of any layout, Python's setter does not. So let the leaf's own node do it.
        if variable._post_accumulate_grad_hooks:
            raise
        edge_of(variable)[0](grad)


def _same_dense_layout(grad: torch.Tensor, variable: torch.Tensor) -> bool:
    """Check the cheap part of ``grad_layout_contract.h``: both are dense, with the same strides."""
    strides = grad.stride()
    if strides != variable.stride():
        return False
    return grad.is_contiguous() or sorted(strides) == sorted(_dense_strides(grad))


def _dense_strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides of a dense tensor with this one's dimension order."""
    strides, step = [0] * tensor.dim(), 1
    for dim in sorted(range(tensor.dim()), key=tensor.stride):
        strides[dim] = step
        step *= tensor.shape[dim]
    return strides


def _owns_indices_and_values(grad: torch.Tensor) -> bool:
    return all(
        part.is_contiguous() and _torch.use_count(part) <= _OWNED_BY_SPARSE_ONLY
        for part in (grad._indices(), grad._values())
    )


SPLIT_NODES = {"SplitBackward0": True, "UnsafeSplitBackward0": True, "UnbindBackward0": False}
"""Nodes of operators with a size-dependent number of chunks; whether chunk size is an argument."""


def all_chunks(grads: Sequence[Grad], dim: int, chunk_size: int, sizes: Sequence[int]) -> Sequence[Grad]:
    """Return ``grads``, padded with None to one per chunk of a tensor of ``sizes`` split along ``dim``.

    Args:
        grads: the available gradients.
        dim: the dimension that was split.
        chunk_size: the size of a chunk along ``dim``; the last one may be smaller.
        sizes: the shape of the tensor that was split.
    """
    count = max(1, -(-sizes[dim] // max(1, chunk_size)))
    return [*grads[:count], *[None] * (count - len(grads))]


def copy_slices_prologue(grads: Sequence[Any], *geometry: Any) -> Sequence[Grad]:
    """Run the first half of the node that an in-place operation on a view puts into its base's history."""
    if grads[0] is None:
        return (None, None, None)
    return _torch.copy_slices_prologue(grads, *geometry)


def copy_slices_epilogue(
    needs_input_grad: Sequence[bool], result: Any, grads: Sequence[Grad], grad_slice: Any
) -> Sequence[Grad]:
    """Run the second half: write the view's gradient back into the base's.

    Args:
        needs_input_grad: for each gradient that the view's node returns, whether it is needed.
        result: the gradient of the base.
        grads: the gradients returned by the view's node.
        grad_slice: the view of ``result`` that corresponds to it.
    """
    if result is None:
        return [None] * len(needs_input_grad)
    return _torch.copy_slices_epilogue(needs_input_grad, result, grads, grad_slice)
