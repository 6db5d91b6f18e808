"""Cached views of weights, which a plan keeps while the memory of the weights does not move.

Inductor's code passes a matmul its transposed weight as ``reinterpret_tensor(weight, ...)``, which costs half
as much as a small matmul.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable

import torch

from fxpasses.plans import _torch
from fxpasses.plans.tensors.temporaries import functions, kernel_arguments, replace_argument, viewed_tensor

_reinterpret: Callable[..., torch.Tensor] = _torch.prelude()["reinterpret_tensor"]


class HeldViews:
    """The views of one plan's weights, by ``id``. Weights live as long as their plan, so ids are unique."""

    def __init__(self) -> None:
        self._weights: frozenset[int] = frozenset()
        self._places: list[dict[int, torch.Tensor]] = []

    def add_weights(self, weights: Iterable[torch.Tensor]) -> None:
        """Also cache views of these tensors from now on."""
        self._weights |= frozenset(map(id, weights))

    def place(self) -> dict[int, torch.Tensor]:
        """A new cache for the views that one place in the code creates."""
        self._places.append({})
        return self._places[-1]

    def view(
        self,
        place: dict[int, torch.Tensor],
        tensor: torch.Tensor,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
    ) -> torch.Tensor:
        """Create a view, and cache it if ``tensor`` is a weight.

        Args:
            place: of the code, from :meth:`place`.
            tensor: the tensor, which may be a weight.
            size: of the view.
            stride: of the view.
            offset: as in ``reinterpret_tensor``.
        """
        made = _reinterpret(tensor, size, stride, offset)
        if id(tensor) in self._weights:
            place[id(tensor)] = made
        return made

    def forget(self) -> None:
        """Drop all cached views."""
        for place in self._places:
            place.clear()


def cache_views(body: list[ast.stmt]) -> list[ast.stmt]:
    """Rewrite Inductor's code to cache views of its inputs; returns the statements that make the caches.

    Covers only views that a kernel of torch reads while it writes to ``out=``: nothing else ever sees them.
    """
    places: list[ast.stmt] = []
    for function in functions(body):
        inputs = _inputs(function)
        for statement in function.body:
            for argument in kernel_arguments(statement, ()):
                of = viewed_tensor(argument)
                if of is argument or of is None or of.id not in inputs:
                    continue
                name, view = f"views_{len(places)}", ast.unparse(argument).partition("(")[2]
                places += ast.parse(f"{name} = held_views.place()").body
                known = f"known if (known := {name}.get(id({of.id}))) is not None else held_views.view({name}, {view}"
                replace_argument(statement, argument, ast.parse(known, mode="eval").body)
    return places


def _inputs(function: ast.FunctionDef) -> set[str]:
    """The names that a function unpacks from its arguments and never reassigns."""
    stored = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    names: set[str] = set()
    for statement in function.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value) == "args":
            names = {node.id for node in ast.walk(statement.targets[0]) if isinstance(node, ast.Name)}
    return {name for name in names if stored.count(name) == 1 and name.startswith(_WEIGHT_PREFIXES)}


_WEIGHT_PREFIXES = ("primals", "arg", "input", "weight")
"""Prefixes of inputs that may be weights. Gradients and values saved for the backward pass have others."""
