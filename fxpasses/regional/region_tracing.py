"""Tracing rules of calls of regions: torch's general ones, less the checks whose answer is known.

AOTAutograd takes every operator through functionalization and into the graph. A region's operators are functions of
plain tensors to fresh tensors, so nothing has to be found out about them: not whether they write, alias, decompose or have
effects, and not where each of their results comes from. With one call for each layer, and two dozen tensors in each call, that
is most of the time that tracing a stitched graph takes.

Both functions are rules in the sense of :func:`torch.library.register_torch_dispatch`. What they do not know (another tracer,
constants, other classes of tensors) is left to the mode's own method.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fxpasses.regional import _torch


def functionalize_region_call(
    mode: Any, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
) -> Any:
    """Call a region's operator under ``FunctionalTensorMode`` with the tensors inside, and wrap its results.

    Args:
        mode: the mode.
        func: the operator.
        types: classes of the arguments, for the mode's own method.
        args: the key, the tensors and the sizes.
        kwargs: none.
    """
    key, tensors, sizes = args
    if not all(type(t) is _torch.FunctionalTensor for t in tensors):
        return mode.__torch_dispatch__(func, types, args, kwargs)
    results = func(key, _torch.inside_of(tensors, mode), sizes)
    return [_torch.functional(t, mode) for t in results]


def trace_region_call(mode: Any, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
    """Record a call of a region's operator under ``ProxyTorchDispatchMode``: one node for the call, and one for each result.

    Args:
        mode: the mode.
        func: the operator.
        types: classes of the arguments, for the mode's own method.
        args: the key, the tensors and the sizes.
        kwargs: none.
    """
    key, tensors, sizes = args
    given = _torch.proxies_of(mode, tensors, sizes)
    if given is None:
        return mode.__torch_dispatch__(func, types, args, kwargs)
    tracer = mode.tracer
    with _torch.original_operator(func):
        call = _torch.proxy_of_call(tracer, func, (key, *given))
        with _torch.thunks(tracer):
            results = func(*args)
        _torch.set_value(call, results)
        values = call.node.meta["val"]
        layouts = _layouts(tracer, (func, key, *map(_torch.expression, sizes)), values)
        for index, (result, layout) in enumerate(zip(results, layouts, strict=True)):
            node = tracer.graph.create_node("call_function", operator.getitem, (call.node, index), {})
            node.meta = dict(call.node.meta)
            node.meta.pop("eager_input_vals", None)
            _torch.track(result, tracer.proxy(node), values[index], layout, tracer)
    return results


def _layouts(tracer: Any, call: tuple[Any, ...], values: Sequence[torch.Tensor]) -> list[Any]:
    """The layouts of results, which calls alike have in common: to describe symbolic strides takes long."""
    known = _known_layouts.setdefault(tracer, {})
    if call not in known:
        known[call] = [_torch.layout_of(value) for value in values]
    return known[call]


_known_layouts: weakref.WeakKeyDictionary[Any, dict[Any, list[Any]]] = weakref.WeakKeyDictionary()
