"""Sharded tensors (``DTensor``) of a model. Graphs take and return parts, from which tensors are rebuilt."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from fake.seam.dtensor import placement_classes
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.tensors.process_groups import describe_group

Boxed = Callable[[list[Any]], Sequence[Any]]


def is_sharded(value: Any) -> bool:
    """Whether a value is a ``DTensor``, not an instance of a subclass."""
    return type(value) is dtensor_class()


def dtensor_class() -> Any:
    """``DTensor``, if it was imported."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def sharded_facts(tensor: Any) -> tuple[Any, ...]:
    """The metadata of a sharded tensor, like :func:`~fxpasses.plans.tensors.tensor_facts.tensor_facts`.

    Its parts have their own.
    """
    return (
        "DTensor", tuple(tensor.shape), tensor.stride(), 0, str(tensor.dtype),
        tensor.requires_grad, tensor.is_leaf, False, False, tensor.is_inference(),
    )  # fmt: skip


def distribution_of(tensor: Any) -> tuple[Any, ...]:
    """How a sharded tensor is distributed: its placements and its mesh."""
    _, context = tensor.__tensor_flatten__()
    return repr(context), *(describe_group(tensor.device_mesh) or ())


def flatten_sharded(values: Sequence[Any]) -> list[Any]:
    """Replace each sharded tensor in ``values`` by its parts."""
    return [part for value in values for part in (parts_of(value) if is_sharded(value) else (value,))]


def parts_of(tensor: Any) -> list[Any]:
    """What a graph takes instead of a sharded tensor: the local shard and the mesh."""
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def with_unwrapped_inputs(sharded: Sequence[int], graph: Boxed) -> Boxed:
    """Wrap a graph to take sharded tensors and pass on their parts.

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


def describe_tensors(metas: Sequence[Any]) -> list[list[Any]]:
    """Which graph result each tensor is, as plain data. For a sharded one, also its placements and sizes.

    Args:
        metas: AOTAutograd's metadata of how it wraps the results of a graph of parts.

    Raises:
        NoPlan: a tensor is sharded in a way that plans do not support.
    """
    return [
        [meta.unwrapped_idx] if hasattr(meta, "unwrapped_idx") else _described_by_metadata(meta)
        for meta in metas
    ]


def _described_by_metadata(meta: Any) -> list[Any]:
    if meta.original_subclass_type is not dtensor_class() or len(meta.attrs) != meta.arg_count:
        raise NoPlan("a tensor subclass among results or gradients")
    return _described(meta.flat_tensor_start_idx, meta.meta, meta.outer_size, meta.outer_stride)


def describe_results(results: Sequence[Any]) -> list[list[Any]]:
    """The same for the results of a graph without a backward graph.

    Args:
        results: as returned to the caller. If none is sharded, the description is empty.

    Raises:
        NoPlan: a result is sharded in a way that plans do not support.
    """
    if not any(map(is_sharded, results)):
        return []
    positions = itertools.accumulate((len(flatten_sharded([value])) for value in results), initial=0)
    return [
        _described(position, value.__tensor_flatten__()[1], value.shape, value.stride())
        if is_sharded(value)
        else [position]
        for position, value in zip(positions, results, strict=False)
    ]


def _described(position: int, context: Any, shape: Sequence[Any], stride: Sequence[Any]) -> list[Any]:
    """One sharded tensor.

    Args:
        position: of its shard among the results.
        context: from ``__tensor_flatten__``: placements, metadata, and the order in which several mesh
            dimensions shard one dimension.
        shape: the global shape.
        stride: the global strides.
    """
    if not all(type(size) is int for size in (*shape, *stride)):
        raise NoPlan("a sharded result or gradient of symbolic sizes")
    placements = list(map(describe_placement, context[0]))
    if any(tuple(entry.mesh_dims) != tuple(sorted(entry.mesh_dims)) for entry in context[2] or ()):
        raise NoPlan("a dimension that is sharded by several of the mesh in an order of its own")
    return [position, placements, list(shape), list(stride)]


_ARGUMENTS = {
    "Shard": ("dim",),
    "StridedShard": ("dim", "split_factor"),
    "Replicate": (),
    "Partial": ("reduce_op",),
}
"""What decides a placement, by its name."""


def describe_placement(placement: Any) -> list[Any]:
    """A placement as plain data. Raises NoPlan for placements of other libraries."""
    for name, one in placement_classes().items():
        if type(placement) is one:
            arguments = {argument: getattr(placement, argument) for argument in _ARGUMENTS[name]}
            if all(type(value) in (int, str) for value in arguments.values()):
                return [name, arguments]
    raise NoPlan("a placement that plans do not know", repr(placement))


def _load_placements(described: Sequence[Sequence[Any]]) -> list[Any]:
    classes = placement_classes()
    return [classes[name](**arguments) for name, arguments in described]


def with_wrapped_outputs(described: Sequence[Sequence[Any]], graph: Boxed) -> Boxed:
    """Wrap a graph to rebuild the tensors from its results. Values saved for the backward pass follow
    unchanged.

    Args:
        described: from :func:`describe_tensors` or :func:`describe_results`; empty if no tensor is sharded.
        graph: takes a list, which it empties.
    """
    if not described:
        return graph
    makers = [
        functools.partial(_make_dtensor, position, _load_placements(how[0]) if how else [], how[1:])
        for position, *how in described
    ]
    taken = sum(1 + bool(how) for _, *how in described)

    def run(inputs: list[Any]) -> Sequence[Any]:
        results = graph(inputs)
        return [*(make(results) for make in makers), *results[taken:]]

    return run


def _make_dtensor(
    position: int, placements: Sequence[Any], sizes: Sequence[Any], results: Sequence[Any]
) -> Any:
    local = results[position]
    if not sizes or local is None:
        return local
    shape, stride = sizes
    return dtensor_class().from_local(
        local,
        results[position + 1],
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )


def parts_of_gradient(gradient: Any, placements: Sequence[Sequence[Any]]) -> list[Any]:
    """What a backward graph takes instead of the gradient of a sharded result.

    Args:
        gradient: from autograd.
        placements: those that the graph was traced with, from :func:`describe_placement`.

    Raises:
        RuntimeError: it is not a sharded tensor.
    """
    if not is_sharded(gradient):
        raise RuntimeError(
            f"a gradient of class {type(gradient).__qualname__}, where a DTensor was compiled for: autograd's zeros for a result that "
            "is not used are no DTensor; let the result have a part in the loss, or detach it before it is returned"
        )
    expected = _load_placements(placements)
    if list(gradient.placements) != expected:
        gradient = gradient.redistribute(gradient.device_mesh, expected)
    return parts_of(gradient)


class RecordedShards:
    """The sharded tensors among the inputs of a recorded graph.

    Attributes:
        positions: which inputs they are.
        gradients: from :func:`describe_tensors`, if there is a backward graph.
        results: likewise of the forward graph's results, or from :func:`describe_results`, if one is
            sharded.
    """

    def __init__(self) -> None:
        self.positions, self.gradients, self.results = list[int](), list[list[Any]](), list[list[Any]]()

    def __bool__(self) -> bool:
        return bool(self.positions)

    def note_inputs(self, inputs: Sequence[Any]) -> None:
        """Note which inputs of a call they are."""
        self.positions = [i for i, value in enumerate(inputs) if is_sharded(value)]

    def note_call(
        self,
        outputs: Sequence[Any],
        facts: dict[str, Any],
        before: tuple[Any, Sequence[Any]] | None,
        *,
        with_backward: bool,
    ) -> int:
        """Note what a call has returned. Returns how many outputs the graph of parts has.

        Args:
            outputs: those of the call.
            facts: of the compilation. Its metadata becomes that from before tensors were unwrapped.
            before: that metadata, and that of the gradients, if known.
            with_backward: whether there is a backward graph.

        Raises:
            NoPlan: a plan cannot handle the sharded tensors of these graphs.
        """
        if not self and not any(map(is_sharded, outputs)):
            return len(outputs)
        if with_backward:
            facts["metadata"] = self.note_metadata(before)
        elif facts:
            self.note_results(outputs, facts["metadata"])
            return len(flatten_sharded(outputs))
        return len(outputs)

    def note_metadata(self, found: tuple[Any, Sequence[Any]] | None) -> Any:
        """Note what AOTAutograd knows of a forward and backward graph before it unwraps tensors. Returns its
        metadata.

        Args:
            found: that, and the metadata of the gradients.

        Raises:
            NoPlan: a plan cannot handle the sharded tensors of these graphs.
        """
        if found is None:
            raise NoPlan("a tensor subclass")
        metadata, gradients = found
        infos = [metadata.input_info[i] for i in self.positions]
        if any(info.mutates_data or info.mutates_metadata for info in infos):
            raise NoPlan("a sharded tensor that is changed")
        views = [i for i in metadata.output_info if i.output_type.name in ("alias_of_input", "is_input")]
        if any(info.base_idx in self.positions for info in views):
            raise NoPlan("a result that is a view of a sharded tensor")
        self.gradients = describe_tensors(gradients)
        results = describe_tensors(metadata.subclass_fw_graph_out_meta)
        if any(how for _, *how in results):
            self.results = results
            updated = len(metadata.mutated_inp_runtime_indices)
            self._refuse_views(metadata, {i - updated for i, (_, *how) in enumerate(results) if how})
        return metadata

    def note_results(self, results: Sequence[Any], metadata: Any) -> None:
        """Note what a graph without a backward graph returns.

        Args:
            results: as returned to the caller.
            metadata: AOTAutograd's, of the graph of parts.

        Raises:
            NoPlan: a plan cannot return the sharded tensors of this graph.
        """
        self.results = describe_results(results)
        self._refuse_views(metadata, {i for i, *how in self.results if how})

    @staticmethod
    def _refuse_views(metadata: Any, sharded: Collection[int]) -> None:
        kinds = (info.output_type.name for i, info in enumerate(metadata.output_info) if i in sharded)
        if not _NON_ALIAS_TYPES.issuperset(kinds):
            raise NoPlan("a sharded result that is a view")


_NON_ALIAS_TYPES = {"non_alias", "unsafe_view_alias", "custom_function_view"}
