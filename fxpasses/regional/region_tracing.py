"""Tracing rules for region calls: torch's general ones without the checks whose answer is known.

AOTAutograd passes every operator through functionalization and into the graph. A region's operators are
functions from plain tensors to fresh tensors, so torch need not find out whether they write, alias, decompose
or have effects, nor where each result comes from. With one call per layer and two dozen tensors per call,
that is most of the time to trace a stitched graph.

Both functions are rules for :func:`torch.library.register_torch_dispatch`. Cases that they do not handle
(another tracer, constants, other tensor classes) go to the mode's own method.
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
    """Call a region's operator under ``FunctionalTensorMode`` with unwrapped tensors, and wrap its results.

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
    results = func(key, _torch.unwrap_functional(tensors, mode), sizes)
    return [_torch.wrap_functional(t, mode) for t in results]


def trace_region_call(mode: Any, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
    """Record a region call under ``ProxyTorchDispatchMode``: a node for the call, and one per result.

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
    """Return the layouts of results, cached for equal calls because describing symbolic strides is slow."""
    known = _known_layouts.setdefault(tracer, {})
    if call not in known:
        known[call] = [_torch.layout_of(value) for value in values]
    return known[call]


_known_layouts: weakref.WeakKeyDictionary[Any, dict[Any, list[Any]]] = weakref.WeakKeyDictionary()
