"""Eager runs of graphs that contain Inductor's random operators.

Inductor replaces random operators by its own, which draw from a seed. The backward graph draws again from the
seed that the forward graph used. Their eager kernels ignore the seed. So Inductor compiles each such call
alone, which returns the same numbers as in a compiled graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxpasses import _torch
from fxpasses.compiling import _torch_inductor
from fxpasses.errors import HandoverError
from fxpasses.graphs.rewriting import copy_graph


def with_inductor_rng(gm: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with its draws from seeds compiled; the same graph if it has none."""
    if not any(node.target in _REPLACED for node in gm.graph.nodes):
        return gm
    module = copy_graph(gm)
    for node in module.graph.nodes:
        if node.target in _REPLACED:
            node.target = _REPLACED[node.target]
    module.recompile()
    return module


def inductor_random(*args: Any, **kwargs: Any) -> torch.Tensor:
    """``inductor_random`` with the results of compiled code."""
    return _call(_torch_inductor.INDUCTOR_RANDOM, args, kwargs)


def inductor_randint(*args: Any, **kwargs: Any) -> torch.Tensor:
    """``inductor_randint`` with the results of compiled code."""
    return _call(_torch_inductor.INDUCTOR_RANDINT, args, kwargs)


_REPLACED: dict[Any, Callable[..., torch.Tensor]] = {
    _torch_inductor.INDUCTOR_RANDOM: inductor_random,
    _torch_inductor.INDUCTOR_RANDINT: inductor_randint,
}
_SEED = "the seed"


def _call(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    seeds = [a for a in args if isinstance(a, torch.Tensor)]
    described = tuple(
        _SEED if isinstance(a, torch.Tensor) else tuple(a) if isinstance(a, list) else a for a in args
    )
    try:
        return _compiled(operator, described, tuple(kwargs.items()))(*seeds)
    except Exception as error:
        raise HandoverError(
            f"{operator} cannot be compiled alone, and eager's kernel ignores its seed, from which the backward graph "
            "may draw again: options={'inductor': {'fallback_random': True}} leaves random operators as they are"
        ) from error


@functools.lru_cache(maxsize=64)
def _compiled(
    operator: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    def call(seed: torch.Tensor) -> torch.Tensor:
        return operator(*(seed if a is _SEED else a for a in args), **dict(kwargs))

    return torch.compile(_torch.with_own_code(call), backend="inductor", fullgraph=True, dynamic=False)
