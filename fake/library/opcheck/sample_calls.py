"""The calls that the checks make: copies of the sample, and building blocks for variations of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fake.library.opcheck.result import describe_tensor
from fake.library.random_state import seeded_generators
from fake.seam import library as _torch

pytree = _torch.pytree


@dataclass(frozen=True)
class Call:
    """Arguments of one call, and how they differ from the sample."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: str = "the sample"
    #: What was varied: "size", "broadcast", "value", "layout", "dtype", "number", "list"; empty for the sample.
    kind: str = ""
    #: Names of the positional arguments, if known.
    names: tuple[str, ...] = ()
    #: ``rtol`` and ``atol`` of value comparisons, if the user gave them.
    tolerances: Mapping[str, float] = field(default_factory=dict)

    @property
    def leaves(self) -> list[Any]:
        """All arguments, with lists flattened."""
        return pytree.tree_leaves((self.args, self.kwargs))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, each once."""
        return list({id(t): t for t in self.leaves if isinstance(t, torch.Tensor)}.values())

    def leaf_names(self) -> list[str]:
        """Return the name of each leaf: ``x``, ``xs[1]``."""
        paths = pytree.tree_flatten_with_path((self.args, self.kwargs))[0]
        return [self._name_of(list(path)) for path, _ in paths]

    def _name_of(self, path: list[Any]) -> str:
        first, *rest = path[1:]
        if path[0].idx == 1:
            name = str(first.key)
        else:
            name = self.names[first.idx] if first.idx < len(self.names) else f"argument {first.idx}"
        return name + "".join(f"[{key.idx}]" if hasattr(key, "idx") else str(key) for key in rest)

    def tensor_names(self) -> list[str]:
        """Return the name of each of `tensors`."""
        named = {
            id(leaf): name for name, leaf in reversed(list(zip(self.leaf_names(), self.leaves, strict=True)))
        }
        return [named[id(t)] for t in self.tensors]

    def replace_leaves(
        self, changes: Mapping[int, Any], label: str | None = None, kind: str | None = None
    ) -> Call:
        """Return the call with other values for some leaves.

        Args:
            changes: new values by leaf number.
            label: what was changed, for messages; None keeps it.
            kind: the kind of variation; None keeps it.
        """
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        for number, value in changes.items():
            leaves[number] = value
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        label, kind = self.label if label is None else label, self.kind if kind is None else kind
        return replace(self, args=tuple(args), kwargs=kwargs, label=label, kind=kind)

    def copy(self) -> Call:
        """Copy the values into new memory with the same strides; ``requires_grad`` is kept."""
        return self.map(_clone)

    def map(
        self,
        change: Callable[[torch.Tensor], torch.Tensor],
        label: str | None = None,
        kind: str | None = None,
    ) -> Call:
        """Return the call with every tensor replaced. A tensor that is passed twice stays one tensor.

        Args:
            change: returns the replacement of a tensor.
            label: what was changed, for messages; None keeps it.
            kind: the kind of variation; None keeps it.
        """
        replaced: dict[int, torch.Tensor] = {}

        def replacement(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in replaced:
                replaced[id(tensor)] = change(tensor)
            return replaced[id(tensor)]

        args, kwargs = pytree.tree_map_only(torch.Tensor, replacement, (self.args, self.kwargs))
        label, kind = self.label if label is None else label, self.kind if kind is None else kind
        return replace(self, args=tuple(args), kwargs=kwargs, label=label, kind=kind)

    def detached(self) -> Call:
        """Return the call without autograd."""
        return self.map(lambda t: _clone(t).detach())

    def describe(self) -> str:
        """Describe the arguments in one line."""

        def text(value: Any) -> str:
            if isinstance(value, torch.Tensor):
                return describe_tensor(value)
            if isinstance(value, (list, tuple)):
                return "[" + ", ".join(map(text, value)) + "]"
            return repr(value)

        parts = [text(a) for a in self.args] + [f"{k}={text(v)}" for k, v in self.kwargs.items()]
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
    """Return all tensors in a nested structure."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def named_tensors(schema: Any, call: Call) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Yield ``(name, schema argument, tensor)`` for every tensor of a call; list elements are ``name[i]``."""
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
    """The outcome of a call: a value or an error."""

    value: Any = None
    error: Exception | None = None


def attempt(function: Callable[..., Any], call: Call, seed: int = 0) -> Outcome:
    """Call with copied arguments and record the outcome; equal seeds give equal random states.

    Args:
        function: the function to call.
        call: its arguments.
        seed: the seed of the default generators.
    """
    copied = call.copy()
    with seeded_generators(seed):
        try:
            return Outcome(value=function(*copied.args, **copied.kwargs))
        except Exception as error:  # noqa: BLE001  an operator may refuse inputs with any error: that is the outcome
            return Outcome(error=error)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


# --- other tensors with the same kind of values ----------------------------------------------------
def refill(original: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Return the values of ``original``, repeated or cut, in another shape: indices stay in range."""
    count = math.prod(shape)
    values = original.detach().resolve_conj().resolve_neg().reshape(-1)
    if values.numel() == 0:
        values = torch.zeros(1, dtype=original.dtype, device=original.device)
    return values.repeat(-(-count // values.numel()))[:count].reshape(shape)


def refill_like(original: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Do the same as `refill`, and keep the order of dimensions in memory if the rank stays."""
    filled = refill(original, shape)
    if original.layout is not torch.strided or original.dim() != len(shape) or original.is_contiguous():
        return filled
    order = sorted(range(len(shape)), key=lambda dim: original.stride()[dim], reverse=True)
    back = sorted(range(len(shape)), key=lambda dim: order[dim])
    return filled.permute(order).contiguous().permute(back)


def is_permutation(tensor: torch.Tensor) -> bool:
    """Return whether integers are a permutation along some dimension: it may get inverted."""
    return any(
        count > 1
        and bool((tensor.movedim(dim, -1).sort(-1).values == torch.arange(count, device=tensor.device)).all())
        for dim, count in enumerate(tensor.shape)
    )


def reversed_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in the opposite order."""
    return tensor.flatten().flip(0).reshape(tensor.shape)


def restride(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the same values (for ``"expanded"``, those of the first row) with other strides, or ``tensor``
    if that is impossible."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        return tensor
    if kind == "channels last" and tensor.dim() in _CHANNELS_LAST:
        return tensor.contiguous(memory_format=_CHANNELS_LAST[tensor.dim()])
    if kind == "with the last two dimensions swapped" and tensor.dim() > 2:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if kind == "row-major":
        return tensor.contiguous()
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
