"""Find the source of a wrong answer: the first operator of a run whose result differs from eager's."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.conformance.compare import Verdict, compare
from benchmarks.conformance.engines import active, make_mode, to_fake
from benchmarks.conformance.observe import Observation, observe
from benchmarks.conformance.subjects import Subject, seed

__all__ = ["first_difference"]

#: One dispatched operator: its name, a description of its arguments, and its results given them.
_Call = tuple[str, str, Observation]


class _Recorder(TorchDispatchMode):
    """Records every dispatched operator with its results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Plain tensors dispatch no device query, and become parameters without a detach.
        if func.namespace == "prim" or func is torch.ops.aten.detach.default:
            return func(*args, **kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        given = ", ".join(f"{tuple(t.shape)}:{_strides(t)}" for t in tensors)
        result = func(*args, **kwargs)
        self.calls.append((str(func), given, observe(result, tensors)))
        return result


def _strides(t: torch.Tensor) -> Any:
    return tuple(t.stride()) if t.layout is torch.strided else t.layout


def first_difference(subject: Subject, engine: str, *, symbolic: bool = False) -> str:
    """Name the first dispatched operator on which eager and ``engine`` disagree, and how."""
    seed()
    eager = _record(subject, subject.inputs(), contextlib.nullcontext())
    mode = make_mode(engine, symbolic=symbolic)
    seed()
    inputs = to_fake(mode, subject.inputs())
    fake = _record(subject, inputs, active(mode))
    for ours, theirs in itertools.zip_longest(fake, eager):
        if ours is None or theirs is None:
            return f"eager goes on with {theirs[0]}" if theirs else f"the engine goes on with {ours[0]}"
        if ours[0] != theirs[0]:
            return f"eager calls {theirs[0]}({theirs[1]}), the engine {ours[0]}({ours[1]})"
        outcome = compare(theirs[2], ours[2])
        if outcome.verdict is not Verdict.OK:
            return f"{ours[0]}({ours[1]}): {outcome.detail}"
    return "no difference between dispatched operators"


def _record(subject: Subject, inputs: Any, context: contextlib.AbstractContextManager[Any]) -> list[_Call]:
    recorder = _Recorder()
    with context, recorder:
        # On an error, keep what was recorded before it.
        with contextlib.suppress(Exception):
            for _ in subject.run(inputs):
                pass
    return recorder.calls
