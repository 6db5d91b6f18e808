"""Subjects of the sweep: one operator or module with one sample, run on real or fake tensors.

Each subject can rebuild its real inputs (a run may change them) and run on given inputs. A run yields
``(table, results)`` step by step, so that steps before an error still count.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from benchmarks.conformance import _torch
from benchmarks.conformance.layouts import OUT_KINDS, make_out, relayout

__all__ = ["Subject", "entry_name", "names", "pick", "seed", "subjects"]

#: One step of a run: the table that it belongs to, and its results.
Step = tuple[str, Any]

_NOT_DISPATCHED = "jiterator_"
"""Entries that launch a kernel without the dispatcher: on a GPU, a fake tensor has no memory for it."""

_FIRST_CHOICE = (torch.float32, torch.complex64, torch.int64, torch.bool, torch.float64, torch.bfloat16)


@dataclass(frozen=True)
class Subject:
    """One thing to run in eager and in the engine under test."""

    database: str
    name: str
    dtype: torch.dtype
    sample: int
    layout: str
    #: Makes new real inputs; called before each run.
    inputs: Callable[[], Any] = field(repr=False)
    #: Runs on real or fake inputs.
    run: Callable[[Any], Iterator[Step]] = field(repr=False)

    @property
    def label(self) -> str:
        return f"{self.database}:{self.name} {str(self.dtype).removeprefix('torch.')} sample {self.sample}"


def seed() -> None:
    """Make samples and kernels reproducible."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def names() -> list[tuple[str, Any]]:
    """Return all (database, entry) pairs, in the order of the databases."""
    return [
        *(("op", entry) for entry in _torch.op_db()),
        *(("custom", entry) for entry in _torch.custom_op_db()),
        *(("module", entry) for entry in _torch.module_db()),
    ]


def entry_name(entry: Any) -> str:
    """Return the name that reports and patterns use."""
    variant = getattr(entry, "variant_test_name", "")
    return f"{entry.name}.{variant}" if variant else entry.name


def subjects(
    database: str,
    entry: Any,
    *,
    layouts: Sequence[str],
    tables: Sequence[str],
    samples: int,
    dtypes: Sequence[torch.dtype],
    device: str = "cpu",
) -> Iterator[Subject]:
    """Yield all subjects of one entry on a device, each sample in each layout that changes it."""
    if entry_name(entry).startswith(_NOT_DISPATCHED):
        return
    supported = entry.supported_dtypes(device)
    chosen = [d for d in dtypes if d in supported]
    if not chosen and supported:
        chosen = [next((d for d in _FIRST_CHOICE if d in supported), min(supported, key=str))]
    make = _module_subjects if database == "module" else _operator_subjects
    for dtype in chosen:
        yield from make(database, entry, dtype, layouts, tables, samples, device)


def pick(all_samples: list[Any], limit: int) -> list[tuple[int, Any]]:
    """Return at most ``limit`` evenly spread samples (0: all), with their positions."""
    numbered = list(enumerate(all_samples))
    if limit <= 0 or len(numbered) <= limit:
        return numbered
    return [numbered[i * len(numbered) // limit] for i in range(limit)]


def _operator_subjects(
    database: str,
    entry: Any,
    dtype: torch.dtype,
    layouts: Sequence[str],
    tables: Sequence[str],
    limit: int,
    device: str,
) -> Iterator[Subject]:
    seed()
    wants_grad = entry.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    found = list(entry.sample_inputs(device, dtype, requires_grad=wants_grad))
    for place, sample in pick(found, limit):
        call = (sample.input, sample.args, sample.kwargs)
        for layout in layouts:
            # Authors promise a custom operator's fake kernel; torch's tests promise row-major results.
            if layout != "given" and (database == "custom" or not relayout(call, layout)[1]):
                continue
            runs: list[tuple[Callable[[], Any], Callable[[Any], Iterator[Step]]]] = []
            if "forward" in tables or "backward" in tables:
                backward = wants_grad and "backward" in tables
                runs.append((_inputs(call, layout, grad=True), _forward_backward(entry.op, sample, backward)))
            if "in-place" in tables and entry.inplace_variant is not None:
                runs.append((_inputs(call, layout, grad=False), _in_place(entry.inplace_variant)))
            if "out" in tables and entry.supports_out:
                runs.extend(_out_runs(entry.op, call, layout))
            for inputs, run in runs:
                yield Subject(database, entry_name(entry), dtype, place, layout, inputs, run)


def _inputs(call: Any, layout: str, *, grad: bool) -> Callable[[], Any]:
    return lambda: relayout(call, layout, requires_grad=grad)[0]


def _forward_backward(op: Any, sample: Any, backward: bool) -> Callable[[Any], Iterator[Step]]:
    def run(call: Any) -> Iterator[Step]:
        first, args, kwargs = call
        result = op(first, *args, **kwargs)
        yield "forward", result
        if backward:
            yield from _gradients(sample.output_process_fn_grad(result), call)

    return run


def _gradients(result: Any, inputs: Any) -> Iterator[Step]:
    """Yield gradients for dense incoming gradients in the result's layout, and for expanded scalars."""
    outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    wanted = [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outputs or not wanted:
        return
    dense = [torch.ones_like(o) for o in outputs]
    yield "backward", torch.autograd.grad(outputs, wanted, dense, allow_unused=True, retain_graph=True)
    if all(o.layout is torch.strided for o in outputs):
        expanded = [o.detach().new_ones(()).expand(o.shape) for o in outputs]
        yield "backward of sum", torch.autograd.grad(outputs, wanted, expanded, allow_unused=True)


def _in_place(variant: Any) -> Callable[[Any], Iterator[Step]]:
    def run(call: Any) -> Iterator[Step]:
        first, args, kwargs = call
        result = variant(first, *args, **kwargs)
        yield "in-place", (result, first)

    return run


def _out_runs(
    op: Any, call: Any, layout: str
) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Iterator[Step]]]]:
    """Yield one run per kind in :data:`OUT_KINDS`; none if the operator raises or returns non-tensors."""
    first, args, kwargs = relayout(call, layout, requires_grad=False)[0]
    try:
        result = op(first, *args, **kwargs)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError):
        return
    expected = list(result) if isinstance(result, tuple | list) else [result]
    if not all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in expected):
        return
    facts = [(tuple(t.shape), t.dtype, t.device) for t in expected]

    def inputs(kind: str) -> Any:
        outs = tuple(make_out(kind, *fact) for fact in facts)
        call_again = relayout(call, layout, requires_grad=False)[0]
        return (*call_again, outs if isinstance(result, tuple | list) else outs[0])

    def run_kind(kind: str) -> Callable[[Any], Iterator[Step]]:
        def run(call_and_out: Any) -> Iterator[Step]:
            first, args, kwargs, out = call_and_out
            returned = op(first, *args, **{**kwargs, "out": out})
            yield f"out {kind}", (returned, out)

        return run

    for kind in OUT_KINDS:
        yield functools.partial(inputs, kind), run_kind(kind)


def _module_subjects(
    database: str,
    entry: Any,
    dtype: torch.dtype,
    layouts: Sequence[str],
    tables: Sequence[str],
    limit: int,
    device: str,
) -> Iterator[Subject]:
    """Yield subjects that build the module inside the run, so that parameters are fake from the start."""
    if "forward" not in tables and "backward" not in tables:
        return
    for training in (True, False) if entry.train_and_eval_differ else (True,):
        seed()
        found = entry.module_inputs_func(
            entry, device=device, dtype=dtype, requires_grad=dtype.is_floating_point, training=training
        )
        for place, sample in pick(list(found), limit):
            made, given = sample.constructor_input, sample.forward_input
            call = (made.args, made.kwargs, given.args if given else (), given.kwargs if given else {})
            for layout in layouts:
                if layout != "given" and not relayout(call[2:], layout)[1]:
                    continue
                backward = "backward" in tables
                run = _module(entry.module_cls, dtype, device, training, given is not None, backward)
                yield Subject(
                    database, entry_name(entry), dtype, place, layout, _inputs(call, layout, grad=True), run
                )


def _module(
    cls: type[torch.nn.Module],
    dtype: torch.dtype,
    device: str,
    training: bool,
    callable_: bool,
    backward: bool,
) -> Callable[[Any], Iterator[Step]]:
    def run(call: Any) -> Iterator[Step]:
        made_args, made_kwargs, args, kwargs = call
        module = cls(*made_args, **made_kwargs).train(training)
        if dtype is not torch.get_default_dtype() or device != "cpu":
            module = module.to(device, dtype)
        yield "construct", [*module.parameters(), *module.buffers()] if not _is_lazy(module) else ()
        if callable_:
            result = module(*args, **kwargs)
            yield "forward", (result, [*module.parameters(), *module.buffers()])
            if backward:
                yield from _gradients(result, (args, kwargs, list(module.parameters())))

    return run


def _is_lazy(module: torch.nn.Module) -> bool:
    return any(torch.nn.parameter.is_lazy(p) for p in [*module.parameters(), *module.buffers()])
