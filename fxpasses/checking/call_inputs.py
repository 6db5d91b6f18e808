"""The inputs on which a checked call is tried: its own, and those made from them that tend to break rewrites."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.comparison.nan_guards import has_finite_tests, has_masks
from fxpasses.checking.critical.masked_rows import with_masked_rows
from fxpasses.checking.critical.overflow import OVERFLOW_FRACTION, largest_power, stays_finite
from fxpasses.checking.execution.inputs import (
    cloned,
    in_memory,
    is_tangent,
    made_up,
    make_tangents,
    placeholders,
    resized_inputs,
    scaled,
    symbol_bindings,
)
from fxpasses.exact.bounds import inputs_at_bounds, inputs_with_rare_values
from fxpasses.exact.samples import EDGES, Family, sort_inputs

_POWER = 5
"""Power of two to scale values up by, if results stay finite: beyond the limits of a clamp."""
_NONFINITE_FAMILIES: tuple[Family, ...] = ("infinity", "not a number")
_DRAWS = 3
"""How often such values are drawn for a graph with masks, each of which hides some of them."""
_SMALL = -12
"""Power of two at which differences of numbers near one have lost half of their digits."""
_MAX_SCALED_INPUTS, _SCALED_POWER = 4, 7
"""How many inputs are scaled up one by one, and by which power of two."""
_SMALL_INTS = (torch.int8, torch.uint8, torch.int16)


class CallInputs:
    """Inputs for the graphs of one kind, made from those of one call.

    Args:
        gm: the first of these graphs.
        kind: whether it is the ``backward`` graph, which is given all inputs.
        args: the inputs of the call.
        seed: for made-up inputs.

    Attributes:
        bound: the value of each symbol.
    """

    def __init__(self, gm: fx.GraphModule, kind: str, args: Sequence[Any], seed: int) -> None:
        self._gm, self._nodes = gm, placeholders(gm)
        self._gradients = [n for n in self._nodes if is_tangent(n)]
        self._is_backward = kind == "backward"
        count = len(self._nodes) - (0 if self._is_backward else len(self._gradients))
        self._given = list(args)[:count]
        self._generator = torch.Generator().manual_seed(seed)
        self.bound = symbol_bindings(self._nodes, self._given)
        self._real: list[tuple[list[Any], str]] = []

    def real(self, every_kind: bool) -> list[tuple[list[Any], str]]:
        """Return the inputs of the call with gradients of outputs, and a description of those.

        Args:
            every_kind: whether to also try gradients that are ones and zeros.
        """
        if not self._real:
            if self._is_backward:
                self._real.append((self._given, ""))
            kinds = ("random", "ones", "zero") if every_kind else ("random",)
            for kind in kinds if self._gradients else kinds[:1]:
                label = f" with {kind} output gradients" if self._gradients else ""
                self._real.append((self._with_gradients(self._given, self.bound, kind), label))
        return self._real

    @functools.cached_property
    def made_up(self) -> list[tuple[list[Any], str, bool]]:
        """Inputs that tend to break rewrites, their description, and whether their magnitude was chosen."""
        values = self._with_gradients(self._given, self.bound)
        families: tuple[Family, ...] = (
            "random",
            *EDGES,
            *_NONFINITE_FAMILIES * (_DRAWS if has_masks(self._gm) else 1),
        )  # a mask may hide non-finite values
        found = []
        for family in families:
            if family == "index bounds":
                ends = inputs_at_bounds(self._gm, values) if all(map(_is_on_cpu, values)) else ()
                found += [(made, "integers at the ends of what the graph takes") for made in ends]
            else:
                found.append((made_up(values, family, self._generator), family))
            if family == "infinity" and has_finite_tests(self._gm):
                found.append((_negative_infinities(found[-1][0]), "minus infinity"))
            if family == "extreme integers":
                found += _with_opposite_extremes(found[-1][0])
        usual = found[0][0]  # random ones
        found += inputs_with_rare_values(self._gm, usual) if all(map(_is_on_cpu, values)) else ()
        masked = with_masked_rows(self._gm, usual, self._generator)
        found += [] if masked is None else [(masked, "masked scores")]
        unscaled_count = len(found)
        is_finite = lambda power: stays_finite(self._gm, scaled(usual, 2.0**power), inside=True)  # noqa: E731
        largest = int(OVERFLOW_FRACTION * largest_power(is_finite))
        for power in dict.fromkeys([min(_POWER, largest), largest, _SMALL]):
            found.append((scaled(usual, 2.0**power), f"random, times 2**{power}"))
        # Next to a row of negative numbers, a number that stands for minus infinity is large.
        signs = next(values for values, family in found if family == "signs")
        found.append((scaled(signs, 2.0**largest), f"signs, times 2**{largest}"))
        found += [*self._with_one_extreme_input(usual), *self._with_constant_rows(usual)]
        return [
            (sort_inputs(self._gm, made), where, at >= unscaled_count)
            for at, (made, where) in enumerate(found)
        ]

    def _with_one_extreme_input(self, usual: list[Any]) -> Iterator[tuple[list[Any], str]]:
        """Zeros or large values in one input: in all, a pole or overflow of one hides what another shows."""
        floats = [
            i
            for i, (n, v) in enumerate(zip(self._nodes, usual, strict=True))
            if isinstance(v, Tensor) and v.is_floating_point() and not is_tangent(n)
        ]
        if not 1 < len(floats) <= _MAX_SCALED_INPUTS:
            return
        zeros = made_up(usual, "zeros", self._generator)
        large = scaled(usual, 2.0**_SCALED_POWER)
        for at in floats:
            for made, what in ((zeros, "zeros"), (large, f"random, times 2**{_SCALED_POWER},")):
                values = [*usual[:at], made[at], *usual[at + 1 :]]
                if made is zeros or stays_finite(self._gm, values, inside=True):
                    yield values, f"{what} in {self._nodes[at].name}"

    def _with_constant_rows(self, usual: list[Any]) -> Iterator[tuple[list[Any], str]]:
        """Constant and zero rows in all but parameters: these hide what happens at zeros of the data."""
        parameters = [isinstance(v, torch.nn.Parameter) for v in self._given]
        parameters += [True] * (len(usual) - len(parameters))  # gradients of outputs
        if any(parameters[: len(self._given)]) and not all(parameters):
            pairs = zip(usual, made_up(usual, "rows", self._generator), parameters, strict=True)
            yield [value if is_kept else row for value, row, is_kept in pairs], "rows in what is no parameter"

    def with_sizes(self, sizes: Mapping[Any, int]) -> list[Any]:
        """Make up inputs of other sizes. Raises: Unsupported: there are none."""
        given = resized_inputs(self._nodes[: len(self._given)], self._given, sizes, self._generator)
        return sort_inputs(self._gm, self._with_gradients(given, sizes))

    def traced(self) -> list[Any]:
        """Return inputs with the sizes of this call."""
        return self._with_gradients(cloned(self._given), self.bound)

    def _with_gradients(self, values: list[Any], sizes: Any, kind: str = "random") -> list[Any]:
        new = iter(make_tangents(self._gradients, sizes, kind, self._generator))
        others = iter(v for n, v in zip(self._nodes, values, strict=False) if not is_tangent(n))
        return [next(new) if is_tangent(n) else next(others) for n in self._nodes]


def _with_opposite_extremes(values: list[Any]) -> list[tuple[list[Any], str]]:
    """Flip every other integer tensor, if there are several: one is low where another is high."""
    integers = [
        i for i, v in enumerate(values) if isinstance(v, Tensor) and v.dtype in _SMALL_INTS and v.dim()
    ]
    flipped = cloned(values)
    for i in integers[1::2]:
        in_memory(flipped[i]).copy_(in_memory(values[i]).flip(0))
    return [(flipped, "extreme integers, low where others are high")] if len(integers) > 1 else []


def _negative_infinities(values: list[Any]) -> list[Any]:
    """Replace infinity by minus infinity."""
    return [
        v.masked_fill(v == math.inf, -math.inf) if isinstance(v, Tensor) and v.is_floating_point() else v
        for v in values
    ]


def _is_on_cpu(value: Any) -> bool:
    """Whether a bad index raises: on other devices it makes the device unusable for the process."""
    return not isinstance(value, Tensor) or value.device.type == "cpu"
