"""A compiled region, and how its compiled functions' results become those of the region.

Compiled code may not return two tensors in the same memory through an opaque operator: whoever plans memory around it
would reuse the one while the other is needed. So an operator returns each storage once, and a
:class:`Source` says how a value is made from it by views.
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
"""The values of a region's symbols in one call."""


@dataclass(frozen=True)
class TensorSpec:
    """Metadata of a result; sizes may be sympy expressions of the region's symbols."""

    shape: tuple[int | sympy.Basic, ...]
    stride: tuple[int | sympy.Basic, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self, bindings: Bindings) -> torch.Tensor:
        """A tensor with this metadata, for given values of the symbols."""
        shape = [_torch.evaluate(s, bindings) for s in self.shape]
        stride = [_torch.evaluate(s, bindings) for s in self.stride]
        return torch.empty_strided(shape, stride, dtype=self.dtype, device=self.device)

    def strides(self, bindings: Bindings) -> tuple[Size, ...]:
        """The strides, for given values of the symbols."""
        return tuple(_torch.evaluate(s, bindings) for s in self.stride)


class Previous:
    """Stands for the value before, in the arguments of a :class:`Step`."""

    def __repr__(self) -> str:
        return "previous"


PREVIOUS = Previous()


@dataclass(frozen=True)
class Step:
    """One view operator: its arguments are constants, sympy expressions, and :data:`PREVIOUS`."""

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
    """The origin of a value: an input or a result of an operator, and views of it.

    Attributes:
        is_input: whether from one of the operator's inputs or one of its results.
        index: which one.
        steps: the views that make the value of it.
    """

    is_input: bool
    index: int
    steps: tuple[Step, ...] = ()

    def base(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor that the value is a view of."""
        return inputs[self.index] if self.is_input else results[self.index]

    def view(self, base: torch.Tensor, bindings: Bindings) -> torch.Tensor:
        """The value, given its base."""
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
    """A way to run a region's graph on other types than those that it was compiled for.

    Attributes:
        dtypes: the types of the tensors that it was compiled for.
        run: takes the list of sizes and tensors; returns the results, in float64 where they are floating.
    """

    dtypes: list[torch.dtype]
    run: Callable[[list[Any]], list[Any]]


@dataclass(eq=False)
class CompiledRegion:
    """One region, compiled.

    Attributes:
        symbols: the symbols whose values its operators take as ``sizes``.
        given: its tensor inputs, as they were when it was compiled.
        forward: takes a list of sizes and tensors; returns what ``forward_specs`` describe.
        outputs: how its outputs are made of its inputs and of what ``forward`` returns.
        differentiable: which outputs the backward pass takes a gradient for.
        random: whether it calls the RNG.
        saved: for each tensor that ``backward`` takes before the gradients, how it is made.
        saved_sizes: expressions of the sizes that ``backward`` takes first.
        backward: takes a list of sizes, saved tensors, gradients; ``None`` when nothing needs a gradient.
        gradients: for each tensor input, how its gradient is made of the tensors that ``backward`` takes and what it
            returns; ``None`` for none.
        tangents: metadata that ``backward`` expects of the gradients of the outputs.
        key: content hash: what is compiled and what it returns.
        exact: for ``"forward"`` and ``"backward"``, how to run it on wider types than it was compiled for. The value check
            does, which is why this is empty without it.
        inner: the regions that it calls itself.
        communicating: for ``"forward"`` and ``"backward"``, the graph, if there are collectives in it.
        work: for ``"forward"`` and ``"backward"``, FLOPs and bytes of each call.
        inlined: for ``"forward"`` and ``"backward"``, the graph that takes the place of its calls once they are traced; empty for what is called.
        grad_placements: for each tensor input, the placements of the gradient of the DTensor that it is the local tensor of, or ``None``.
    """

    symbols: list[sympy.Symbol]
    given: list[TensorSpec]
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
    _mend: dict[str, list[int] | None] = field(default_factory=dict)

    def bindings(self, sizes: Sequence[Size]) -> dict[sympy.Symbol, Size]:
        """The values of the symbols."""
        return dict(zip(self.symbols, sizes, strict=True))

    def run_forward(self, tensors: list[torch.Tensor], sizes: list[Size]) -> list[torch.Tensor]:
        """Run the compiled forward graph. Empties ``tensors``: those that nobody else holds can be freed early."""
        return self._run("forward", self.forward, self.forward_specs, tensors, sizes, sizes)

    def run_backward(self, tensors: list[torch.Tensor], sizes: list[Size]) -> list[torch.Tensor]:
        """Run the compiled backward graph. Empties ``tensors``."""
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
        mend = self._mend.get(which)
        kept = list(tensors) if mend is None else ()
        given = [*first, *tensors]
        tensors.clear()
        results = compiled(given)
        return list(results) if mend == [] else self._conform(which, results, kept, specs, sizes)

    def _conform(
        self,
        which: str,
        results: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        specs: Sequence[TensorSpec],
        sizes: Sequence[Size],
    ) -> list[torch.Tensor]:
        """Hold results to what was recorded: the first call finds out which ones have to be copied for that.

        Compiled code keeps strides and makes fresh results as far as we know; where it does not, a copy costs less than
        a wrong result.
        """
        bindings = self.bindings(sizes)
        results = list(results)
        if len(results) != len(specs):
            raise RegionContractError(self.key, f"{which} returned {len(results)} tensors, not {len(specs)}")
        mend = self._mend.get(which)
        if mend is None:
            taken = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
            mend = []
            for i, (result, spec) in enumerate(zip(results, specs, strict=True)):
                shape = tuple(_torch.evaluate(s, bindings) for s in spec.shape)
                if result.dtype is not spec.dtype or tuple(result.shape) != shape:
                    raise RegionContractError(
                        self.key,
                        f"result {i} of {which} is {result.dtype} {tuple(result.shape)}, not {spec.dtype} {shape}",
                    )
                memory = result.untyped_storage().data_ptr()
                if result.numel() and (memory in taken or result.stride() != spec.strides(bindings)):
                    mend.append(i)
                taken.add(memory)
            self._mend[which] = mend
        for i in mend:
            results[i] = specs[i].empty(bindings).copy_(results[i])
        return results


class _Table:
    """The compiled regions of this process, by content: the operators find them here.

    It holds none: each lives as long as the compiled graphs that call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: weakref.WeakValueDictionary[str, CompiledRegion] = weakref.WeakValueDictionary()

    def add(self, region: CompiledRegion) -> CompiledRegion:
        """Enter a region; gives the one of the same content that is there already, if any."""
        with self._lock:
            return self._regions.setdefault(region.key, region)

    def __getitem__(self, key: str) -> CompiledRegion:
        try:
            return self._regions[key]
        except KeyError:
            raise RegionContractError(key, "it was not compiled in this process") from None


table = _Table()


def hold_regions(compiled: Callable[..., Any], regions: Sequence[CompiledRegion]) -> Callable[..., Any]:
    """A compiled graph that holds the regions that it calls."""
    if not regions:
        return compiled
    try:
        compiled.fxpasses_regions = regions  # type: ignore[attr-defined]
        return compiled
    except AttributeError:  # a bound method, say
        return _Keeper(compiled, regions)


@dataclass(frozen=True)
class _Keeper:
    compiled: Callable[..., Any]
    regions: Sequence[CompiledRegion]

    def __call__(self, *given: Any) -> Any:
        return self.compiled(*given)
