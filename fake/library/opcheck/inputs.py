"""The calls that the checks make: copies of the sample, and variations of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fake.library import _torch
from fake.library.opcheck.result import describe_tensor

__all__ = [
    "Call",
    "Outcome",
    "attempt",
    "flat_tensors",
    "layout_variations",
    "named_tensors",
    "refill",
    "restride",
    "size_variations",
]

pytree = _torch.pytree


@dataclass(frozen=True)
class Call:
    """Arguments of one call, and how they differ from the sample."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: str = "the sample"

    def copy(self) -> Call:
        """The same values in fresh memory with the same strides; ``requires_grad`` is kept."""
        return self.map(_clone)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor], label: str | None = None) -> Call:
        """The call with every tensor replaced. A tensor that is passed twice stays one tensor."""
        replaced: dict[int, torch.Tensor] = {}

        def once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in replaced:
                replaced[id(tensor)] = change(tensor)
            return replaced[id(tensor)]

        args, kwargs = pytree.tree_map_only(torch.Tensor, once, (self.args, self.kwargs))
        return Call(tuple(args), kwargs, self.label if label is None else label)

    def detached(self) -> Call:
        """The call without autograd."""
        return self.map(lambda t: _clone(t).detach())

    def describe(self) -> str:
        """The arguments in one line."""

        def one(value: Any) -> str:
            if isinstance(value, torch.Tensor):
                return describe_tensor(value)
            if isinstance(value, (list, tuple)):
                return "[" + ", ".join(map(one, value)) + "]"
            return repr(value)

        parts = [one(a) for a in self.args] + [f"{k}={one(v)}" for k, v in self.kwargs.items()]
        return ", ".join(parts)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    needed = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    length = tensor.storage_offset() + (needed if tensor.numel() else 0)
    buffer = torch.zeros(length, dtype=tensor.dtype, device=tensor.device)
    copy = buffer.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    with torch.no_grad():
        if tensor.numel():
            # Elements that share memory get the same value, in whatever order they are written.
            index = torch.arange(int(length), device=tensor.device).as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset()
            )
            buffer[index.reshape(-1)] = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return copy.requires_grad_(tensor.requires_grad)


def flat_tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a nested structure."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def named_tensors(schema: Any, call: Call) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """``(name, schema argument, tensor)`` for every tensor of a call; list elements are ``name[i]``."""
    positional = [a for a in schema.arguments if not a.kwarg_only]
    by_name = {a.name: a for a in schema.arguments}
    pairs = [*zip(positional, call.args, strict=False), *((by_name[k], v) for k, v in call.kwargs.items())]
    for argument, value in pairs:
        if isinstance(value, torch.Tensor):
            yield argument.name, argument, value
        elif isinstance(value, (list, tuple)):
            for index, element in enumerate(value):
                if isinstance(element, torch.Tensor):
                    yield f"{argument.name}[{index}]", argument, element


@dataclass(frozen=True)
class Outcome:
    """What a call did: a value or an error."""

    value: Any = None
    error: Exception | None = None


def attempt(function: Callable[..., Any], call: Call) -> Outcome:
    """Call with copied arguments and record the outcome; the random state is the same each time."""
    copied = call.copy()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return Outcome(value=function(*copied.args, **copied.kwargs))
        except Exception as error:  # noqa: BLE001  an operator may refuse inputs with any error: that is the outcome
            return Outcome(error=error)


# --- variations -----------------------------------------------------------------------------------
def refill(original: torch.Tensor, shape: list[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Values of ``original``, repeated or cut, in another shape: indices stay in range."""
    count = 1
    for size in shape:
        count *= size
    values = original.detach().resolve_conj().resolve_neg().reshape(-1)
    if values.numel() == 0:
        values = torch.zeros(1, dtype=original.dtype, device=original.device)
    repeated = values.repeat(-(-count // values.numel()))[:count].reshape(shape)
    return repeated if dtype is None else repeated.to(dtype)


def _resized(call: Call, sizes: dict[int, int], label: str) -> Call:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        shape = [sizes.get(size, size) for size in tensor.shape]
        return tensor.detach() if shape == list(tensor.shape) else refill(tensor, shape)

    return call.map(change, label)


def restride(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    tensor = tensor.detach()
    if kind == "column-major" and tensor.dim() > 1:
        order = list(range(tensor.dim()))[::-1]
        return tensor.permute(order).contiguous().permute(order)
    if kind == "with gaps" and tensor.dim() > 0 and tensor.numel():
        wide = tensor.repeat_interleave(2, dim=-1)
        return wide[..., ::2]
    if kind == "with a storage offset":
        buffer = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype, device=tensor.device)
        view = buffer[3:].view(tensor.shape)
        return view.copy_(tensor)
    if kind == "expanded" and tensor.dim() > 0 and tensor.shape[0] > 1:
        return tensor[:1].expand(tensor.shape)
    return tensor


# Within a family only: a kernel for floating point may well accept integers by accident.
_DTYPES = {
    "float64 for floating point": lambda d: torch.float64 if d.is_floating_point else d,
    "float16 for floating point": lambda d: torch.float16 if d.is_floating_point else d,
    "bfloat16 for floating point": lambda d: torch.bfloat16 if d.is_floating_point else d,
    "float32 for floating point": lambda d: torch.float32 if d.is_floating_point else d,
    "int32 for int64": lambda d: torch.int32 if d is torch.int64 else d,
}


def size_variations(call: Call, *, may_shrink: bool) -> Iterator[Call]:
    """Calls with other sizes, storage offsets and values.

    Equal sizes in the sample change together, so that relations between arguments survive. ``may_shrink=False``
    leaves out smaller sizes: an operator that indexes without checking would read past the end.
    """
    call = call.detached()
    sizes = sorted({s for t in flat_tensors((call.args, call.kwargs)) for s in t.shape if s > 1})
    primes = [7, 11, 13, 17, 19, 23, 29, 31]
    larger = {s: s + primes[i % len(primes)] for i, s in enumerate(sizes)}
    if sizes:
        yield _resized(call, larger, "all sizes larger")
    for size in sizes:
        yield _resized(call, {size: larger[size]}, f"size {size} → {larger[size]}")
        if may_shrink:
            yield _resized(call, {size: 1}, f"size {size} → 1")
            yield _resized(call, {size: 0}, f"size {size} → 0")
    yield call.map(lambda t: restride(t, "with a storage offset"), "inputs with a storage offset")
    for label, values in (
        ("all values zero", torch.zeros_like),
        ("all values one", torch.ones_like),
        ("values reversed", lambda t: t.flatten().flip(0).reshape(t.shape)),
        ("values negated", lambda t: t if t.dtype is torch.bool else -t),
    ):
        yield call.map(
            lambda t, values=values: values(t) if t.is_floating_point() or t.dtype is torch.bool else t,  # type: ignore[misc]
            label,
        )


def layout_variations(call: Call) -> Iterator[Call]:
    """Calls with other strides and dtypes: all tensors at once, and each alone."""
    call = call.detached()
    tensors = flat_tensors((call.args, call.kwargs))
    for kind in ("column-major", "with gaps", "expanded"):
        yield call.map(lambda t, kind=kind: restride(t, kind), f"inputs {kind}")  # type: ignore[misc]
        for index, tensor in enumerate(tensors if len(tensors) > 1 else []):
            yield call.map(
                lambda t, one=tensor, kind=kind: restride(t, kind) if t is one else t,  # type: ignore[misc]
                f"tensor {index} {kind}",
            )
    for label, change in _DTYPES.items():
        yield call.map(lambda t, change=change: t.detach().to(change(t.dtype)), label)  # type: ignore[misc]
