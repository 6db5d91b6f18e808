"""Helpers shared by the tests of `fake.library`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fake.library import custom_op

NAMESPACE = "fake_library_tests"
_numbers = itertools.count()


def fresh_name(stem: str = "op") -> str:
    """A qualified name that no other test uses."""
    return f"{NAMESPACE}::{stem}_{next(_numbers)}"


def overload_of(qualname: str) -> Any:
    """The dispatcher's operator of that name."""
    namespace, name = qualname.split("::")
    return getattr(getattr(torch.ops, namespace), name).default


def numpy_sin(name: str | None = None) -> Any:
    """A differentiable operator that no tracer can look into."""

    @custom_op(name or fresh_name("numpy_sin"), mutates_args=())
    def op(x: Tensor) -> Tensor:
        return torch.from_numpy(__import__("numpy").sin(x.detach().numpy())).clone()

    @op.register_fake
    def _(x):
        return torch.empty_like(x)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    op.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0].cos(), setup_context=setup_context)
    return op


class CountingDispatcher:
    """Counts calls of an operator that leave the fast path."""

    def __init__(self, op: Any) -> None:
        self.count = 0
        self._namespace = op.fast_call._namespace
        self._original: Callable[..., Any] = self._namespace["_slow"]

    def __enter__(self) -> CountingDispatcher:
        def slow(*args: Any) -> Any:
            self.count += 1
            return self._original(*args)

        self._namespace["_slow"] = slow
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._namespace["_slow"] = self._original
