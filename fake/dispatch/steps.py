"""Dispatch on a cache miss: a list of steps, tried in order.

:data:`STEPS`, at the end of the file, is the list, and :func:`dispatch` goes through it. A step takes
``(mode, call)`` and returns the operator's result, or ``NotImplemented`` to try the next step. Meta kernels,
decompositions and the rules of ``torch._subclasses.fake_impls`` are libraries that the steps call; the rules of
``fake.kernels`` come first where those differ from eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fake import kernels
from fake.cache.evaluations import ignore_hint_reads, mark_unreplayable
from fake.cache.replacements import REPLACEMENTS
from fake.dispatch.constants import fold_constants, invalidate_written, lift_constants
from fake.dispatch.refusals import (
    data_dependent_advice,
    eager_errors,
    refuse_arguments,
    refuse_dtypes,
    refuse_in_place,
)
from fake.errors import (
    FallbackNotAllowedError,
    MixedFakeModesError,
    NonFakeInputError,
    UnsupportedOperatorException,
)
from fake.kernels import sparse, views
from fake.kernels.checks.number_checks import convert_scalar_arguments
from fake.kernels.composites import run_composite
from fake.kernels.gradients import STRIDE_DECIDING_OPS, eager_strides
from fake.kernels.structured import structured
from fake.seam import fake_tensor
from fake.seam.autograd_engine import current_autograd_node
from fake.seam.dispatch import (
    HigherOrderOperator,
    OpOverload,
    decomposition_table,
    has_symbols,
    library_utils,
    meta_table,
    registered_fake_kernel as kernel_of_register_fake,
    registered_hop_fake_fns,
    render_call,
)
from fake.seam.dynamo import custom_ops_profiles
from fake.seam.library import running_fake_kernel
from fake.seam.proxy_tensor import is_tracing_graph
from fake.seam.pytree import tree_flatten, tree_unflatten
from fake.seam.symbolic_shapes import TorchShapeEnv as ShapeEnv
from fake.tensors._torch_devices import allow_cuda
from fake.tensors.tensor import adopt


@dataclass
class Call:
    """One operator call as it passes through the steps.

    Attributes:
        func: the operator.
        args, kwargs: its arguments.
        flat, spec: the arguments flattened.
        fakes: the arguments that are fake tensors of the mode.
        has_symbols: whether a size or number is symbolic.
        is_outermost: whether the user made the call, rather than a decomposition.
    """

    func: Any
    args: Any
    kwargs: Any
    flat: list[Any]
    spec: Any
    fakes: list[Any]
    has_symbols: bool
    is_outermost: bool = True


Step = Callable[[Any, Call], Any]


def dispatch(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on fake tensors without consulting the cache.

    Args:
        mode: the mode of the call.
        func: the operator.
        types: the tensor classes involved, as ``__torch_dispatch__`` gets them.
        args: positional arguments.
        kwargs: keyword arguments.

    Returns:
        The fake outputs, or ``NotImplemented`` if an argument is a tensor subclass with its own dispatch.

    Raises:
        NonFakeInputError: an argument holds data, and the mode does not allow that.
        DataDependentOutputException, DynamicOutputShapeException: the result depends on values.
        UnsupportedOperatorException: the operator has no kernel, rule or decomposition.
    """
    flat, spec = tree_flatten((args, kwargs))
    if fake_tensor.check_for_subclass(flat):
        return NotImplemented
    if kwargs and getattr(kwargs.get("device"), "type", "") == "cuda":
        allow_cuda()  # autograd's nodes ask for the device guard where no error can be caught
    fakes = [t for t in flat if mode.is_our_fake(t)]
    symbolic = any(map(has_symbols, fakes)) or any(isinstance(a, torch.SymInt) for a in flat)
    call = Call(func, args, kwargs, flat, spec, fakes, symbolic)
    if mode.propagate_real_tensors:
        result = higher_order(mode, call)
        if result is NotImplemented:
            result = fake_tensor.FakeTensorMode._dispatch_impl(mode, func, types, args, kwargs)
        return adopt(result)
    with mode.one_level_deeper() as call.is_outermost:
        for step in STEPS if call.is_outermost else INNER_STEPS:
            result = step(mode, call)
            if result is not NotImplemented:
                return adopt(result)
    raise UnsupportedOperatorException(func)


def convert_inputs(mode: Any, call: Call) -> None:
    """Convert real tensors to fake ones, if the mode allows it."""
    allowed = fake_tensor.fake_tensor_tls.allow_non_fake_inputs_override
    allowed = mode.allow_non_fake_inputs if allowed is None else allowed
    fakes = []
    for index, value in enumerate(call.flat):
        if not isinstance(value, torch.Tensor):
            continue
        if not mode.is_our_fake(value):
            value = call.flat[index] = _convert(mode, call, value, allowed)
        fakes.append(value)
    call.fakes = fakes
    call.args, call.kwargs = tree_unflatten(call.flat, call.spec)


def _convert(mode: Any, call: Call, value: torch.Tensor, allowed: bool) -> Any:
    if torch.Tag.inplace_view in getattr(call.func, "tags", ()):
        raise AssertionError(
            "Can't call metadata mutating ops on non-Fake Tensor inputs. "
            f"Found in {render_call(call.func, call.args, call.kwargs)}"
        )
    if not allowed:
        if isinstance(value, fake_tensor.FakeTensor) and value.fake_mode is not mode:
            raise MixedFakeModesError(call.func, mode, value.fake_mode)
        raise NonFakeInputError(call.func, call.args, call.kwargs, value)
    return mode.fake_tensor_converter.from_real_tensor(mode, value)


def convert_scalars(mode: Any, call: Call) -> None:
    """Convert numbers to a real dtype, or truncate them, as eager does: torch's Python code refuses them."""
    if any(type(value) in (complex, float) for value in call.flat) and isinstance(call.func, OpOverload):
        call.args, call.kwargs = convert_scalar_arguments(call.func, call.args, call.kwargs)
        call.flat, call.spec = tree_flatten((call.args, call.kwargs))


def higher_order(mode: Any, call: Call) -> Any:
    """Run higher-order operators: control flow, checkpointing and others that take functions."""
    func = call.func
    if func in registered_hop_fake_fns:
        shape_env = mode.shape_env
        with mode, nullcontext() if shape_env is None else shape_env.ignore_fresh_unbacked_symbols():
            return registered_hop_fake_fns[func](*call.args, **call.kwargs)
    rule = getattr(func, "python_key_table", {}).get(fake_tensor.FakeTensorMode)
    if rule is not None:
        with mode.making_torchs_tensors(call.fakes), _temporary_shape_env(mode, func):
            return rule(mode, *call.args, **call.kwargs)
    if isinstance(func, HigherOrderOperator):
        raise UnsupportedOperatorException(func)  # type: ignore[arg-type]
    return NotImplemented


@contextmanager
def _temporary_shape_env(mode: Any, func: Any) -> Iterator[None]:
    """Lend a shape environment to a mode without one: torch's loop rule needs it, but makes no new sizes."""
    if mode.shape_env is not None or func.name() not in ("while_loop", "while_loop_stack_output"):
        yield
        return
    mode.shape_env = ShapeEnv()
    try:
        yield
    finally:
        mode.shape_env = None


def gradient_strides(mode: Any, call: Call) -> Any:
    """Restore eager's strides of a gradient whose formula takes another path for tensors without data."""
    node = current_autograd_node() if call.func in STRIDE_DECIDING_OPS else None
    if node is None or is_tracing_graph():
        return NotImplemented
    result = dispatch(mode, call.func, (), call.args, call.kwargs)
    strides = eager_strides(mode, call.func, node, call.args, result)
    if strides is None:
        return result
    with mode, torch.no_grad():
        return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)


def kernel_rule(mode: Any, call: Call) -> Any:
    """Apply a rule of ``fake.kernels``, if other answers differ from eager. A user's kernel comes first."""
    rule = kernels.find(call.func)
    if rule is None or REPLACEMENTS.includes(call.func):
        return NotImplemented
    if any(t.layout is not torch.strided for t in call.fakes) and not kernels.takes_sparse(call.func):
        return NotImplemented
    independent = call.has_symbols and _is_independent_of_hints(rule, call)
    hint_context = (
        ignore_hint_reads(mode.shape_env) if independent and mode.shape_env is not None else nullcontext()
    )
    with hint_context, eager_errors(call.func):
        return rule(mode, call.func, call.args, call.kwargs)


_HINTS_FOR_ROW_MAJOR = (structured, sparse.mm)
"""Rules that read hints only to see whether their arguments are row-major, and then keep torch's answer."""

_HINTS_FOR_ERRORS = (views.view,)
"""Rules that read hints only for the message of an error."""


def _is_independent_of_hints(rule: Any, call: Call) -> bool:
    """Return whether a rule that reads hints would give the same answer at all other hints."""
    return rule in _HINTS_FOR_ERRORS or (
        rule in _HINTS_FOR_ROW_MAJOR and all(map(_is_row_major_at_all_sizes, call.fakes))
    )


def _is_row_major_at_all_sizes(tensor: Any) -> bool:
    """Return whether each stride *is* the product of the sizes behind it, symbolically, and none can be 0."""
    if tensor.layout is not torch.strided:
        return False
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        length = _expression(size)
        if _expression(stride) != expected or not (length > 0 if type(length) is int else length.is_positive):
            return False
        expected = expected * length
    return True


def _expression(number: Any) -> Any:
    return number if type(number) is int else number.node.expr


def symbolic_fast_rule(mode: Any, call: Call) -> Any:
    """Apply torch's rule for pointwise operators on symbolic sizes: it guards less than a decomposition."""
    if not call.has_symbols or REPLACEMENTS.includes(call.func):
        return NotImplemented
    rule = fake_tensor.fake_impls.get_fast_op_impls().get(call.func)
    return NotImplemented if rule is None else rule(mode, *call.args, **call.kwargs)


def composite_in_inference_mode(mode: Any, call: Call) -> Any:
    """Run a composite operator's C++ code, with views that require gradients. Such operators reach the mode
    only in inference mode."""
    if not torch.is_inference_mode_enabled() or call.has_symbols or REPLACEMENTS.includes(call.func):
        return NotImplemented
    if not isinstance(call.func, OpOverload) or call.func.namespace != "aten":
        return NotImplemented
    with eager_errors(call.func), mode.still_outermost(call.is_outermost):
        return run_composite(mode, call.func, call.args, call.kwargs)


def decomposition(mode: Any, call: Call) -> Any:
    """Decompose operators without a Python meta kernel by torch's table, then composite operators."""
    func = call.func
    if func in meta_table or mode.cpp_meta_supports_symint(func):
        return NotImplemented
    if call.has_symbols and func in getattr(mode, "_unbacked_special_fake_handling_ops", ()):
        return NotImplemented
    table = decomposition_table
    if (
        func in table
        and not REPLACEMENTS.includes(func)
        and (
            call.has_symbols
            or (
                fake_tensor.torch_decomp_decompositions(func)
                and not any(fake_tensor.is_sparse_any(t) for t in call.fakes)
            )
        )
    ):
        with mode, eager_errors(func):
            return table[func](*call.args, **call.kwargs)
    with mode, eager_errors(func), mode.still_outermost(call.is_outermost):
        return func.decompose(*call.args, **call.kwargs)


def prim_kernel(mode: Any, call: Call) -> Any:
    """Run the meta function that ``prims`` bring themselves; it handles devices."""
    func = call.func
    if "prims::" not in func._schema.name or not hasattr(func, "prim_meta_impl"):
        return NotImplemented
    with mode:
        return func.prim_meta_impl(*call.args, **call.kwargs)


def _mark_hint_reads(mode: Any, call: Call) -> None:
    """Bar reuse of a user kernel's result for other symbols: with symbolic sizes it may read hints."""
    if call.has_symbols and mode.shape_env is not None and not library_utils.is_builtin(call.func):
        mark_unreplayable(mode.shape_env, "a kernel that may read hints")


def operator_profile(mode: Any, call: Call) -> Any:
    """Use the profiles that draft export collected from real runs."""
    profiles: Any = custom_ops_profiles()
    if profiles is None or call.func not in profiles.data:
        return NotImplemented
    _mark_hint_reads(mode, call)
    return profiles.generic_fake_kernel(call.func, mode, *call.args, **call.kwargs)


def registered_fake_kernel(mode: Any, call: Call) -> Any:
    """Run the kernel that an operator's author registered with ``register_fake``."""
    kernel: Any = kernel_of_register_fake(call.func)
    if kernel is None:
        return NotImplemented
    _mark_hint_reads(mode, call)
    with running_fake_kernel(mode, call.func), mode:
        return kernel(*call.args, **call.kwargs)


def special_rule(mode: Any, call: Call) -> Any:
    """Apply torch's rules: constructors, device moves, data-dependent operators, indexing, copies."""
    for applies, rule in fake_tensor.fake_impls.op_implementations_checks:
        if applies(call.func):
            with eager_errors(call.func), data_dependent_advice(call.func):
                result = rule(mode, call.func, *call.args, **call.kwargs)
            if result is not NotImplemented:
                return result
    return NotImplemented


def meta_kernel(mode: Any, call: Call) -> Any:
    """Run the operator on the meta device, then set the device of the outputs."""
    func = call.func
    if not fake_tensor.fake_impls.has_meta(func):
        return _without_meta_kernel(mode, call, None)
    try:
        with fake_tensor.in_kernel_invocation_manager(mode), eager_errors(func):
            result = func(*call.args, **call.kwargs)
    except NotImplementedError as missing:
        return _without_meta_kernel(mode, call, missing)
    return mode.wrap_meta_outputs_with_default_device_logic(
        result, func, call.flat, device=call.kwargs.get("device")
    )


def _without_meta_kernel(mode: Any, call: Call, error: RuntimeError | None) -> Any:
    """Handle operators without a meta kernel: those that return nothing, or their ``out=``, need none; others
    run for real, if the mode allows it."""
    func = call.func
    if library_utils.is_builtin(func) and not func._schema.returns:
        return (
            None  # it writes to its arguments, whose metadata it leaves alone: fused optimizers, assertions
        )
    if library_utils.can_generate_trivial_fake_impl(func):
        return library_utils.generate_trivial_fake_impl(func, *call.args, **call.kwargs)
    if not mode.allow_fallback_kernels and not call.has_symbols and fake_tensor.fallback_is_possible(func):
        raise FallbackNotAllowedError(func)
    if call.has_symbols or not mode.can_run_unsafe_fallback(func):
        raise UnsupportedOperatorException(func)
    error = error or UnsupportedOperatorException(func)
    return fake_tensor.run_fallback_kernel(mode, func, call.flat, call.spec, error)


def _as_step(change: Callable[[Any, Call], None]) -> Step:
    """Make a step that returns no result: it modifies the call, or refuses it."""

    def step(mode: Any, call: Call) -> Any:
        change(mode, call)
        return NotImplemented

    return step


_REFUSALS = (
    _as_step(refuse_arguments),
    # After the argument checks, as this tries small tensors: some kernels write out of bounds for bad ones.
    _as_step(refuse_dtypes),
    _as_step(partial(refuse_in_place, dispatch=dispatch)),
)

STEPS: tuple[Step, ...] = (
    lift_constants,
    _as_step(convert_inputs),
    _as_step(convert_scalars),
    fold_constants,
    *_REFUSALS,
    higher_order,
    _as_step(invalidate_written),
    gradient_strides,
    operator_profile,
    registered_fake_kernel,
    kernel_rule,
    symbolic_fast_rule,
    composite_in_inference_mode,
    decomposition,
    prim_kernel,
    special_rule,
    meta_kernel,
)
"""The steps, in the order in which they are tried."""

INNER_STEPS = tuple(step for step in STEPS if step not in (*_REFUSALS, gradient_strides))
"""The steps for operators that another operator's kernel or decomposition calls."""
