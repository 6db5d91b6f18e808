"""The runtime of a plan: loads generated code and kernels without a compiler.

It also takes the steps around them that AOTAutograd would take.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import marshal
import operator
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from fake.seam.autograd_engine import keeps_graph
from fake.seam.dispatch import DisableAutocast, peek_interpreter_stack, set_grad_enabled
from fxpasses.errors import FxPassesError
from fxpasses.plans import _torch
from fxpasses.plans.files.plan_files import write_kernel
from fxpasses.plans.tensors.held_views import HeldViews
from fxpasses.plans.tensors.shards import parts_of_gradient, with_unwrapped_inputs, with_wrapped_outputs
from fxpasses.plans.tensors.shared_memory import Hidden, hidden_outputs, with_aliasing

Boxed = Callable[[list[Any]], Sequence[Any]]
_loaded: dict[str, types.ModuleType] = {}


def load_code(
    code: bytes,
    kernels: Mapping[str, bytes],
    externs: Mapping[str, str],
    constants: Sequence[Sequence[Any]],
    folder: Path | None,
) -> dict[str, Any]:
    """Run the code of a plan, whose hash has been checked.

    Args:
        code: the module, as a marshalled code object.
        kernels: shared libraries, by their names in the code.
        externs: paths below ``torch`` of the functions that the code calls as ``extern_kernels.name``.
        constants: dtype, sizes, strides and content of each tensor that is part of the code.
        folder: where shared libraries are put to be loaded, or None for a temporary directory.

    Returns:
        The names that it defines: ``forward`` and, for training, ``backward``.
    """
    _torch.kernel_environment()
    known = _torch.prelude() | {
        "fitted": fitted,
        "Conforming": Conforming,
        "assert_tensor_metadata": assert_tensor_metadata,
        "held_views": HeldViews(),
    }
    known["extern_kernels"] = types.SimpleNamespace(
        **{name: operator.attrgetter(path)(torch) for name, path in externs.items()}
    )
    known["_kernels"] = {
        name: load_library(name.partition(" ")[2], data, folder) for name, data in kernels.items()
    }
    if b"gated_graph" in code:
        from fxpasses.distributed import gated_call  # not imported by single-process programs

        known |= {"gated_graph": gated_call.gated_graph, "SizesOfCalls": gated_call.SizesOfCalls}
    known["_constants"] = [_constant(*constant) for constant in constants]
    exec(marshal.loads(code), known)
    return known


def _constant(dtype: str, shape: list[int], stride: list[int], content: list[int]) -> torch.Tensor:
    flat = torch.tensor(content, dtype=torch.uint8).view(getattr(torch, dtype))
    return torch.empty_strided(shape, stride, dtype=flat.dtype).copy_(flat.view(shape))


def load_library(entry: str, data: bytes, folder: Path | None) -> types.ModuleType:
    """Load a shared library as a module, once.

    Args:
        entry: the module's name.
        data: the library.
        folder: where it is put to be loaded, or None for a temporary directory.
    """
    digest = hashlib.sha256(data).hexdigest()
    if digest not in _loaded:
        with (
            tempfile.TemporaryDirectory(prefix="fxpasses-")
            if folder is None
            else nullcontext(folder) as place
        ):
            loader = importlib.machinery.ExtensionFileLoader(entry, str(write_kernel(Path(place), data)))
            spec = importlib.util.spec_from_loader(entry, loader)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        _loaded[digest] = module
    return _loaded[digest]


def fitted(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor with these strides: itself, or a copy."""
    if value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def assert_tensor_metadata(
    tensor: torch.Tensor | None,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    op_name: str | None = None,
) -> None:
    """Check that an operator returned what its fake kernel predicted.

    The code that torch 2.15 generates calls this by name.

    Args:
        tensor: the result.
        size: as predicted.
        stride: as predicted.
        dtype: as predicted.
        op_name: the operator.

    Raises:
        RuntimeError: the dtype differs.
        AssertionError: sizes or strides differ.
    """
    if tensor is None:
        return
    if tensor.dtype != dtype:
        raise RuntimeError(
            f"{op_name or 'an operator'} returned {tensor.dtype}, its fake kernel said {dtype}"
        )
    _torch.assert_size_stride(tensor, size, stride, op_name)


Specs = Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]


class Conforming:
    """A compiled region whose results must have the recorded metadata.

    The first call finds out which results have to be copied for that.

    Args:
        call: the region's graph; takes sizes and tensors.
        specs: the sizes, strides and dtype of each result, given the values of the region's symbols.
        first: likewise the sizes that the graph takes, if they differ from these values.
    """

    def __init__(
        self, call: Boxed, specs: Callable[..., Specs], first: Callable[..., Sequence[int]] | None = None
    ) -> None:
        self._call, self._specs, self._first = call, specs, first
        self._to_copy: list[int] | None = None

    def __call__(self, tensors: list[Any], sizes: list[int]) -> Sequence[torch.Tensor]:
        if sizes or self._first is not None:
            tensors[:0] = sizes if self._first is None else self._first(*sizes)
        if self._to_copy is None:
            given = [t for t in tensors if isinstance(t, torch.Tensor)]
            taken = {t.untyped_storage().data_ptr() for t in given if t.numel()}
            results = self._call(tensors)
            self._to_copy = self._results_to_copy(results, taken, self._specs(*sizes))
        else:
            results = self._call(tensors)
        if not self._to_copy:
            return results
        conforming, specs = list(results), self._specs(*sizes)
        for i in self._to_copy:
            shape, stride, dtype = specs[i]
            conforming[i] = torch.empty_strided(shape, stride, dtype=dtype).copy_(results[i])
        return conforming

    def _results_to_copy(self, results: Sequence[torch.Tensor], taken: set[int], specs: Specs) -> list[int]:
        to_copy = []
        for i, (result, (shape, stride, dtype)) in enumerate(zip(results, specs, strict=True)):
            if result.dtype is not dtype or tuple(result.shape) != shape:
                raise FxPassesError(
                    f"a region of a plan returned {result.dtype} {tuple(result.shape)}, not {dtype} {shape}"
                )
            memory = result.untyped_storage().data_ptr()
            if result.numel() and (memory in taken or result.stride() != stride):
                to_copy.append(i)
            taken.add(memory)
        return to_copy


def aot_callable(
    facts: Mapping[str, Any], forward: Boxed, backward: Boxed | None
) -> Callable[[list[Any]], Sequence[Any]]:
    """The function of flat inputs that AOTAutograd would return.

    Args:
        facts: of the compilation; see :func:`fxpasses.plans.recording._torch_facts.plain_facts`.
        forward: the compiled graph; takes a list, which it empties.
        backward: the compiled graph, or None for inference.
    """
    sharded: list[int] = facts["sharded"]
    no_autocast = facts["autocast"]
    run: Callable[[list[Any]], Sequence[Any]]
    if backward is None:

        def run(inputs: list[Any]) -> Sequence[Any]:
            before = torch.is_grad_enabled()
            set_grad_enabled(False)
            try:
                with DisableAutocast() if no_autocast else _NO_CONTEXT:
                    return forward(inputs)
            finally:
                set_grad_enabled(before)

    else:
        forward = with_wrapped_outputs(facts["results"], with_unwrapped_inputs(sharded, forward))
        function = _autograd_function(facts, forward, with_wrapped_outputs(facts["gradients"], backward))
        detached: list[int] = facts["detached"]

        def run(inputs: list[Any]) -> Sequence[Any]:
            for i in detached:
                inputs[i] = inputs[i].detach()
            with torch.enable_grad():
                return function.apply(*inputs)

    run = with_aliasing(facts, run)
    if changed := facts["changed_for_autograd"]:
        run = _bumping_versions(changed, run)
    return (
        with_wrapped_outputs(facts["results"], with_unwrapped_inputs(sharded, run))
        if backward is None
        else run
    )


def _bumping_versions(changed: Sequence[int], run: Boxed) -> Boxed:
    def bump_and_run(inputs: list[Any]) -> Sequence[Any]:
        torch.autograd.graph.increment_version([inputs[i] for i in changed])
        return run(inputs)

    return bump_and_run


_NO_CONTEXT = nullcontext()


def _autograd_function(facts: Mapping[str, Any], forward_: Boxed, backward_: Boxed) -> Any:
    outputs: int = facts["returns"]
    hidden = hidden_outputs(facts)
    constant = [i for i, differentiable in enumerate(facts["requires_grad"]) if not differentiable]
    unsafe_views: list[int] = facts["unsafe_views"]
    unchecked: int = facts["unchecked"]
    symints: int = facts["symints"]
    others = symints + facts["opaque"]
    are_inputs = {i for i, is_input in enumerate(facts["saved_inputs"]) if is_input}
    fixed: bool = facts["fixed"]
    views: list[int] | None = None
    tangents = list(zip(facts["tangent_outputs"], facts["tangents"], strict=True))
    deterministic: bool | None = facts["deterministic"]
    donates: bool = facts["donates"]
    no_autocast: bool = facts["autocast"]

    class Plan(torch.autograd.Function):
        """The forward and backward graph of a plan."""

        boxed_grads_call = False

        @staticmethod
        def forward(ctx: Any, *given: Any) -> tuple[Any, ...]:  # type: ignore[override]
            with DisableAutocast() if no_autocast else _NO_CONTEXT:
                results = forward_(list(given))
            saved = results[outputs : len(results) - others]
            ctx.sizes = tuple(results[len(results) - symints :])
            ctx.meshes = tuple(results[len(results) - others : len(results) - symints])
            kept = list(saved)
            nonlocal views
            if views is None or not fixed:
                views = [i for i, value in enumerate(kept) if i not in are_inputs and value._is_view()]
            for i in views:
                kept[i] = kept[i].detach()
            checked = len(kept) - unchecked
            ctx.save_for_backward(*kept[:checked])
            ctx.unchecked = kept[checked:]
            returned = list(results[:outputs])
            for i in unsafe_views:
                returned[i] = _torch.unsafe_view(returned[i], returned[i].shape)
            for i in hidden:
                returned[i] = Hidden(returned[i])
            ctx.mark_non_differentiable(
                *(returned[i] for i in constant if isinstance(returned[i], torch.Tensor))
            )
            ctx._materialize_non_diff_grads = False
            return tuple(returned)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:  # type: ignore[override]
            check_backward(deterministic, donates=donates)
            given = [*ctx.sizes, *ctx.saved_tensors, *ctx.unchecked, *ctx.meshes]
            for i, expected in tangents:
                given += _in_traced_layout(gradients[i], *expected)
            ctx.maybe_clear_saved_tensors()
            if torch.is_grad_enabled():
                return NoDoubleBackward.apply(
                    backward_, no_autocast, torch.empty(0, requires_grad=True), *given
                )
            return _run_backward(backward_, no_autocast, given)

    return Plan


def _run_backward(backward: Boxed, no_autocast: bool, given: list[Any]) -> tuple[Any, ...]:
    with DisableAutocast() if no_autocast else _NO_CONTEXT:
        return tuple(backward(given))


class NoDoubleBackward(torch.autograd.Function):
    """The backward graph under ``create_graph=True``. It has no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, backward: Boxed, no_autocast: bool, connected: Any, *given: Any) -> tuple[Any, ...]:  # type: ignore[override]
        """Run it. Args: those of :func:`_run_backward`, and a tensor that requires grad."""
        return _run_backward(backward, no_autocast, list(given))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
        raise RuntimeError("torch.compile with aot_autograd does not currently support double backward")


def check_backward(deterministic: bool | None, *, donates: bool) -> None:
    """Raise if this process may not run a backward pass.

    Args:
        deterministic: whether it was compiled for deterministic algorithms.
        donates: whether it was compiled with donated buffers.
    """
    if peek_interpreter_stack() is not None:
        raise RuntimeError(
            "a compiled backward function is called within vmap/grad/vjp, which is not supported: wrap the "
            "transform in the compiled function"
        )
    if deterministic is False and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(
            "this backward function was compiled without deterministic algorithms; call "
            "torch.use_deterministic_algorithms(True) before the forward pass"
        )
    if donates and keeps_graph():
        raise RuntimeError(
            "this backward function was compiled with donated buffers, which requires create_graph=False and "
            "retain_graph=False; or set torch._functorch.config.donated_buffer=False to disable donated buffers"
        )


def _in_traced_layout(
    gradient: Any, size: Any, stride: Any, memory_format: str | None, placements: Any = None
) -> list[Any]:
    """Convert a gradient to the layout that the backward graph was traced with, or a sharded one to parts."""
    if not isinstance(gradient, torch.Tensor):
        return [gradient]
    if placements is not None:
        local, mesh = parts_of_gradient(gradient, placements)
        return [_in_layout(local, size, stride, memory_format), mesh]
    return [_in_layout(gradient, size, stride, memory_format)]


def _in_layout(gradient: torch.Tensor, size: Any, stride: Any, memory_format: str | None) -> torch.Tensor:
    if type(gradient) is not torch.Tensor:
        raise RuntimeError(
            f"a gradient of class {type(gradient).__qualname__}, where a plain tensor was compiled for"
        )
    if memory_format is not None:
        wanted = getattr(torch, memory_format.removeprefix("torch."))
        return (
            gradient
            if gradient.is_contiguous(memory_format=wanted)
            else gradient.contiguous(memory_format=wanted)
        )
    if gradient.shape == torch.Size(size) and gradient.stride() == tuple(stride):
        return gradient
    made = torch.empty_strided(size, stride, dtype=gradient.dtype, device=gradient.device)
    return made.copy_(gradient)
