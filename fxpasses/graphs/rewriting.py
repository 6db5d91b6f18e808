"""Helpers for passes: create nodes that keep metadata and provenance, and read the fake values of nodes."""

from __future__ import annotations

import contextlib
import copy
import operator
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fake.seam.dispatch import disable_current_modes, enable_python_dispatcher
from fake.seam.fake_tensor import FakeTensor
from fake.seam.fx import LazyGraphModule, detect_fake_mode, size_hint
from fake.seam.pytree import tree_leaves, tree_map
from fake.wrong_arguments import ArgumentTypeError, check_type

PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr", "fxpasses", "recompute", "ac_graph_id", "partitioner_tag", "custom", "autograd_backward")  # fmt: skip
"""The metadata keys of a node that say where it comes from and how to treat it."""

_END = torch.iinfo(torch.int64).max
"""The end of a slice that has no explicit end."""


def value_of(node: fx.Node) -> Any:
    """The fake value of a node (``meta["val"]``), or ``None`` if it has none."""
    return node.meta.get("val")


def nbytes_of(value: Any) -> int:
    """A tensor's size in bytes, by hints of symbolic sizes; 0 for other values and data-dependent sizes."""
    return size_hint(value.numel()) * value.element_size() if isinstance(value, torch.Tensor) else 0


def fake_mode_of(graph: fx.Graph) -> Any:
    """The fake mode that the graph's values belong to, or ``None``."""
    for node in graph.nodes:
        value = value_of(node)
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return detect_fake_mode()


def insert_call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: fx.Node,
) -> fx.Node:
    """Insert a call at the graph's insert point, compute its fake value, and copy ``like``'s provenance.

    Args:
        graph: the graph, with its insert point set (``graph.inserting_before``).
        target: the overload, or function of symbolic sizes, to call.
        args: its arguments. Symbolic sizes among them (``list(value.shape)``) become the graph inputs that
            hold them.
        kwargs: its keyword arguments, likewise.
        like: the node whose stack trace, module and other provenance the new node gets.

    Returns:
        The new node.

    Raises:
        ValueError: if no input holds a symbolic size.
        ArgumentTypeError: if ``graph`` is not a graph, ``target`` is not callable, ``args`` is not a tuple,
            or holds a tensor or another graph's node, or ``like`` is not a node.
        RuntimeError: whatever the call itself raises on the fake values. Nothing is inserted then.
    """
    check_type("insert_call", "graph", graph, fx.Graph, "a torch.fx.Graph, such as gm.graph")
    check_type("insert_call", "target", target, callable, "an overload such as torch.ops.aten.relu.default")
    check_type("insert_call", "args", args, (tuple, list), "a tuple of arguments")
    check_type("insert_call", "like", like, fx.Node, "the node whose provenance the new one gets")
    for leaf in tree_leaves((args, dict(kwargs or {}))):
        if isinstance(leaf, torch.Tensor) or (isinstance(leaf, fx.Node) and leaf.graph is not graph):
            raise ArgumentTypeError("insert_call", "args", leaf, "nodes of the graph, and constants")
    args, named = _replace_sizes_by_inputs(graph, (args, dict(kwargs or {})))
    node = graph.call_function(target, args, named)
    node.meta.update({key: like.meta[key] for key in PROVENANCE if key in like.meta})
    mode = fake_mode_of(graph)
    try:
        if mode is not None:
            node.meta["val"] = compute_value(node, mode)
        else:
            fake_args, fake_kwargs = map_arg((node.args, node.kwargs), value_of)
            with torch.no_grad(), torch.device("meta"):
                node.meta["val"] = target(*fake_args, **fake_kwargs)
    except BaseException:
        graph.erase_node(node)
        raise
    return node


def _replace_sizes_by_inputs(graph: fx.Graph, arguments: Any) -> Any:
    if not any(isinstance(leaf, torch.SymInt) for leaf in tree_leaves(arguments)):
        return arguments
    inputs = [n for n in graph.find_nodes(op="placeholder") if isinstance(value_of(n), torch.SymInt)]

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.SymInt):
            return leaf
        for node in inputs:
            if same_size(value_of(node), leaf):
                return node
        raise ValueError(
            f"size {leaf} is no input of the graph: insert a node that computes it, and use that"
        )

    return tree_map(one, arguments)


def compute_value(node: fx.Node, mode: Any) -> Any:
    """Compute a call's fake value from those of its arguments, without adding guards on symbolic sizes."""
    args: Any = map_arg(node.args, lambda n: _to_mode(value_of(n), mode))
    kwargs: Any = map_arg(node.kwargs, lambda n: _to_mode(value_of(n), mode))
    if node.target is operator.getitem:
        return args[0][args[1]]
    environment = getattr(mode, "shape_env", None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(mode)
        if environment is not None:
            stack.enter_context(environment.suppress_guards())
            stack.enter_context(environment.ignore_fresh_unbacked_symbols())
            stack.enter_context(enable_python_dispatcher())
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _to_mode(value: Any, mode: Any) -> Any:
    """Convert a value of another fake mode to this mode. Tracing real tensors makes one mode for each."""
    if isinstance(value, (list, tuple)):
        return type(value)(_to_mode(v, mode) for v in value)
    if not isinstance(value, FakeTensor) or value.fake_mode is mode:
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def attribute_of(node: fx.Node, gm: fx.GraphModule | None = None) -> Any:
    """What a ``get_attr`` node reads from ``gm``, by default its graph's owner; ``None`` if missing."""
    value: Any = node.graph.owning_module if gm is None else gm
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


def attributes_of(gm: fx.GraphModule) -> dict[str, Any]:
    """What the ``get_attr`` nodes of a graph read, by attribute name."""
    return {str(node.target): attribute_of(node, gm) for node in gm.graph.find_nodes(op="get_attr")}


def outputs_of(graph: fx.Graph) -> list[Any]:
    """The outputs of a graph, nodes and constants. A list of one if the graph does not return a tuple."""
    (output,) = graph.find_nodes(op="output")
    results: Any = output.args[0]
    return list(results) if isinstance(results, (list, tuple)) else [results]


def subgraphs(gm: fx.GraphModule) -> dict[str, fx.GraphModule]:
    """The graphs that are passed to operators such as ``torch.cond``, by attribute name."""
    return {name: value for name, value in attributes_of(gm).items() if isinstance(value, fx.GraphModule)}


def copy_graph(
    gm: fx.GraphModule, *, constants: bool = False, like: fx.GraphModule | None = None
) -> fx.GraphModule:
    """Copy a graph and its subgraphs. The copy shares tensors and fake values with it, but no nodes.

    Args:
        gm: the graph.
        constants: whether the copy gets its own constants, so that writes to the original's do not affect it.
        like: an earlier such copy. Its constants are reused where they have the same bits, which saves
            memory.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copied = LazyGraphModule(gm, graph)
    known = subgraphs(like) if like is not None else {}
    for name, inner in subgraphs(gm).items():
        copied.set_submodule(name, copy_graph(inner, constants=constants, like=known.get(name)))
    for old, new in zip(gm.graph.nodes, graph.nodes, strict=True):
        new.meta = copy.copy(old.meta)
    copied.meta = copy.copy(gm.meta)
    if constants:
        _copy_constants(copied, constants_of(like) if like is not None else {})
    return copied


def constants_of(gm: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The tensors that the graph holds, by attribute name."""
    return {name: value for name, value in attributes_of(gm).items() if isinstance(value, torch.Tensor)}


def same_constant(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two constants have the same dtype, layout and bits."""
    if a is b:
        return True
    if (a.shape, a.dtype, a.device, a.layout) != (b.shape, b.dtype, b.device, b.layout):
        return False
    if type(a) is not type(b) or a.layout is not torch.strided or a.stride() != b.stride():
        return False
    with disable_current_modes():
        return torch.equal(*(_bytes(value) for value in (a, b)))


_MAX_CHECKSUM_BYTES = 2**24


def checksum(value: torch.Tensor) -> int:
    """A checksum of a host tensor's memory. 0 for tensor subclasses, other devices, and more than 16 MB."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        return 0
    storage = value.untyped_storage()
    if value.device.type != "cpu" or not 0 < storage.nbytes() <= _MAX_CHECKSUM_BYTES:
        return 0
    with disable_current_modes():
        return zlib.crc32(torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data)


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _copy_constants(gm: fx.GraphModule, known: Mapping[str, torch.Tensor]) -> None:
    """Replace the graph's constants by copies. Constants that share memory still share it."""
    storages: dict[int, torch.UntypedStorage] = {}
    for name, value in constants_of(gm).items():
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            continue
        mine = known.get(name)
        if mine is None or not same_constant(value, mine):
            with disable_current_modes(), torch.no_grad():
                storage = value.untyped_storage()
                own = storages.setdefault(storage._cdata, storage.clone())
                plain = torch.empty((), dtype=value.dtype, device=value.device)
                mine = plain.set_(own, value.storage_offset(), value.shape, value.stride())
                mine = mine.conj() if value.is_conj() else mine
            if isinstance(value, torch.nn.Parameter):
                mine = torch.nn.Parameter(mine, value.requires_grad)
        path, _, last = name.rpartition(".")
        owner: Any = gm.get_submodule(path)
        if isinstance(value, torch.nn.Parameter) or last not in owner._parameters:
            setattr(owner, last, mine)


def replace(old: fx.Node, new: fx.Node) -> None:
    """Replace all uses of ``old`` by ``new``, and erase ``old``."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def remove_full_slices(graph: fx.Graph) -> None:
    """Replace ``x[:]`` by ``x``. Python's indexing makes this call only for symbolic sizes, not integers.

    A slice that the graph returns stays, as a view of its own.
    """
    returned = {node for output in graph.find_nodes(op="output") for node in output.all_input_nodes}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        given: list[Any] = list(node.args)
        source, _, start, end, step = given + [0, None, None, 1][len(given) - 1 :]
        whole = start in (0, None) and end in (_END, None) and step == 1 and not node.kwargs
        if whole and node not in returned and same_metadata(value_of(node), value_of(source)):
            replace(node, source)


def use_returned_arguments(gm: fx.GraphModule) -> None:
    """Replace results of ``invoke_subgraph`` by the argument that the subgraph returns unchanged.

    The values that it saves for its backward pass often are arguments. Inductor (2.15) considers such an
    argument dead after the call and may put other values into its memory: gradients of
    ``torch.compiler.nested_compile_region`` were wrong.

    Args:
        gm: a forward, backward or inference graph.
    """
    for call in gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        subgraph, _, *arguments = call.args
        inner = attribute_of(subgraph, gm).graph
        given = dict(zip(inner.find_nodes(op="placeholder"), arguments, strict=True))
        results = outputs_of(inner)
        for item in list(call.users):
            argument = given.get(results[item.args[1]]) if item.target is operator.getitem else None
            if isinstance(argument, fx.Node):  # not a number
                replace(item, argument)


def same_metadata(a: Any, b: Any) -> bool:
    """Whether shape, stride, dtype, device and lazy conjugation or negation are equal, without a guard."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    if a.is_conj() != b.is_conj() or a.is_neg() != b.is_neg():
        return False
    if a.dtype is not b.dtype or a.device != b.device or a.layout is not b.layout or a.dim() != b.dim():
        return False
    if a.layout is not torch.strided:
        return False
    pairs = [*zip(a.shape, b.shape, strict=True), *zip(a.stride(), b.stride(), strict=True)]
    return all(same_size(x, y) for x, y in pairs)


def same_size(x: Any, y: Any) -> bool:
    """Whether two sizes are equal, known without a guard. Symbolic sizes must be the same expression."""
    if isinstance(x, int) and isinstance(y, int):
        return x == y
    return getattr(getattr(x, "node", None), "expr", x) == getattr(getattr(y, "node", None), "expr", y)
