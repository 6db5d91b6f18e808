"""Lower a segment to ATen: run it once on real tensors and record every operator call.

Collectives are recorded but not run: other processes may already run them compiled, so a collective sent
twice would have no counterpart. The results of such a recording are made up.

The recorder sits below autograd, so C++'s functional nodes show up as plain ATen. Validation that has nothing
to do calls no operator and disappears. Sizes and scalars become constants; whoever runs the recorded graph
checks that they are the same. So do Python numbers that the forward multiplied by: nodes save them as 0-dim
CPU tensors with C++'s ``wrapped_number`` flag, and dispatch passes such a tensor to Python as a number.
Arguments are in the order of the segment's inputs.
"""

import dataclasses
import functools
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from compiled_autograd import _torch
from compiled_autograd.program.segments import FunctionalSegment
from compiled_autograd.runtime._torch_nodes import NodeWriter
from compiled_autograd.runtime.executing import last_uses
from fake.dispatch.communication import communicates
from fake.seam import pytree

_NODE = "_fx_recorded_node"


@dataclasses.dataclass
class Lowered:
    """A recorded segment."""

    graph: fx.Graph
    """Flat ATen: one placeholder per used input, and a tuple of computed outputs."""
    root: torch.nn.Module
    """Holds the constants that the graph refers to."""
    used_inputs: list[int]
    """Indices of the segment's inputs that the graph takes."""
    outputs: list[tuple[str, int] | None]
    """Per output of the segment: a computed one, an input passed through, or None."""
    baked: list[int]
    """Segment inputs that may be constants in the graph: numbers saved as 0-dim tensors."""
    results: tuple[Any, ...]
    """The values computed by the recorded run."""
    problem: str | None
    """Why the recording must not be used, or None."""
    random: bool
    """Whether it draws random numbers, so that it must not run twice."""
    communicates: bool
    """Whether it communicates. Its results are then made up, and RNG states were restored."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed."""
        return not any(node.op == "call_function" for node in self.graph.nodes)


def reason_not_to_lower(values: Sequence[Any]) -> str | None:
    """Return why a segment with these arguments is not lowered. Only plain dense tensors are supported."""
    if _torch.inside_functorch():
        return "inside a functorch transform"
    for value in values:
        if value is None:
            continue
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return f"a {type(value).__name__} flows through it"
        if value.layout is not torch.strided:
            return f"a tensor of layout {value.layout} flows through it"
        if not _torch.has_storage(value):
            return "a tensor without storage (batched by vmap, for instance) flows through it"
        if value.is_conj() or value.is_neg() or value.is_inference() or value.device.type == "meta":
            return "a conjugate, negative, inference or meta tensor flows through it"
    return None


class _Recorder(_torch.TorchDispatchMode):
    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        self.graph = graph
        self.writer = NodeWriter(graph)
        self.root = torch.nn.Module()
        self.step: fx.Node | None = None
        self.storages: set[int] = set()
        self.constants: list[torch.Tensor] = []
        self.problem: str | None = None
        self.random = False
        self.communicates = False
        self.writes = False  # to any tensor, so that views must stay views

    def node_of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            node = value.__dict__.get(_NODE)
            if node is None or node.graph is not self.graph:
                self.problem = self.problem or "it uses a tensor that is none of its inputs"
            return node
        return value

    def constant(self, name: str, value: Any) -> Any:
        """Register a tensor as an attribute of the graph. Other values are embedded unchanged."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.__dict__.get(_NODE) is None:
            setattr(self.root, name, value)
            self.mark(value, self.graph.get_attr(name))
            self.constants.append(value)
        return value

    def higher_order(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Record a call of a higher-order operator, with its graph arguments, as one node.

        Args:
            target: the operator.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Returns:
            The result of the operator.
        """
        with _torch.disable_modes():
            result = target(*args, **kwargs)
        self.random = True  # its graphs may draw random numbers

        def node_of(value: Any) -> Any:
            if not isinstance(value, torch.nn.Module):
                return self.node_of(value)
            name = f"graph_{len(self.graph.nodes)}"
            setattr(self.root, name, value)
            return self.graph.get_attr(name)

        graph_args, graph_kwargs = pytree.tree_map(node_of, (tuple(args), dict(kwargs)))
        node = self.graph.create_node("call_function", target, graph_args, graph_kwargs)
        self._describe(node)
        self._mark_results(result, node)
        return result

    def _describe(self, node: fx.Node) -> None:
        if self.step is not None:
            node.meta.update({key: value for key, value in self.step.meta.items() if key != "kind"})

    def mark(self, tensor: torch.Tensor, node: fx.Node) -> None:
        tensor.__dict__[_NODE] = node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_skipped_collective(func):
            self.communicates = True
            result = _collective_zeros(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if func is torch.ops.aten.detach.default:  # an alias: the same value
            self.mark(result, self.node_of(args[0]))
            return result
        self._check(func, args, kwargs)
        tensor_args, tensor_kwargs = pytree.tree_map(self.node_of, (args, kwargs))
        name = func._opname.strip("_")
        if self.step is not None:
            name = f"{self.step.name.rsplit('_grad', 1)[0]}_{name}"
        node = self.writer.call(func, tensor_args, name, tensor_kwargs)
        self._describe(node)
        self._mark_results(result, node)
        return result

    def _mark_results(self, result: Any, node: fx.Node) -> None:
        if isinstance(result, torch.Tensor):
            node.meta["dtype"], node.meta["shape"] = result.dtype, tuple(result.shape)
            self.mark(result, node)
        elif isinstance(result, (tuple, list)):
            for index, element in enumerate(result):
                if isinstance(element, torch.Tensor):
                    item = self.writer.call(operator.getitem, (node, index), "getitem")
                    item.meta["dtype"], item.meta["shape"] = element.dtype, tuple(element.shape)
                    self.mark(element, item)

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        tags = func.tags
        if torch.Tag.data_dependent_output in tags or (
            torch.Tag.dynamic_output_shape in tags and not _indexes_by_position(func, args)
        ):
            self.problem = self.problem or f"the result of {func} depends on values"
        if torch.Tag.nondeterministic_seeded in tags:
            self.random = True
        if func._schema.is_mutable:
            self.writes = True
            for schema, value in zip(func._schema.arguments, args, strict=False):
                if (
                    schema.alias_info is not None
                    and schema.alias_info.is_write
                    and isinstance(value, torch.Tensor)
                    and value.untyped_storage().data_ptr() in self.storages
                ):
                    self.problem = self.problem or f"{func} changes an input in place"


def _is_skipped_collective(func: Any) -> bool:
    """Whether a collective's result follows from its arguments. ``c10d``'s return handles to wait for."""
    return communicates(func) and (
        not func._schema.is_mutable or func.namespace.startswith("_c10d_functional")
    )


def _collective_zeros(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a collective, with zeros for its values."""

    def to_meta(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    def zeros(value: Any) -> Any:
        return torch.zeros_like(value, device=device) if isinstance(value, torch.Tensor) else value

    if func._schema.is_mutable:
        return args[0]
    device = next(
        value.device for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)
    )
    meta_args, meta_kwargs = pytree.tree_map(to_meta, (args, kwargs))
    return pytree.tree_map(zeros, func(*meta_args, **meta_kwargs))


def _indexes_by_position(func: Any, args: Any) -> bool:
    """Whether this is indexing without a mask. Its result then has the shape of the indices."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(index is None or index.dtype in (torch.int64, torch.int32) for index in args[1])


def lower(
    segment: FunctionalSegment,
    values: list[Any],
    sizes: Sequence[int],
    scalars: Sequence[Any],
    lifted: Collection[int] = (),
) -> Lowered:
    """Run ``segment`` on ``values`` (a list, which is cleared) and record it.

    Args:
        segment: the segment to run.
        values: a tensor or None for each of the segment's inputs.
        sizes: the graph's sizes.
        scalars: the graph's scalars.
        lifted: positions of numbers in ``values`` that become graph inputs instead of constants.
    """
    graph = fx.Graph()
    recorder = _Recorder(graph)
    placeholders: list[fx.Node | None] = []
    # Cloning drops the flag that makes the tensor a number.
    inputs = [value.clone() if index in lifted else value for index, value in enumerate(values)]
    for node, value in zip(segment.inputs, inputs, strict=True):
        placeholder = None
        if value is not None:
            placeholder = graph.create_node("placeholder", node.name, name=node.name)
            recorder.mark(value, placeholder)
            recorder.storages.add(value.untyped_storage().data_ptr())
        placeholders.append(placeholder)
    values.clear()
    rng_states = _rng_states(inputs)
    try:
        results = _interpret(segment.module, recorder, (list(inputs), sizes, scalars))
        outputs, computed = _describe_outputs(recorder, results, placeholders)
    finally:
        for value in (*inputs, *recorder.constants, *locals().get("results", ())):
            if isinstance(value, torch.Tensor):
                value.__dict__.pop(_NODE, None)
    if recorder.communicates and recorder.random:
        for restore, state in rng_states:
            restore(state)
    graph.output(tuple(computed))
    if not recorder.writes:
        _reshape_views(graph)
    graph.eliminate_dead_code()
    used = [index for index, node in enumerate(placeholders) if node is not None and node.users]
    baked = [
        index
        for index, (node, value) in enumerate(zip(placeholders, inputs, strict=True))
        if node is not None and not node.users and value.dim() == 0 and value.device.type == "cpu"
    ]
    for placeholder in placeholders:
        if placeholder is not None and not placeholder.users:
            graph.erase_node(placeholder)
    problem = recorder.problem
    if problem is not None:
        graph = fx.Graph()
    flags = problem, recorder.random, recorder.communicates
    return Lowered(graph, recorder.root, used, outputs, baked, results, *flags)


def _rng_states(values: Sequence[Any]) -> list[tuple[Any, torch.Tensor]]:
    """Return the RNG states of the devices of ``values``, each with how to restore it."""
    devices = {value.device for value in values if value is not None and value.device.type != "cpu"}
    found: list[tuple[Any, torch.Tensor]] = [(torch.set_rng_state, torch.get_rng_state())]
    for device in devices:
        of_device = torch.get_device_module(device)
        restore = functools.partial(of_device.set_rng_state, device=device)
        found.append((restore, of_device.get_rng_state(device)))
    return found


def _reshape_views(graph: fx.Graph) -> None:
    """Replace ``view`` by ``reshape``: a compiler may choose strides for which the view is invalid
    (its layer norm gives a gradient the layout of its input, eager's gives a contiguous one).
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default


def _describe_outputs(
    recorder: _Recorder, results: Sequence[Any], placeholders: Sequence[fx.Node | None]
) -> tuple[list[tuple[str, int] | None], list[fx.Node]]:
    outputs: list[tuple[str, int] | None] = []
    computed: dict[fx.Node, int] = {}
    inputs = {node: index for index, node in enumerate(placeholders) if node is not None}
    for result in results:
        if result is None:
            outputs.append(None)
            continue
        if not isinstance(result, torch.Tensor):
            recorder.problem = recorder.problem or "a number flows out of it"
            outputs.append(None)
            continue
        node = recorder.node_of(result)
        if node in inputs:
            outputs.append(("input", inputs[node]))
        elif node is not None:
            outputs.append(("computed", computed.setdefault(node, len(computed))))
        else:
            outputs.append(None)
    return outputs, list(computed)


def _interpret(module: fx.GraphModule, recorder: _Recorder, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Run a segment's module node by node, freeing values after their last use."""
    env: dict[fx.Node, Any] = {}
    freed = last_uses(list(module.graph.nodes))
    rest = iter(arguments)
    with recorder:
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(rest)
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            if node.op == "output":
                return args[0]
            recorder.step = node
            if node.op == "call_method":
                getattr(args[0], node.target)(*args[1:], **kwargs)
            elif node.op == "get_attr":
                env[node] = recorder.constant(node.target, getattr(module, node.target))
            elif isinstance(node.target, _torch.HigherOrderOperator):
                env[node] = recorder.higher_order(node.target, args, kwargs)
            else:
                env[node] = node.target(*args, **kwargs)
            del args, kwargs
            for used in freed.get(node, ()):
                env.pop(used, None)
    raise AssertionError("a graph has an output node")
