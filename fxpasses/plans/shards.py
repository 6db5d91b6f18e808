"""Sharded tensors (``DTensor``) of a model: graphs take the parts of each, and a gradient is put together of such parts again."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxpasses.plans.errors import NoPlan
from fxpasses.plans.process_groups import described_group

Boxed = Callable[[list[Any]], Sequence[Any]]


def is_sharded(value: Any) -> bool:
    """Whether it is a ``DTensor``, and of no class of its own. Args: any object."""
    return type(value) is class_of_shards()


def class_of_shards() -> Any:
    """``DTensor``, if anybody has imported it."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def sharded_facts(tensor: Any) -> tuple[Any, ...]:
    """The metadata of a sharded tensor, as :func:`~fxpasses.plans.tensor_facts.tensor_facts` has that of others; its parts have their own."""
    return (
        "DTensor", tuple(tensor.shape), tensor.stride(), 0, str(tensor.dtype),
        tensor.requires_grad, tensor.is_leaf, False, False, tensor.is_inference(),
    )  # fmt: skip


def distribution_of(tensor: Any) -> tuple[Any, ...]:
    """How a sharded tensor is distributed: placements, and the mesh."""
    _, context = tensor.__tensor_flatten__()
    return repr(context), *(described_group(tensor.device_mesh) or ())


def flat(values: Sequence[Any]) -> list[Any]:
    """Values with the parts of sharded tensors in their places."""
    return [part for value in values for part in (parts_of(value) if is_sharded(value) else (value,))]


def parts_of(tensor: Any) -> list[Any]:
    """What a graph takes in its place: the shard, and the mesh."""
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def taking_parts(sharded: Sequence[int], graph: Boxed) -> Boxed:
    """A graph that is called with sharded tensors, and is given their parts.

    Args:
        sharded: the positions of these among its inputs.
        graph: takes a list, which it empties.
    """
    if not sharded:
        return graph
    positions = frozenset(sharded)

    def run(inputs: list[Any]) -> Sequence[Any]:
        given = [
            part
            for i, value in enumerate(inputs)
            for part in (parts_of(value) if i in positions else (value,))
        ]
        inputs.clear()
        return graph(given)

    return run


def described_gradients(metas: Sequence[Any]) -> list[list[Any]]:
    """For each input which result of the backward graph is its gradient, and of a sharded one its placements and sizes, as plain data.

    Args:
        metas: AOTAutograd's: of the gradients.

    Raises:
        NoPlan: a gradient is sharded in a way that plans do not know.
    """
    return [
        [meta.unwrapped_idx] if hasattr(meta, "unwrapped_idx") else _described_gradient(meta)
        for meta in metas
    ]


def _described_gradient(meta: Any) -> list[Any]:
    if meta.original_subclass_type is not class_of_shards() or len(meta.attrs) != meta.arg_count:
        raise NoPlan("a gradient that is a tensor subclass")
    sizes = [*meta.outer_size, *meta.outer_stride]
    if not all(type(size) is int for size in sizes):
        raise NoPlan("a sharded gradient of symbolic sizes")
    placements = [_described_placement(placement) for placement in meta.meta[0]]
    return [meta.flat_tensor_start_idx, placements, list(meta.outer_size), list(meta.outer_stride)]


def _described_placement(placement: Any) -> list[Any]:
    tensors = sys.modules["torch.distributed.tensor"]
    if type(placement) is tensors.Shard:
        return ["Shard", placement.dim]
    if type(placement) is tensors.Replicate:
        return ["Replicate"]
    if type(placement) is tensors.Partial:
        return ["Partial", placement.reduce_op]
    raise NoPlan("a placement that plans do not know", repr(placement))


def giving_gradients(gradients: Sequence[Sequence[Any]], graph: Boxed) -> Boxed:
    """A backward graph whose results are put together to the gradients of inputs.

    Args:
        gradients: from :func:`described_gradients`; nothing where no input is sharded.
        graph: takes a list, which it empties.
    """
    if not gradients:
        return graph
    tensors = sys.modules["torch.distributed.tensor"]

    def run(inputs: list[Any]) -> Sequence[Any]:
        results = graph(inputs)
        return [make(results) for make in makers]

    makers = [
        functools.partial(
            _gradient,
            position,
            [getattr(tensors, name)(*rest) for name, *rest in how[0]] if how else [],
            how[1:],
        )
        for position, *how in gradients
    ]
    return run


def _gradient(position: int, placements: Sequence[Any], sizes: Sequence[Any], results: Sequence[Any]) -> Any:
    local = results[position]
    if not sizes or local is None:
        return local
    shape, stride = sizes
    return class_of_shards().from_local(
        local,
        results[position + 1],
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )


class RecordedShards:
    """The sharded tensors among the inputs of a graph that is recorded.

    Attributes:
        positions: which inputs they are.
        gradients: from :func:`described_gradients`, where there is a backward graph.
    """

    def __init__(self) -> None:
        self.positions, self.gradients = list[int](), list[list[Any]]()

    def __bool__(self) -> bool:
        return bool(self.positions)

    def look(self, inputs: Sequence[Any]) -> None:
        """See which they are. Args: those of a call."""
        self.positions = [i for i, value in enumerate(inputs) if is_sharded(value)]

    def note(self, found: tuple[Any, Sequence[Any]] | None) -> Any:
        """See what AOTAutograd knows of a forward and a backward graph before it takes tensors apart; returns its metadata.

        Args:
            found: that, and the metadata of the gradients.

        Raises:
            NoPlan: a plan cannot hand out or take what these graphs have of sharded tensors.
        """
        if found is None:
            raise NoPlan("a tensor subclass")
        metadata, gradients = found
        results = (*metadata.subclass_fw_graph_out_meta, *metadata.subclass_tangent_meta)
        if any(not hasattr(meta, "unwrapped_idx") for meta in results):
            raise NoPlan("a result that is a tensor subclass")
        infos = [metadata.input_info[i] for i in self.positions]
        if any(info.mutates_data or info.mutates_metadata for info in infos):
            raise NoPlan("a sharded tensor that is changed")
        views = [i for i in metadata.output_info if i.output_type.name in ("alias_of_input", "is_input")]
        if any(info.base_idx in self.positions for info in views):
            raise NoPlan("a result that is a view of a sharded tensor")
        self.gradients = described_gradients(gradients)
        return metadata
