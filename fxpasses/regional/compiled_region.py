"""A compiled region, and how the results of its compiled functions become its outputs.

Compiled code must not return two tensors that share memory through an opaque operator: the memory planner
around it would reuse one while the other is still needed. So an operator returns each storage once, and a
:class:`Source` describes the views that make a value from it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from fxpasses.regional import _torch
from fxpasses.regional.errors import RegionContractError

Size = int | torch.SymInt
Bindings = Mapping[sympy.Symbol, Size]
"""Values of a region's symbols in one call."""


@dataclass(frozen=True)
class TensorSpec:
    """Metadata of a result. Sizes may be sympy expressions in the region's symbols."""

    shape: tuple[int | sympy.Basic, ...]
    stride: tuple[int | sympy.Basic, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self, bindings: Bindings) -> torch.Tensor:
        """Create a tensor with this metadata, for the given symbol values."""
        shape = [_torch.evaluate(s, bindings) for s in self.shape]
        stride = [_torch.evaluate(s, bindings) for s in self.stride]
        return torch.empty_strided(shape, stride, dtype=self.dtype, device=self.device)

    def strides(self, bindings: Bindings) -> tuple[Size, ...]:
        """Return the strides for the given symbol values."""
        return tuple(_torch.evaluate(s, bindings) for s in self.stride)


class Previous:
    """Stands for the previous value in the arguments of a :class:`Step`."""

    def __repr__(self) -> str:
        return "previous"


PREVIOUS = Previous()


@dataclass(frozen=True)
class Step:
    """A view operator whose arguments are constants, sympy expressions, and :data:`PREVIOUS`."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def apply(self, value: Any, bindings: Bindings) -> Any:
        def known(argument: Any) -> Any:
            if isinstance(argument, (list, tuple)):
                return type(argument)(known(a) for a in argument)
            return value if isinstance(argument, Previous) else _torch.evaluate(argument, bindings)

        return self.target(*known(tuple(self.args)), **{k: known(v) for k, v in self.kwargs.items()})


@dataclass(frozen=True)
class Source:
    """The origin of a value: an input or a result of an operator, followed by views.

    Attributes:
        is_input: whether it starts from an input of the operator instead of a result.
        index: the index of that input or result.
        steps: the views that make the value from it.
    """

    is_input: bool
    index: int
    steps: tuple[Step, ...] = ()

    def base(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor that the value is a view of."""
        return inputs[self.index] if self.is_input else results[self.index]

    def view(self, base: torch.Tensor, bindings: Bindings) -> torch.Tensor:
        """Make the value from its base."""
        for step in self.steps:
            base = step.apply(base, bindings)
        return base

    def get(
        self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor], bindings: Bindings
    ) -> torch.Tensor:
        """Make the value from the inputs and results of the operator.

        Args:
            inputs: its tensor inputs.
            results: its results.
            bindings: values of its symbols.
        """
        return self.view(self.base(inputs, results), bindings)


@dataclass(frozen=True)
class Exact:
    """Runs a region's graph on other dtypes than those that it was compiled for.

    Attributes:
        dtypes: the tensor dtypes that it was compiled for.
        run: takes the list of sizes and tensors; returns the results, floating-point ones in float64.
        is_native: whether all its operators are PyTorch's own, which do not round to less than float64.
    """

    dtypes: list[torch.dtype]
    run: Callable[[list[Any]], list[Any]]
    is_native: bool


@dataclass(eq=False)
class CompiledRegion:
    """A compiled region.

    Attributes:
        symbols: the symbols whose values its operators take as ``sizes``.
        input_specs: metadata of its tensor inputs at compile time.
        forward: takes a list of sizes and tensors; returns the tensors described by ``forward_specs``.
        outputs: how its outputs are made from its inputs and the results of ``forward``.
        differentiable: for each output, whether the backward pass takes a gradient for it.
        random: whether it uses the RNG.
        saved: how each tensor is made that ``backward`` takes before the gradients.
        saved_sizes: expressions of the sizes that ``backward`` takes first.
        backward: takes a list of sizes, saved tensors, gradients; ``None`` if nothing needs a gradient.
        gradients: for each tensor input, how its gradient is made from the tensors that ``backward`` takes
            and returns; ``None`` if it has none.
        tangents: metadata that ``backward`` expects of the outputs' gradients.
        key: content hash of what is compiled and what it returns.
        exact: for ``"forward"`` and ``"backward"``, how to run it on wider dtypes than compiled for. Only the
            value check does that, and this is empty without it.
        inner: the regions that it calls.
        communicating: for ``"forward"`` and ``"backward"``, the graph, if it contains collectives.
        work: for ``"forward"`` and ``"backward"``, FLOPs and bytes of each call.
        inlined: for ``"forward"`` and ``"backward"``, the graph that replaces its calls after tracing; empty
            if it is called.
        grad_placements: for each tensor input that is a DTensor outside, the placements of its gradient; else
            ``None``.
    """

    symbols: list[sympy.Symbol]
    input_specs: list[TensorSpec]
    forward: Callable[[list[Any]], Sequence[torch.Tensor]]
    forward_specs: list[TensorSpec]
    outputs: list[Source]
    differentiable: list[bool]
    random: bool
    saved: list[Source] = field(default_factory=list)
    saved_sizes: list[int | sympy.Basic] = field(default_factory=list)
    backward: Callable[[list[Any]], Sequence[torch.Tensor]] | None = None
    backward_specs: list[TensorSpec] = field(default_factory=list)
    gradients: list[Source | None] = field(default_factory=list)
    tangents: list[TensorSpec] = field(default_factory=list)
    key: str = ""
    seconds: float = 0.0
    exact: dict[str, Exact] = field(default_factory=dict)
    inner: list[CompiledRegion] = field(default_factory=list)
    communicating: dict[str, fx.Graph] = field(default_factory=dict)
    work: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    inlined: dict[str, fx.Graph] = field(default_factory=dict)
    grad_placements: list[tuple[Any, ...] | None] = field(default_factory=list)
    _results_to_copy: dict[str, list[int] | None] = field(default_factory=dict)

    def bindings(self, sizes: Sequence[Size]) -> dict[sympy.Symbol, Size]:
        """Map the symbols to their values."""
        return dict(zip(self.symbols, sizes, strict=True))

    def run_forward(self, tensors: list[torch.Tensor], sizes: list[Size]) -> list[torch.Tensor]:
        """Run the compiled forward graph. Clears ``tensors``, so that unshared ones can be freed early."""
        return self._run("forward", self.forward, self.forward_specs, tensors, sizes, sizes)

    def run_backward(self, tensors: list[torch.Tensor], sizes: list[Size]) -> list[torch.Tensor]:
        """Run the compiled backward graph. Clears ``tensors``."""
        if self.backward is None:
            raise RegionContractError(self.key, "it has no backward graph")
        saved = sizes
        if self.saved_sizes != self.symbols:
            bindings = self.bindings(sizes)
            saved = [_torch.evaluate(e, bindings) for e in self.saved_sizes]
        return self._run("backward", self.backward, self.backward_specs, tensors, saved, sizes)

    def _run(
        self,
        which: str,
        compiled: Callable[[list[Any]], Sequence[torch.Tensor]],
        specs: Sequence[TensorSpec],
        tensors: list[torch.Tensor],
        first: Sequence[Size],
        sizes: Sequence[Size],
    ) -> list[torch.Tensor]:
        exact = self.exact.get(which)
        if exact is not None and [t.dtype for t in tensors] != exact.dtypes:
            return exact.run([*first, *tensors])
        to_copy = self._results_to_copy.get(which)
        kept = list(tensors) if to_copy is None else ()
        given = [*first, *tensors]
        tensors.clear()
        results = compiled(given)
        return list(results) if to_copy == [] else self._match_specs(which, results, kept, specs, sizes)

    def _match_specs(
        self,
        which: str,
        results: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        specs: Sequence[TensorSpec],
        sizes: Sequence[Size],
    ) -> list[torch.Tensor]:
        """Make results match their recorded metadata. The first call finds which ones need a copy.

        As far as we know, compiled code keeps strides and returns fresh results. If it does not, a copy is
        cheaper than a wrong result.
        """
        bindings = self.bindings(sizes)
        results = list(results)
        if len(results) != len(specs):
            raise RegionContractError(self.key, f"{which} returned {len(results)} tensors, not {len(specs)}")
        to_copy = self._results_to_copy.get(which)
        if to_copy is None:
            storages = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
            to_copy = []
            for i, (result, spec) in enumerate(zip(results, specs, strict=True)):
                shape = tuple(_torch.evaluate(s, bindings) for s in spec.shape)
                if result.dtype is not spec.dtype or tuple(result.shape) != shape:
                    raise RegionContractError(
                        self.key,
                        f"result {i} of {which} is {result.dtype} {tuple(result.shape)}, not {spec.dtype} {shape}",
                    )
                storage = result.untyped_storage().data_ptr()
                if result.numel() and (storage in storages or result.stride() != spec.strides(bindings)):
                    to_copy.append(i)
                storages.add(storage)
            self._results_to_copy[which] = to_copy
        for i in to_copy:
            results[i] = specs[i].empty(bindings).copy_(results[i])
        return results


class _Table:
    """The compiled regions of this process, by content hash, for the operators.

    Holds weak references: each region lives as long as the compiled graphs that call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: weakref.WeakValueDictionary[str, CompiledRegion] = weakref.WeakValueDictionary()

    def add(self, region: CompiledRegion) -> CompiledRegion:
        """Add a region and return it, or the existing one of equal content."""
        with self._lock:
            return self._regions.setdefault(region.key, region)

    def __getitem__(self, key: str) -> CompiledRegion:
        try:
            return self._regions[key]
        except KeyError:
            raise RegionContractError(key, "it was not compiled in this process") from None


table = _Table()


def hold_regions(compiled: Callable[..., Any], regions: Sequence[CompiledRegion]) -> Callable[..., Any]:
    """Make a compiled graph keep the regions that it calls alive."""
    if not regions:
        return compiled
    try:
        compiled.fxpasses_regions = regions  # type: ignore[attr-defined]
        return compiled
    except AttributeError:  # for example a bound method
        return _Keeper(compiled, regions)


@dataclass(frozen=True)
class _Keeper:
    compiled: Callable[..., Any]
    regions: Sequence[CompiledRegion]

    def __call__(self, *given: Any) -> Any:
        return self.compiled(*given)
