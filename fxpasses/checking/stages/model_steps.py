"""One step of a model, run in different ways: in eager, in float64, on nearby inputs, compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from fake.error_text import first_line
from fake.seam.pytree import tree_leaves, tree_map
from fxpasses import _torch
from fxpasses.checking.comparison.rounding import perturbed, perturbed_in_dtype, same_bits
from fxpasses.checking.execution.inputs import deep_copy
from fxpasses.checking.execution.interpret import RUN_ERRORS, as_float64
from fxpasses.checking.stages._torch_dynamo import discard_dynamo_state
from fxpasses.errors import OptionsError
from fxpasses.exact.time_limit import raise_if_out_of_time

Results = dict[str, Tensor]
"""Outputs, inputs after the run, gradients and buffers, by name, in the order of computation."""

_PERTURBATIONS = 2


class Steps:
    """The same step of a model, run in different ways. Copies run; the model itself is not touched.

    Args:
        model: a module, or a function of tensors.
        args: its positional arguments.
        kwargs: its keyword arguments.
        backward: whether the step computes gradients: those of a fixed weighted sum of the outputs.

    Raises:
        OptionsError: the model has a lazy parameter without a value.
    """

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], backward: bool) -> None:
        parameters = model.named_parameters() if isinstance(model, nn.Module) else ()
        if lazy := [name for name, parameter in parameters if is_lazy(parameter)]:
            problem = f"the parameter {lazy[0]!r} is lazy and has no value yet: call the model once before it is checked"
            raise OptionsError("model", model, problem=problem)
        self._model, self._args, self._kwargs, self._backward = model, args, kwargs, backward

    def eager(self, seed: int = 0) -> Results:
        """Run the step as it is."""
        return self._run(lambda f: f, seed=seed)

    def compiled(self, compile: Callable[[Any], Any]) -> Results:
        """Run the step compiled by ``compile``."""
        return self._run(compile)

    def reference_runs(self) -> tuple[list[Results], str]:
        """Run what the rounding of a step is measured with.

        Returns:
            The step in float64, and the same with parameters and inputs moved by up to half a unit in the
            last place of their own dtypes. If the model does not support float64: in these dtypes, and moved
            by up to a unit. Then why not, or "".
        """

        def runs(wide: bool) -> list[Results]:
            return [self._run(lambda f: f, wide=wide, move=seed) for seed in (None, *range(_PERTURBATIONS))]

        try:
            return runs(wide=True), ""
        except RUN_ERRORS as error:
            return runs(wide=False), first_line(error)

    def variation(self, eager: Results) -> str:
        """Why eager is no reference: what changes from run to run; "" if nothing does."""
        if not _equal_bits(eager, self.eager()):
            return "the model gives other results each time that it runs, in eager, too"
        if not _equal_bits(eager, self.eager(seed=1)):
            return "the model samples random numbers: compiled graphs do so in another way than eager"
        return ""

    def _run(
        self, compile: Callable[[Any], Any], wide: bool = False, seed: int = 0, move: int | None = None
    ) -> Results:
        raise_if_out_of_time()
        model = deep_copy("model", self._model, "checked")
        if isinstance(model, nn.Module):
            model = _to_float64(model) if wide else model
            if move is not None:
                held = [p.detach() for p in self._model.parameters()]
                weights = perturbed(held, move) if wide else perturbed_in_dtype(held, move)
                for parameter, value in zip(model.parameters(), weights, strict=True):
                    parameter.data.copy_(value)
        args, kwargs = tree_map(lambda v: _copy_input(v, wide, move), (self._args, self._kwargs))

        # Calling the module would print the error of a graph without float64 support.
        call = model.forward if isinstance(model, fx.GraphModule) else model

        # A separate function, so that what the user has compiled is not touched.
        @_torch.with_own_code
        def step(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        with discard_dynamo_state(), torch.random.fork_rng(), _Float64Factories() if wide else nullcontext():
            torch.manual_seed(seed)
            with torch.enable_grad() if self._backward else torch.no_grad():
                outputs = [v for v in _leaves(compile(step)(*args, **kwargs)) if isinstance(v, Tensor)]
                losses = [_loss(_with_strides(v)) for v in outputs if v.requires_grad]
                if losses:
                    torch.stack([loss.double() for loss in losses]).sum().backward()
        found = {f"output {i}": v for i, v in enumerate(outputs)}
        inputs = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        found |= {f"input {i}": v for i, v in enumerate(inputs)}
        if isinstance(model, nn.Module):
            found |= {
                f"gradient of {n}": p.grad
                for n, p in reversed(list(model.named_parameters()))
                if p.grad is not None
            }
            found |= {f"buffer {n}": b for n, b in model.named_buffers()}
        found |= {f"gradient of input {i}": v.grad for i, v in enumerate(inputs) if v.grad is not None}
        return {name: _with_strides(value.detach()).clone() for name, value in found.items()}


_RANDOM = frozenset({torch.rand, torch.randn})
_FACTORIES = _RANDOM | {
    torch.zeros, torch.ones, torch.empty, torch.full, torch.eye, torch.linspace, torch.logspace, torch.tensor,
}  # fmt: skip


class _Float64Factories(TorchFunctionMode):
    """Makes tensors without an explicit dtype as wide as the model's parameters.

    Changing the default dtype would affect all threads.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        made = func(*args, **given)
        has_default_dtype = func in _FACTORIES and given.get("dtype") is None and given.get("out") is None
        if not has_default_dtype or made.dtype is not torch.get_default_dtype():
            return made
        # Random tensors have the same numbers as in eager.
        return made.double() if func in _RANDOM else func(*args, **{**given, "dtype": torch.float64})


def _equal_bits(a: Results, b: Results) -> bool:
    return a.keys() == b.keys() and all(
        (value.shape, value.dtype) == (b[name].shape, b[name].dtype) and same_bits(value, b[name])
        for name, value in a.items()
    )


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors in a result, including those in dataclasses such as transformers' outputs."""
    for leaf in tree_leaves(value):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tree_leaves([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])
        else:
            yield leaf


def _to_float64(model: nn.Module) -> nn.Module:
    model = model.double()
    for held in (*model.parameters(), *model.buffers()):
        held.data = as_float64(held.data)  # `double` does not convert complex numbers
    return model


def _copy_input(value: Any, wide: bool, move: int | None) -> Any:
    if not isinstance(value, Tensor):
        return deep_copy("inputs", value, "checked")  # for example a cache that the model fills
    copied = value.detach().clone()
    if move is not None and copied.layout is torch.strided:
        (copied,) = perturbed([copied], move) if wide else perturbed_in_dtype([copied], move)
    elif wide:
        copied = as_float64(copied)
    return copied.requires_grad_(value.requires_grad)


def _with_strides(value: Tensor) -> Tensor:
    """Convert a sparse or jagged tensor to one that all operators take; return any other as it is."""
    if value.is_nested:
        return value.values()
    return value if value.layout is torch.strided else value.to_dense()


def _loss(value: Tensor) -> Tensor:
    """A weighted sum: a plain one would miss swapped values."""
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    weights = torch.linspace(-1.0, 1.3, value.numel(), dtype=torch.float64, device=value.device)
    return (value * weights.reshape(value.shape).to(value.dtype)).sum()
