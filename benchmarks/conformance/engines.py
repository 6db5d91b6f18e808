"""Engines under test, selected by name."""

from __future__ import annotations

import contextlib
import copy
import importlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

import fake.kernels
from benchmarks.conformance._torch import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    ShapeEnv,
    enable_python_dispatcher,
)
from fake.kernels import composites, lazy_parameters
from fake.seam.patches import LEDGER

__all__ = ["ENGINES", "RulesMode", "active", "make_mode", "to_fake"]

ENGINES = ("torch", "rules", "fake")


class RulesMode(FakeTensorMode):
    """torch's engine with the rules of :mod:`fake.kernels` in front, and nothing else of ours.

    The cache is off, because torch's cache does not know that an ``out=`` argument may be resized. The
    fallback to real kernels is off as well, because it would hide missing rules.
    """

    uses_rules = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_fallback_kernels": False, **options})
        LEDGER.keep(*composites.PATCHES)
        LEDGER.enter(*lazy_parameters.PATCHES)
        weakref.finalize(self, LEDGER.leave_from_finalizer, *lazy_parameters.PATCHES).atexit = False
        self.cache_enabled = False

    def __deepcopy__(self, memo: dict[int, Any]) -> RulesMode:
        """Keep a copied fake tensor in its mode: ``nn.Transformer`` copies its layers."""
        return self

    def _dispatch_impl(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        rule = fake.kernels.find(func)
        if rule is not None and self._only_fakes(args, kwargs):
            result = rule(self, func, tuple(args), dict(kwargs))
            if result is not NotImplemented:
                return result
        return super()._dispatch_impl(func, types, args, kwargs)

    def _only_fakes(self, args: Any, kwargs: Any) -> bool:
        """Return whether all tensors are fake tensors of this mode, and not all of them are constants."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if hasattr(leaf, "untyped_storage")]
        if not all(isinstance(t, FakeTensor) and t.fake_mode is self for t in tensors):
            return False
        return not tensors or any(t.constant is None for t in tensors)


def make_mode(engine: str, *, symbolic: bool = False) -> FakeTensorMode:
    """Return a new mode of the engine ``"torch"``, ``"rules"`` (torch's with our rules) or ``"fake"`` (ours).

    Raises:
        ValueError: no engine has that name.
    """
    options: dict[str, Any] = {"shape_env": ShapeEnv()} if symbolic else {}
    match engine:
        case "torch":
            return FakeTensorMode(**options)
        case "rules":
            return RulesMode(**options)
        case "fake":
            return importlib.import_module("fake").FakeTensorMode(**options)
    raise ValueError(f"engine {engine!r} is none of {', '.join(ENGINES)}")


def to_fake(mode: FakeTensorMode, tree: Any) -> Any:
    """Replace tensors in ``tree`` by fake tensors of ``mode``, and modules by copies with fake parameters."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return mode.from_tensor(leaf)
        if isinstance(leaf, torch.nn.Module):
            with FakeCopyMode(mode):
                return copy.deepcopy(leaf)
        return leaf

    return pytree.tree_map(one, tree)


@contextlib.contextmanager
def active(mode: FakeTensorMode) -> Iterator[None]:
    """Run under ``mode``; with symbolic sizes also under the Python dispatcher, as Dynamo and AOTAutograd do."""
    with mode, enable_python_dispatcher() if mode.shape_env is not None else contextlib.nullcontext():
        yield
