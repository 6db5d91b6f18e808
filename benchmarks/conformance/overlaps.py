"""Measures which operators refuse to write to memory that overlaps: part of the table of ``fake.kernels``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.conformance._torch import TorchDispatchMode
from benchmarks.conformance.isolate import isolated
from benchmarks.conformance.refusals import copied, dense_results
from benchmarks.conformance.subjects import entry_name, pick, seed
from benchmarks.conformance.sweep import Options
from fake.kernels.overlaps import kinds_of

__all__ = ["measure_overlaps"]

Observed = dict[str, dict[str, list[bool]]]


class _Watch(TorchDispatchMode):
    """Notes for each operator that writes whether it refused the overlaps that it was given, one kind at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Observed = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kinds: set[str] = set()
        if func.namespace == "aten" and func._schema.is_mutable:
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            if all(t.layout is torch.strided and not t.is_nested for t in tensors):
                kinds = {kind for kind, _, _ in kinds_of(func, args, kwargs)}
        refused: bool | None = False
        try:
            return func(*args, **kwargs)
        except Exception as error:
            refused = True if "unsupported operation: " in str(error) else None
            raise
        finally:
            if len(kinds) == 1 and refused is not None:
                self.seen.setdefault(func.name(), {}).setdefault(kinds.pop(), []).append(refused)


def measure_overlaps(
    options: Options, progress: Callable[[str], None] = lambda name: None
) -> dict[str, list[str]]:
    """By operator, the kinds of overlap that it refused each time it was given one."""
    everything = _random_in_place()
    for database, entry in options.entries():
        if database != "op":
            continue
        progress(entry_name(entry))
        seen = isolated(lambda entry=entry: _measure(entry, options.samples), seconds=120)  # type: ignore[misc]
        for name, kinds in (seen or {}).items():
            for kind, refused in kinds.items():
                everything.setdefault(name, {}).setdefault(kind, []).extend(refused)
    refusing = {
        name: sorted(k for k, refused in kinds.items() if all(refused)) for name, kinds in everything.items()
    }
    return {name: kinds for name, kinds in refusing.items() if kinds}


def _random_in_place() -> Observed:
    """Operators that write and have no entry in torch's database."""
    watch = _Watch()
    row, whole = torch.ones(1).expand(3), torch.ones(4)
    calls: list[Callable[[], Any]] = [
        *(
            lambda n=n: getattr(row, n)()
            for n in ("normal_", "uniform_", "random_", "bernoulli_", "exponential_")
        ),  # type: ignore[misc]
        *(lambda n=n: getattr(row, n)() for n in ("cauchy_", "log_normal_", "zero_")),  # type: ignore[misc]
        *(lambda n=n: getattr(row, n)(0) for n in ("clamp_", "clamp_min_", "clamp_max_")),  # type: ignore[misc]
        lambda: row.clamp_(0, 1),
        lambda: row.geometric_(0.5),
        lambda: row.random_(2),
        lambda: row.random_(2, 5),
        lambda: row.bernoulli_(torch.ones(3)),
        lambda: row.fill_(1.0),
        lambda: row.copy_(torch.ones(3)),
        lambda: whole[1:].copy_(whole[:-1]),
        lambda: whole.copy_(whole),
    ]
    for call in calls:
        try:
            with watch:
                call()
        except RuntimeError:
            continue  # the watch has noted it
    return watch.seen


def _measure(entry: Any, samples: int) -> Observed:
    watch = _Watch()
    supported = entry.supported_dtypes("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in [d for d in (torch.float32, torch.int64, torch.bool) if d in supported][:2]:
            seed()
            for _, sample in pick(list(entry.sample_inputs("cpu", dtype)), samples):
                call = (sample.input, sample.args, sample.kwargs)
                if entry.inplace_variant is not None:
                    for changed in _overlapping(call):
                        _try(watch, entry.inplace_variant, changed)
                if entry.supports_out:
                    for changed in _with_overlapping_out(entry.op, call):
                        _try(watch, entry.op, changed)
    return watch.seen


def _expanded(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.dim() == 0 or tensor.shape[0] < 2:
        return None
    return tensor.narrow(0, 0, 1).detach().clone().expand(tensor.shape)


def _shifted(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Copies of two tensors of one dtype, in one storage, the second an element further on."""
    if a.dtype != b.dtype or a.numel() < 2 or b.numel() < 2:
        return None
    room = torch.zeros(max(a.numel(), b.numel()) + 1, dtype=a.dtype)
    first, second = room[: a.numel()].view(a.shape), room[1 : b.numel() + 1].view(b.shape)
    second.copy_(b)
    first.copy_(a)
    return first, second


def _overlapping(call: Any) -> Iterator[Any]:
    first, args, kwargs = copied(call)
    if not isinstance(first, torch.Tensor) or first.layout is not torch.strided:
        return
    expanded = _expanded(first)
    if expanded is not None:
        yield expanded, args, kwargs
    leaves, spec = pytree.tree_flatten((args, kwargs))
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            pair = _shifted(first, leaf)
            if pair is not None:
                yield pair[0], *pytree.tree_unflatten([*leaves[:place], pair[1], *leaves[place + 1 :]], spec)
            if leaf.shape == first.shape and leaf.dtype == first.dtype:
                yield first, *pytree.tree_unflatten([*leaves[:place], first, *leaves[place + 1 :]], spec)


def _with_overlapping_out(op: Any, call: Any) -> Iterator[Any]:
    result = dense_results(op, call)
    if not isinstance(result, torch.Tensor):
        return
    first, args, kwargs = copied(call)
    expanded = _expanded(result)
    if expanded is not None:
        yield first, args, {**kwargs, "out": expanded}
    leaves, spec = pytree.tree_flatten((first, args, kwargs))
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            continue
        pair = _shifted(leaf, result)
        if pair is not None:
            changed = pytree.tree_unflatten([*leaves[:place], pair[0], *leaves[place + 1 :]], spec)
            yield *changed[:2], {**changed[2], "out": pair[1]}
        if leaf.shape == result.shape and leaf.dtype == result.dtype:
            yield first, args, {**kwargs, "out": leaf}


def _try(watch: _Watch, function: Any, call: Any) -> None:
    seed()
    first, args, kwargs = call
    try:
        with watch:
            function(first, *args, **kwargs)
    except Exception:  # noqa: BLE001 - the watch has noted it
        return
