"""The inputs of a graph that is recorded: where each comes from, and what is asked of their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fake.symbols.shape_guards import guards_of
from fxpasses.plans import _torch_compiled as _t
from fxpasses.plans._torch_optimizers import Option
from fxpasses.plans.arguments import sources_of
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.generated import Module, used_parameters
from fxpasses.plans.walk import Walk


class RecordedInputs:
    """The inputs of what Dynamo's graph is compiled to: tensors that the graph has as attributes, and then its own inputs.

    Attributes:
        lifted: how many are attributes.
        sources: where each comes from: see :func:`~fxpasses.plans.arguments.sources_of`.
    """

    def __init__(self) -> None:
        self.lifted = 0
        self.sources: list[list[Any]] = []
        self._names, self._numbers = list[str](), list[list[Any] | None]()
        self._guards: tuple[str, dict[str, tuple[int, bool]]] | None = None

    @property
    def are_fixed(self) -> bool:
        """Whether the graph is one for these sizes alone."""
        return self._guards is None

    @property
    def options(self) -> list[Option]:
        """The floats among them that an optimizer holds, and that may be others in each call."""
        return [(n[1], n[2]) for n in self._numbers if n is not None and n[0] == "option"]

    def note(self, graph: fx.Graph) -> None:
        """See what Dynamo's graph takes.

        Raises:
            NoPlan: a number is none of a tensor.
        """
        self._names, self._numbers = _t.sized_inputs(graph, self.lifted)

    def guard(self, shape_env: Any) -> None:
        """See what is asked of sizes.

        Raises:
            NoPlan: something is asked of what is no input.
        """
        if not any(self._numbers):
            return
        guards = guards_of(shape_env).compile()
        asked = {p: guards.inputs[i] for p, i in used_parameters(guards.code).items()}
        try:
            places = {
                p: (self._names.index(n.removesuffix("._base")), "._base" in n) for p, n in asked.items()
            }
        except ValueError:
            raise NoPlan("a guard on a size that is no input of the graph") from None
        self._guards = guards.code, places

    def look(self, inputs: Sequence[Any], walk: Walk, arguments: Sequence[torch.Tensor]) -> None:
        """See where they come from.

        Args:
            inputs: those of a call.
            walk: over the model.
            arguments: the tensors among the arguments.

        Raises:
            NoPlan: one comes from elsewhere.
        """
        gradients = {i: walk.tensors[i].grad for i, facts in walk.gradients or () if facts}
        self.sources = sources_of(inputs, walk.tensors, arguments, self._numbers, gradients)
        if any(source[0] != "model" for source in self.sources[: self.lifted]):
            raise NoPlan("a graph that holds tensors of others")

    def asked(self, module: Module) -> list[list[Any]] | None:
        """What the guards on sizes are called with, or None where there are none. Args: the module that they become part of.

        Raises:
            NoPlan: they ask for what they cannot be called with.
        """
        if self._guards is None:
            return None
        code, places = self._guards
        asks = {name: [*self.sources[i], base] for name, (i, base) in places.items()}
        if any(place in ("gradient", "option") for place, *_ in asks.values()):
            raise NoPlan("a symbolic size of a gradient")
        # Of a base Dynamo asks what is symbolic, and nothing else: it is no input of the graph.
        known = [name for name, (place, _, base) in asks.items() if place == "model" or base]
        return [asks[name] for name in module.add_guards(code, known)]


def versions(inputs: Sequence[Any]) -> list[int]:
    """How often each tensor was changed, as far as torch counts it."""
    return [t._version for t in inputs if isinstance(t, torch.Tensor) and not t.is_inference()]


def check_memory(inputs: Sequence[Any]) -> None:
    """Where tensors are changed, which others see it is part of what was compiled: ask that it is none."""
    places = [t.untyped_storage().data_ptr() for t in inputs if isinstance(t, torch.Tensor) and t.numel()]
    if len(set(places)) != len(places):
        raise NoPlan("changed tensors among tensors that share memory")
