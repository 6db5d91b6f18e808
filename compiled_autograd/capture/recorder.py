"""The object that the C++ engine hook calls to record a backward pass that it has no graph for.

C++ walks the autograd nodes and calls one method here per action. Empty tokens stand for tensors, and
symbolic numbers for sizes and scalars. Each call appends `Step` objects; nothing is computed. No method may
raise: C++ has swapped the nodes' saved tensors for tokens and would not restore them. So what cannot be
captured is noted, and `end_capture` raises once all nodes are restored.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from compiled_autograd import _torch
from compiled_autograd.capture.aot import CompiledCall, inline, is_compiled
from compiled_autograd.capture.captured_steps import (
    CapturedNode,
    Inlined,
    InputValue,
    Kind,
    Step,
    SumValue,
    Value,
)
from compiled_autograd.capture.symbols import SymbolicNode
from compiled_autograd.errors import RefusedError
from compiled_autograd.runtime import aot_functional, functional, validation
from compiled_autograd.runtime.node_order import WalkedNode


class Capture:
    """The recording of one walk of the engine."""

    def __init__(self) -> None:
        self.nodes: list[CapturedNode] = []
        self.walked: list[WalkedNode] | None = None
        self.outputs: list[Any] = []
        self.input_metadata: list[tuple[Any, ...]] = []
        self.reasons: list[str] = []
        self.refusal: str | None = None
        self.inlined: list[str] = []
        """Compiled functions whose backward graph was inlined into this capture."""
        self.called: list[tuple[str, str]] = []
        """Compiled functions whose backward remains a call, and why."""
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self.started = time.perf_counter()


def _raise_capture_ended(*_: Any) -> Any:
    raise AssertionError("a capture is over, and its recorder is asked for more")


class _SwallowOps(_torch.TorchDispatchMode):
    """Suppress the zeros that C++ creates, while capturing, for missing gradients of Python Functions."""

    def __init__(self) -> None:
        super().__init__()
        self.zeros: list[tuple[torch.Tensor, tuple[Any, ...]]] = []
        """Stand-ins for zeros, with their sizes, dtype and device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = torch.empty(0)
        if func is torch.ops.aten.zeros.default and kwargs:
            self.zeros.append((result, (args[0], kwargs.get("dtype"), str(kwargs.get("device")))))
        return result

    def metadata_of(self, grad: Any) -> tuple[Any, ...] | None:
        """Return sizes, dtype and device of zeros made by C++."""
        return next((metadata for placeholder, metadata in self.zeros if placeholder is grad), None)


_CONSTANTS = {type(None), int, float, bool, str, torch.device, torch.dtype}


class PassRecorder:
    """Records one backward pass, in the place of torch's ``AutogradCompilerInstance``.

    C++ calls the methods in the order of the protocol.
    ``walk()`` returns the nodes that this pass runs, or None if they are unknown. ``finish(capture)`` turns a
    complete capture into ``(runtime_wrapper, compiled_fn)``.
    """

    def __init__(
        self,
        walk: Callable[[], list[WalkedNode] | None],
        finish: Callable[[Capture], tuple[Callable[..., Any], Callable[..., Any]]],
    ) -> None:
        self._walk = walk
        self._finish = finish
        self.capture = Capture()
        self._values: dict[int, Any] = {}
        self._tokens: list[torch.Tensor] = []
        self._mode: _SwallowOps | None = None
        self._node = CapturedNode(-1, "inputs")
        self._chunks: Step | None = None

    # Tokens and values

    def _token(self, value: Any) -> torch.Tensor:
        if self._mode is None:
            token = torch.empty(0)
        else:
            with _torch.disable_modes():
                token = torch.empty(0)
        self._tokens.append(token)
        self._values[id(token)] = value
        return token

    def _value(self, argument: Any) -> Any:
        """Return the value that an argument from C++ stands for. Constants stand for themselves."""
        kind = type(argument)  # hot: called about ten times per node, so the most frequent cases come first
        if kind in _CONSTANTS:
            return argument
        if kind is list:
            return [part if type(part) in _CONSTANTS else self._value(part) for part in argument]
        if kind is torch.Tensor and (value := self._values.get(id(argument))) is not None:
            return value
        if isinstance(argument, torch.Tensor):
            value = self._values.get(id(argument))
            if value is None:
                self._refuse(f"{self._node.name} made a tensor while it was captured")
            return value
        if isinstance(argument, (list, tuple)):
            values = [self._value(element) for element in argument]
            return values if isinstance(argument, list) else tuple(values)
        if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            node = argument.node
            if isinstance(node, SymbolicNode):
                return node.value
            self._refuse(f"{self._node.name} uses a size of another tracer")
            return 0
        return argument

    def _refuse(self, reason: str) -> None:
        if self.capture.refusal is None:
            self.capture.refusal = reason

    def _step(
        self, target: Any, args: tuple[Any, ...], kind: Kind, label: str, takes_node: bool = False
    ) -> Step:
        step = Step(target, args, kind, self._node.index, label, takes_node)
        self._node.steps.append(step)
        return step

    def _tuple_step(
        self, target: Any, args: tuple[Any, ...], count: int, kind: Kind, label: str, takes_node: bool = False
    ) -> list[torch.Tensor]:
        step = self._step(target, args, kind, label, takes_node)
        return [self._token(Value(step, index)) for index in range(count)]

    def _record_arithmetic(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Value:
        name = getattr(function, "__name__", "arithmetic").strip("_")
        return Value(self._step(function, args, Kind.PURE, f"size_{name}"))

    def _symbolic_number(self, number: float | int, source: str, index: int) -> Any:
        kind = "int" if isinstance(number, int) else "float"
        node = SymbolicNode(InputValue(source, index), number, kind, self._record_arithmetic, self._refuse)
        return torch.SymInt(node) if kind == "int" else torch.SymFloat(node)

    # The protocol: start

    def begin_capture(
        self,
        inputs: Sequence[torch.Tensor],
        sizes: Sequence[int],
        scalars: Sequence[int | float] = (),
        origins: Any = None,
        accumulate_grad: bool = True,
        check_nans: bool = False,
    ) -> tuple[str, list[torch.Tensor], list[Any], list[Any]]:
        """Begin a pass. Return its name, and stand-ins for its inputs, sizes and scalars.

        Args:
            inputs: the tensors that the pass reads.
            sizes: the sizes that it reads.
            scalars: the numbers that it reads.
            origins: the source of each of them.
            accumulate_grad: whether gradients go to leaves, instead of being returned
                (``torch.autograd.grad``).
            check_nans: whether anomaly mode is on.
        """
        capture = self.capture
        capture.input_metadata = [(t.dtype, t.device, t.requires_grad) for t in inputs]
        capture.walked = self._walk()
        if check_nans:
            self._refuse("anomaly mode checks every node, which torch's engine does better")
        tokens = [self._token(InputValue("inputs", index)) for index in range(len(inputs))]
        symbolic_sizes = [self._symbolic_number(size, "sizes", index) for index, size in enumerate(sizes)]
        symbolic_scalars = [
            self._symbolic_number(scalar, "scalars", index) for index, scalar in enumerate(scalars)
        ]
        return "compiled_autograd", tokens, symbolic_sizes, symbolic_scalars

    def set_node_origin(self, name: str, index: int, pynode: Any) -> None:
        """Begin a node. Args: its C++ name with number, the number, its Python object (None in C++)."""
        self._pop_mode()
        function_id = getattr(pynode, "_autograd_function_id", None)
        node = CapturedNode(index, name, is_python=pynode is not None, function_id=function_id)
        walked = self.capture.walked
        if walked is not None:
            if index >= len(walked) or (index and walked[index].name != name):
                self.capture.walked = None
            else:
                node.sequence_nr = walked[index].sequence_nr
                metadata = None if walked[index].node is None else walked[index].node.metadata
                if metadata and "traceback_" in metadata:
                    node.stack_trace = "".join(metadata["traceback_"])
        self._node = node
        self.capture.nodes.append(node)
        if pynode is not None:
            self._mode = _SwallowOps()
            self._mode.__enter__()

    def log_compile_reasons(self, reasons: list[str]) -> None:
        self.capture.reasons = list(reasons)

    # The protocol: what a node does

    def bind_function(self, name: str, function: Any, is_custom: bool, is_traceable: bool) -> str:
        """Return the operator name of a C++ function. Args: as C++ passes them; torch stores all of them."""
        return _torch.functional_operators.add(name, function, is_custom, is_traceable)

    def apply_functional(
        self, name: str, grads: Any, args: Any, output_metadata: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """Record a C++ node. Args: operator name, gradient tokens, packed arguments, output metadata."""
        operator = _torch.functional_operators.get(name)
        original = _torch.untraceable_operator(operator)
        kind = Kind.PURE if original is None else Kind.CPP
        gradients, arguments = self._value(list(grads)), [self._value(argument) for argument in args]
        if name in functional.SPLIT_NODES:
            # C++ reuses the graph for another number of chunks, as long as the same ones have gradients.
            chunk_size = arguments[-1] if functional.SPLIT_NODES[name] else 1
            sizes = output_metadata[0][1]
            self._chunks = self._step(
                functional.all_chunks, (gradients, arguments[1], chunk_size, sizes), Kind.PURE, "chunks"
            )
            gradients = Value(self._chunks)
        step = self._step(original or operator, (gradients, *arguments), kind, self._node.name)
        # An output without metadata has no outgoing edge.
        return [
            None if metadata is None else self._token(Value(step, index))
            for index, metadata in enumerate(output_metadata)
        ]

    def validate_outputs(self, _: str, outputs: Any, args: Any, output_metadata: Sequence[Any]) -> Any:
        """Fit gradients to the edges. Args: gradient tokens; metadata of each edge, packed and plain."""
        if not outputs:
            return outputs
        grads = self._value(list(outputs))
        (packed,) = args
        if self._chunks is not None:  # sizes are symbolic here, unlike when the node was recorded
            self._chunks.args = (*self._chunks.args[:-1], self._value(packed[0][1]))
            self._chunks = None
        plain = [validation.plain_metadata(expected) for expected in packed]
        if plain.count(None) == packed.count(None):
            return [
                output if output is None or known is None else self._validated(grad, index, known)
                for index, (output, grad, known) in enumerate(zip(outputs, grads, plain, strict=True))
            ]
        metadata = self._value(packed)
        target = validation.validate_outputs
        tokens = self._tuple_step(
            target, (grads, self._function_name(), metadata), len(outputs), Kind.PURE, "validate"
        )
        # A gradient that is always missing stays missing, so that C++ skips the edge.
        return [None if output is None else token for output, token in zip(outputs, tokens, strict=True)]

    def _validated(self, grad: Any, index: int, known: tuple[Any, ...]) -> torch.Tensor:
        dtype, device, sizes = known
        args = (grad, self._function_name(), index, dtype, device, self._value(sizes))
        return self._token(Value(self._step(validation.validate, args, Kind.PURE, "validate")))

    def _function_name(self) -> str:
        return self._node.name.split(" ")[0]

    def accumulate(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        first, second = self._value(left), self._value(right)
        if not isinstance(first, SumValue):
            first = SumValue([first], self._node.index)
        first.parts.append(second)
        return self._token(first)

    def accumulate_grad(self, variable: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        grad, has_post_hooks = rest[-2:]
        args = (self._value(variable), self._value(grad), bool(has_post_hooks))
        step = self._step(functional.accumulate_grad, args, Kind.ACCUMULATE, "accumulate_grad", True)
        return self._token(Value(step)) if _torch.ACCUMULATE_GRAD_RETURNS else None

    def unpack_hook(self, hook_id: int, data_id: int) -> torch.Tensor:
        if torch.is_grad_enabled():
            self._refuse(
                "saved-tensor hooks under create_graph (their tensors' history is known to C++ only)"
            )
        args = (InputValue("hooks", hook_id), InputValue("packed", data_id))
        if self._node.is_python:
            # A Python backward unpacks its saved tensors on access, possibly more than once.
            return self._token(args)
        return self._token(Value(self._step(functional.call_unpack_hook, args, Kind.PYTHON, "unpack", True)))

    def proxy_call_backward(
        self,
        inputs: Sequence[Any],
        output_metadata: Sequence[Any],
        saved_tensors: Sequence[Any],
        backward_index: int,
        ctx: Any,
        backward_state_index: int | None = None,
        opaque_indices: Sequence[int] = (),
    ) -> tuple[Any, ...]:
        """Record the backward of a Python function.

        Args:
            inputs: tokens of the gradients, None for missing ones.
            output_metadata: the metadata of each of its outputs.
            saved_tensors: tokens of its saved tensors.
            backward_index: the index in ``hooks`` of what is called.
            ctx: its context.
            backward_state_index: the index of the state passed to a compiled function, or None.
            opaque_indices: the indices of other objects that it saved.
        """
        grads = [self._incoming_gradient(grad) for grad in inputs]
        saved = tuple(self._value(tensor) for tensor in saved_tensors)
        is_tensor = [metadata is not None for metadata in output_metadata]
        target: Any = functional.call_backward
        last: Any = is_tensor
        state = None
        if backward_state_index is not None:
            target = aot_functional.call_backward_with_state
            last = state = InputValue("hooks", backward_state_index)
        args = (InputValue("hooks", backward_index), saved, grads, last)
        step = self._step(target, args, Kind.PYTHON, self._node.name, True)
        step.produces = [metadata and self._zeros_metadata(metadata) for metadata in output_metadata]
        if is_compiled(ctx):
            objects = [InputValue("hooks", index) for index in opaque_indices]
            self._inline(step, ctx, inputs, saved, objects, len(is_tensor), state)
        outputs = step.inlined.outputs if step.inlined else is_tensor
        return tuple(
            self._token(Value(step, index)) if known and output is not None else None
            for index, (known, output) in enumerate(zip(is_tensor, outputs, strict=True))
        )

    def _inline(
        self,
        step: Step,
        ctx: Any,
        inputs: Sequence[Any],
        saved: Sequence[Any],
        objects: Sequence[Any],
        outputs: int,
        state: InputValue | None,
    ) -> None:
        """Record the backward graph of a compiled function in addition to its call, if possible."""
        numbers = [self._value(number) for number in _torch.saved_symints(ctx)]
        grads = [self._gradient_or_metadata(grad) for grad in inputs]
        found: Inlined | str = "the shape of zeros that flow into it is not known"
        if None not in grads:
            context = step.args[0]
            found = inline(
                CompiledCall(ctx, context, grads, saved, numbers, objects, outputs, self._node.index, state)
            )
        if isinstance(found, str):
            self.capture.called.append((self._node.name, found))
        else:
            step.inlined = found
            self.capture.inlined.append(self._node.name)

    def _gradient_or_metadata(self, grad: Any) -> Any:
        """Like `_incoming_gradient`, with sizes, dtype and device of zeros. None if unknown."""
        value = self._incoming_gradient(grad)
        if value is not functional.ZEROS:
            return value
        metadata = self._mode.metadata_of(grad) if self._mode is not None else None
        return None if metadata is None else (tuple(self._value(list(metadata[0]))), *metadata[1:])

    def _zeros_metadata(self, metadata: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return sizes, dtype and device from C++'s metadata of an input of a custom Function."""
        _, device, dtype, sizes = metadata
        return tuple(self._value(list(sizes))), dtype, str(device)

    def _incoming_gradient(self, grad: Any) -> Any:
        if grad is None:
            return functional.MISSING
        # Zeros made by C++ are not one of our tokens.
        return self._values.get(id(grad), functional.ZEROS)

    def call_copy_slices_prologue(self, inputs: Sequence[Any], *geometry: Any) -> list[torch.Tensor]:
        args = (self._value(list(inputs)), *(self._value(argument) for argument in geometry))
        return self._tuple_step(functional.copy_slices_prologue, args, 3, Kind.PURE, "copy_slices_prologue")

    def call_copy_slices_epilogue(
        self, needs_input_grad: Sequence[bool], result: Any, grads: Sequence[Any], grad_slice: Any
    ) -> list[torch.Tensor]:
        """End a write to a view. Args: inputs that need gradients; tokens of result, gradients, slice."""
        args = (
            list(needs_input_grad),
            self._value(result),
            self._value(list(grads)),
            self._value(grad_slice),
        )
        count = len(needs_input_grad)
        return self._tuple_step(
            functional.copy_slices_epilogue, args, count, Kind.PURE, "copy_slices_epilogue"
        )

    # The protocol: hooks

    def tensor_pre_hook(self, inputs: Sequence[Any], hook_id: int, position: int) -> list[Any]:
        """Record a tensor hook. Args: tokens entering the node, hook index, position of the gradient."""
        args = (InputValue("hooks", hook_id), self._value(inputs[position]))
        step = self._step(functional.call_tensor_pre_hook, args, Kind.PYTHON, "tensor_pre_hook", True)
        return self._replace_input(inputs, position, step)

    def cpp_tensor_pre_hook(self, inputs: Sequence[Any], hook_id: int, position: int) -> list[Any]:
        """Record a C++ tensor hook. Args: as of :meth:`tensor_pre_hook`."""
        args = (hook_id, self._value(inputs[position]))
        step = self._step(functional.call_cpp_pre_hook, args, Kind.CPP, "cpp_tensor_pre_hook", True)
        return self._replace_input(inputs, position, step)

    def _replace_input(self, inputs: Sequence[Any], position: int, step: Step) -> list[Any]:
        result = list(inputs)
        result[position] = self._token(Value(step))
        return result

    def pre_hook(self, inputs: Sequence[Any], hook_id: int) -> list[Any]:
        args = (InputValue("hooks", hook_id), self._value(list(inputs)))
        return self._tuple_step(functional.call_pre_hook, args, len(inputs), Kind.PYTHON, "pre_hook", True)

    def post_hook(self, outputs: Sequence[Any], inputs: Sequence[Any], hook_id: int) -> list[Any]:
        """Record a post-hook of a node. Args: tokens of its outputs and inputs, and the hook's index."""
        args = (InputValue("hooks", hook_id), self._value(list(outputs)), self._value(list(inputs)))
        return self._tuple_step(functional.call_post_hook, args, len(outputs), Kind.PYTHON, "post_hook", True)

    def post_acc_grad_hook(self, variable: torch.Tensor, hook_id: int) -> list[torch.Tensor]:
        args = (InputValue("hooks", hook_id), self._value(variable))
        target = functional.call_post_accumulate_grad_hook
        self._step(target, args, Kind.PYTHON, "post_accumulate_grad_hook", True)
        return [variable]

    # The protocol: end

    def end_capture(self, outputs: Sequence[Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        self.close()
        self.capture.outputs = [self._value(output) for output in outputs]
        self._tokens.clear()
        self._values.clear()
        capture, finish = self.capture, self._finish
        # C++ of some versions leaks this object, so it must not hold the pass.
        self.capture, self._walk, self._finish = Capture(), _raise_capture_ended, _raise_capture_ended
        if capture.refusal is not None:
            raise RefusedError(capture.refusal)
        return finish(capture)

    def _pop_mode(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None

    def close(self) -> None:
        """Clean up. C++ always calls this when it releases the compiler."""
        self._pop_mode()
