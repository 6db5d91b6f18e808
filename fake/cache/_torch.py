"""Private names of torch that only the dispatch cache relies on."""

from __future__ import annotations

from typing import Any

from torch._higher_order_ops import utils as higher_order_utils

from fake.seam.aot_autograd import config as functorch_config


def uncached_higher_order_operators() -> set[Any]:
    """Higher-order operators whose fake implementation is not to be cached, as their authors said."""
    return getattr(higher_order_utils, "hops_that_skip_faketensor_cache", set())


def wrapped_subgraph(value: object) -> Any:
    """The graph inside a callable that torch puts around a subgraph, or None."""
    wrapper = getattr(higher_order_utils, "SubgraphCallableWrapper", None)
    wrapper = wrapper or getattr(higher_order_utils, "FunctionalizeCtxWrapper", None)
    return value.subgraph if wrapper is not None and isinstance(value, wrapper) else None  # type: ignore[attr-defined]


def preferred_device_type() -> object | None:
    """torch's setting that lets tensors of several devices meet."""
    return getattr(functorch_config, "fake_tensor_prefer_device_type", None)
