"""A Dynamo guard on inputs that alias a mutated input. Private torch names.

AOTAutograd compiles for the aliasing that it sees in the first call: inputs that overlap a mutated input
become views of one base, at their current offsets. With static sizes, and for inputs that share nothing at
first, no guard says so. A later call with overlapping inputs then got values from before the write.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch._C import _storage_address  # type: ignore[attr-defined]
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch._dynamo.guards import _get_closure_vars

from fake.seam.fake_tensor import FakeTensor
from fake.seam.guards import Guard, TracingContext


def guard_overlaps(graph: fx.Graph, changed: Collection[int]) -> bool:
    """Make Dynamo recompile for inputs that overlap differently.

    Args:
        graph: the Dynamo graph being compiled.
        changed: the addresses of the storages that it mutates.

    Returns:
        Whether inputs overlap a mutated input, or with symbolic sizes, whether they may. AOTAutograd's cache
        does not take their positions into account.
    """
    context = TracingContext.try_get()
    if context is None or not changed:
        return False
    inputs = [
        (node._dynamo_source, value)
        for node in graph.find_nodes(op="placeholder")
        if getattr(node, "_dynamo_source", None) is not None
        and _has_plain_memory(value := node.meta.get("example_value"))
    ]
    written = {i for i, (_, value) in enumerate(inputs) if _storage_address(value) in changed}
    if not written:
        return False
    overlaps = _overlaps([value for _, value in inputs], written)
    # The guard runs in each call. Read-only parameters are most of a large model's inputs, and rarely views
    # of mutated ones.
    others = {i for i, (_, value) in enumerate(inputs) if not isinstance(value, torch.nn.Parameter)}
    kept = sorted(written | others | {i for i, *_ in overlaps})
    if len(kept) > 1:
        sources, of_kept = [inputs[i][0] for i in kept], {at for at, i in enumerate(kept) if i in written}
        install = functools.partial(_install, sources=sources, written=of_kept)
        context.guards_context.dynamo_guards.add(Guard(sources[min(of_kept)], install))
    return bool(overlaps)


def _has_plain_memory(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and (isinstance(value, FakeTensor) or type(value) in (torch.Tensor, torch.nn.Parameter))
    )


def _install(builder: Any, guard: Guard, sources: list[Any], written: set[int]) -> None:
    found = [builder.get(source) for source in sources]
    # Numbers are inputs, too: Dynamo converts them to tensors in each call.
    kept = [i for i, value in enumerate(found) if isinstance(value, torch.Tensor)]
    written = {at for at, i in enumerate(kept) if i in written}
    expected = _overlaps([found[i] for i in kept], written)

    def overlap_as_before(*tensors: torch.Tensor) -> bool:
        return _overlaps(tensors, written) == expected

    call = f"overlap_as_before({', '.join(sources[i].name for i in kept)})"
    closure = {**_get_closure_vars(), "overlap_as_before": overlap_as_before}
    builder.add_python_lambda_leaf_guard_to_root([call], [call], closure_vars=closure)


def _overlaps(tensors: Sequence[torch.Tensor], written: set[int]) -> list[tuple[int, Any, Any]]:
    """Which tensors overlap another one where one of their storage is mutated, with their positions in it."""
    storages = [_storage_address(tensor) for tensor in tensors]
    if len(set(storages)) == len(storages):  # true in nearly all calls
        return []
    groups: dict[int, list[int]] = {}
    for i, storage in enumerate(storages):
        groups.setdefault(storage, []).append(i)
    return [
        (i, tensors[i].storage_offset(), tensors[i].untyped_storage().nbytes())
        for group in groups.values()
        if len(group) > 1 and not written.isdisjoint(group)
        for i in _overlapping(tensors, group)
    ]


def _overlapping(tensors: Sequence[torch.Tensor], group: list[int]) -> list[int]:
    members = [tensors[i] for i in group]
    if any(isinstance(n, torch.SymInt) for t in members for n in (*t.shape, *t.stride(), t.storage_offset())):
        return group
    return [group[i] for i in compute_overlapping_tensors(members, symbolic=False)]
