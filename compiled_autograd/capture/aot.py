"""Inline backward graphs of ``torch.compile``'d functions into the capture of a pass through them.

AOTAutograd keeps the backward graph that it passed to its compiler in the custom Function of a compiled
function. `inline` records that graph as steps of the capture, instead of a call of the compiled backward, so
that one compiler sees the whole pass. If that is not possible, it returns the reason, and the call stays.

A graph may be needed in both forms: `reason_to_call` tells if a pass, given its settings, must run the one
with calls.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from compiled_autograd import _torch
from compiled_autograd.capture.captured_steps import (
    Constant,
    Inlined,
    InputValue,
    Kind,
    Step,
    SumValue,
    Value,
)
from compiled_autograd.runtime import aot_functional, functional, validation
from fake.error_text import describe_error

aten = torch.ops.aten
_CHECKS = (aten._assert_scalar.default, aten.sym_constrain_range_for_size.default)
"""Operators without effects that FX considers impure."""


def is_compiled(ctx: Any) -> bool:
    """Whether ``ctx`` is the context of a function made by AOTAutograd."""
    return _torch.is_compiled_function(_torch.function_of(ctx))


def reason_to_call(deterministic: bool) -> str | None:
    """Return why a pass must run with calls under the current settings, or None to inline.

    ``deterministic`` is torch's setting at the time of capture.
    """
    if torch.is_grad_enabled():
        return "the result is differentiated again"
    if _torch.autocast_enabled():
        return "autocast is on in the backward pass"
    if _torch.inside_functorch():
        return "inside a functorch transform"
    if torch.are_deterministic_algorithms_enabled() is not deterministic:
        return "torch.use_deterministic_algorithms was called since"
    return None


class _CannotInline(Exception):
    """The call cannot be inlined; the message says why."""


@dataclass
class CompiledCall:
    """A call of a compiled backward that a capture recorded, with its inputs.

    ``grads`` holds values, `functional.MISSING`, or the (sizes, dtype, device) of zeros. ``saved`` holds the
    saved tensors, as (hook, packed) if saved-tensor hooks packed them, ``numbers`` the saved sizes and
    ``objects`` everything else that was saved. ``context`` is the graph input that holds the context itself,
    and ``state`` the one that holds the hooks that Dynamo traced into the function.
    """

    ctx: Any
    context: InputValue
    grads: Sequence[Any]
    saved: Sequence[Any]
    numbers: Sequence[Any]
    objects: Sequence[Any]
    outputs: int
    node: int
    state: InputValue | None = None
    steps: list[Step] = field(default_factory=list)

    @property
    def function(self) -> Any:
        """The custom Function made by AOTAutograd."""
        return _torch.function_of(self.ctx)

    def step(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        label: str,
        kind: Kind = Kind.PURE,
        takes_node: bool = False,
    ) -> Step:
        """Append a step to the body.

        Args:
            target: the function that the step calls.
            args: its arguments; results of other steps are `Value`.
            label: the name of its node in the graph.
            kind: whether it is pure, runs Python, or runs an opaque C++ node.
            takes_node: whether ``target`` gets the index of the autograd node as ``node=``.
        """
        step = Step(target, args, kind, self.node, label, takes_node)
        self.steps.append(step)
        return step


def inline(call: CompiledCall) -> Inlined | str:
    """Return the body of ``call``, or why the call stays."""
    try:
        module = _backward_module(call.function)
        if isinstance(module, str):
            return module
        return _reason_not_to_inline(call, module) or _inlined(call, module)
    except _CannotInline as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - C++ has tokens in its nodes: the capture must end, and the call is right
        return f"its backward graph cannot be read: {describe_error(error)}"


_modules: "weakref.WeakKeyDictionary[Any, fx.GraphModule | str]" = weakref.WeakKeyDictionary()


def _backward_module(function: Any) -> fx.GraphModule | str:
    """Return the backward graph of ``function``. Cached, because reading one from a compile cache is slow."""
    module = _modules.get(function)
    if module is None:
        module = _modules[function] = _torch.backward_module(function)
    return module


def _reason_not_to_inline(call: CompiledCall, module: fx.GraphModule) -> str | None:
    metadata = call.function.metadata
    if metadata.num_backward_tokens:
        return "it has side effects that are ordered by tokens"
    if metadata.is_rng_op_functionalized or metadata.num_graphsafe_rng_states:
        return "it carries the state of a random number generator"
    if _torch.has_seeded_random_ops(module):
        return "it draws the forward's random numbers again, from a seed that only compiled code reads"
    if _torch.inside_functorch():
        return "inside a functorch transform"
    if torch.are_deterministic_algorithms_enabled() and metadata.deterministic is False:
        return "torch.use_deterministic_algorithms was called since"
    for node in module.graph.nodes:
        if node.op in ("call_module", "call_method"):
            return f"its backward graph calls a module ({node.target})"
        if getattr(node.target, "namespace", None) == "streams":
            return "it uses streams"
    return None


def _inlined(call: CompiledCall, module: fx.GraphModule) -> Inlined:
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    saved = [_unpacked(call, value) for value in call.saved]
    subclasses = call.function.maybe_subclass_metadata is not None
    if subclasses:
        arguments = _unwrapped_arguments(call, saved, len(placeholders) - (call.state is not None))
    else:
        arguments = _arguments(call, saved)
    if call.state is not None:  # AOTAutograd's calling convention: the last one
        arguments.append(call.state)
    if len(arguments) != len(placeholders):
        raise _CannotInline(
            f"its backward graph takes {len(placeholders)} values, of which {len(arguments)} are known"
        )
    results = _copy_graph(call, module, dict(zip(placeholders, arguments, strict=True)))
    if subclasses:
        step = call.step(aot_functional.epilogue, (call.context, results), "epilogue", Kind.PYTHON, True)
        results = [Value(step, index) for index in range(call.outputs)]
    if len(results) != call.outputs:
        raise _CannotInline(f"its backward graph returns {len(results)} gradients for {call.outputs} inputs")
    return Inlined(call.steps, results)


def _unpacked(call: CompiledCall, value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    return Value(call.step(functional.call_unpack_hook, value, "unpack", Kind.PYTHON, True))


def _unwrapped_arguments(call: CompiledCall, saved: list[Any], count: int) -> list[Any]:
    """Return the arguments of a backward graph that was traced on the inner tensors of subclasses."""
    grads = [functional.ZEROS if isinstance(grad, tuple) else grad for grad in call.grads]
    step = call.step(
        aot_functional.prologue, (call.context, tuple(saved), grads), "prologue", Kind.PYTHON, True
    )
    return [*call.numbers, *(Value(step, index) for index in range(len(call.numbers), count))]


class _GradientPlaceholder:
    """Placeholder for a gradient while AOTAutograd's own code orders the arguments."""

    def __init__(self, position: int) -> None:
        self.position = position


def _arguments(call: CompiledCall, saved: list[Any]) -> list[Any]:
    """Return the arguments of a backward graph on plain tensors."""
    stashed = aot_functional.stashed_tensors(call.ctx)
    if stashed:
        step = call.step(aot_functional.stashed_tensors, (call.context,), "stashed_tensors", Kind.READ)
        saved = [*saved, *(Value(step, index) for index in range(len(stashed)))]
    placeholders = [_GradientPlaceholder(position) for position in range(len(call.grads))]
    with torch.no_grad():
        ordered = _torch.prologue_arguments(call.function, saved, call.numbers, call.objects, placeholders)
    formats = iter(_torch.tangent_formats(call.function.metadata))
    return [
        _tangent(call, call.grads[value.position], *next(formats))
        if isinstance(value, _GradientPlaceholder)
        else value
        for value in ordered
    ]


def _tangent(call: CompiledCall, grad: Any, memory_format: Any, size: Any, stride: Any) -> Any:
    if grad == functional.MISSING:
        return None
    missing = None
    if isinstance(grad, tuple):
        grad = Value(call.step(aot_functional.zeros, grad, "zeros"))
    else:
        missing = _gradient_metadata(grad)
    layout = None if size is None else tuple(size), None if stride is None else tuple(stride)
    return Value(call.step(aot_functional.tangent, (grad, missing, memory_format, *layout), "tangent"))


def _gradient_metadata(value: Any) -> tuple[Any, ...] | None:
    """Return sizes, dtype and device of a gradient, or None if it can never be missing at run time."""
    if isinstance(value, SumValue):
        found = [_gradient_metadata(part) for part in value.parts]
        return None if None in found else found[0]
    if isinstance(value, InputValue):
        return None
    step, index = value.step, value.index
    if step.inlined is not None:
        return None
    if step.produces:
        return step.produces[index]
    if step.target is validation.validate:
        dtype, device, sizes = step.args[3:]
        return sizes, dtype, device
    if step.target is validation.validate_outputs:
        known = validation.plain_metadata(step.args[2][index])
        if known is not None:
            return known[2], known[0], known[1]
    elif step.target in (functional.call_tensor_pre_hook, functional.call_cpp_pre_hook):
        return _gradient_metadata(step.args[1])
    elif step.target in (functional.call_pre_hook, functional.call_post_hook):
        return _gradient_metadata(step.args[1][index])
    raise _CannotInline("the shape of a gradient that flows into it is not known")


def _copy_graph(call: CompiledCall, module: fx.GraphModule, values: dict[fx.Node, Any]) -> list[Any]:
    """Record the nodes of ``module`` with the arguments in ``values``, and return its outputs."""
    prefix = f"aot{call.function._aot_id}"
    for node in module.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "get_attr":
            attribute = functools.reduce(getattr, node.target.split("."), module)
            values[node] = Constant(f"{prefix}_{node.target}".replace(".", "_"), attribute)
            continue
        args, kwargs = _substitute_nodes((node.args, node.kwargs), values)
        if node.op == "output":
            return list(args[0])
        target = aot_functional.target_on_real_tensors(node)
        changes = node.target not in _CHECKS and node.is_impure(impure_random=False)
        traced_hook = call.state is not None and any(value is call.state for value in kwargs.values())
        kind = Kind.PYTHON if changes or traced_hook else Kind.PURE
        step = call.step(target, args, f"{prefix}_{node.name}", kind)
        step.kwargs = kwargs
        step.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
        values[node] = Value(step)
    raise AssertionError("a graph has an output node")


def _substitute_nodes(argument: Any, values: dict[fx.Node, Any]) -> Any:
    """Replace nodes in an argument by their values, and FX's immutable containers by plain ones."""
    if isinstance(argument, fx.Node):
        return values[argument]
    if isinstance(argument, list):
        return [_substitute_nodes(element, values) for element in argument]
    if isinstance(argument, tuple):
        return tuple(_substitute_nodes(element, values) for element in argument)
    if isinstance(argument, dict):
        return {key: _substitute_nodes(element, values) for key, element in argument.items()}
    if isinstance(argument, slice):
        return slice(
            *(_substitute_nodes(end, values) for end in (argument.start, argument.stop, argument.step))
        )
    return argument
