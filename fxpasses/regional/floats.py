"""Turn floats that may change between calls into tensors or constants, before any other analysis.

With dynamic shapes, Dynamo passes floats (a module's ``eps`` or ``scale``) as 0-dim float64 tensors and reads
them with ``item()``. At the end of tracing, AOTAutograd rewrites arithmetic of tensors with such numbers to
tensor arithmetic (``torch.fx.passes._tensorify_python_scalars``). Any other use of the number makes Dynamo
retrace everything with the number as a constant. Doing both at once on Dynamo's graph saves the second trace,
and layers that differ only in such a float stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpasses._torch import HigherOrderOperator
from fxpasses.regional import _torch, _torch_floats
from fxpasses.regional.facts import value_of

_ARITHMETIC = frozenset(
    {"add", "sub", "mul", "truediv", "div", "pow", "iadd", "isub", "imul", "itruediv", "add_", "sub_", "mul_", "div_"}
)  # fmt: skip
_AS_TENSORS = _ARITHMETIC - {"pow"}
_ROOTS = frozenset({"sqrt", "sym_sqrt", "_sym_sqrt"})
_Place = tuple[fx.GraphModule, fx.Node]


def settle_floats(gm: fx.GraphModule, *, as_constants: bool = False) -> None:
    """Turn floats used only in tensor arithmetic into tensors, and all others into guarded constants.

    Floats computed only from sizes (``sqrt(x.shape[1])``) stay symbolic, like the sizes. With
    ``as_constants`` no float may be an input: a CUDA graph reads only what is on its device, and would replay
    the value that was recorded. Dynamo then retraces, as for Inductor's CUDA graphs. If a float can stay
    dynamic only the way AOTAutograd does it (``x ** p``), all such floats are left to AOTAutograd.
    """
    shape_env = _shape_env(gm)
    if as_constants and shape_env is not None:
        _torch_floats.retrace_with_constant_floats(shape_env)
    _sink_item_calls(gm)
    found = [
        (owner, node)
        for owner in gm.modules()
        if isinstance(owner, fx.GraphModule)
        for node in owner.graph.nodes
        if isinstance(value_of(node), torch.SymFloat) and not _torch.depends_only_on_sizes(value_of(node))
    ]
    if not found:
        # Torch prepares a number for each 0-dim float64 input. AOTAutograd considers unused ones as constants
        # to specialize, and when Dynamo then retraces, writes to that input are lost (torch 2.13).
        if shape_env is not None:
            _torch_floats.mark_floats_specialized(shape_env, set())
        return
    shape_env = value_of(found[0][1]).node.shape_env
    kept: set[Any] = set()
    for _, node in found:
        if node.users and all(map(_is_tensorifiable, node.users)):
            kept |= _torch.free_symbols(value_of(node))
    for _, node in found:
        if not all(map(_may_take_symbolic, node.users)):
            kept -= _torch.free_symbols(value_of(node))
    dynamic: list[_Place] = []
    for owner, node in reversed(found):
        value = value_of(node)
        symbols = _torch.free_symbols(value)
        if _torch.has_unbacked(value) or (symbols and symbols <= kept):
            dynamic.insert(0, (owner, node))
            continue
        number = float(value if symbols else value.node.expr)  # may be NaN, which equals nothing
        for user in list(node.users):
            _replace_argument(user, node, number)
        if node.op != "placeholder":
            owner.graph.erase_node(node)
    if all(_can_be_tensor(node) for _, node in dynamic):
        for owner, node in dynamic:
            _tensorify(owner, node)
        _hoist({node: owner for owner, node in dynamic})
        kept = set()
    _torch_floats.mark_floats_specialized(shape_env, kept)
    for owner in {id(owner): owner for owner, _ in found}.values():
        owner.recompile()


def _sink_item_calls(gm: fx.GraphModule) -> None:
    """Read the floats of checkpointed functions inside them; torch 2.15 reads them before the call.

    A tensor input can stand for the number there, and calls that differ only in the number stay equal.
    """
    for node in list(gm.graph.nodes):
        body = getattr(gm, node.args[0].target) if _torch.is_checkpoint_call(node) else None
        if not isinstance(body, fx.GraphModule) or len(node.args[0].users) > 1:
            continue
        inputs = body.graph.find_nodes(op="placeholder")
        read = {
            inner: outer for inner, outer in zip(inputs, node.args[1:], strict=True) if _is_item_call(outer)
        }
        for inner, outer in read.items():
            with body.graph.inserting_after(inputs[-1]):
                number = body.graph.call_method("item", (inner,))
            inner.replace_all_uses_with(number, delete_user_cb=lambda user, number=number: user is not number)
            number.meta, inner.meta = inner.meta, {**inner.meta, "example_value": value_of(outer.args[0])}
            node.replace_input_with(outer, outer.args[0])
        for outer in {outer for outer in read.values() if not outer.users}:
            gm.graph.erase_node(outer)
        _sink_item_calls(body)


def _shape_env(gm: fx.GraphModule) -> Any:
    """Return the shape environment of a graph's inputs, if they have one."""
    values = map(value_of, gm.graph.find_nodes(op="placeholder"))
    return next((v.fake_mode.shape_env for v in values if isinstance(v, _torch.FakeTensor)), None)


def _name(user: fx.Node) -> str:
    return str(getattr(user.target, "__name__", user.target))


def _may_take_symbolic(user: fx.Node) -> bool:
    """Whether a call may read a changing float: arithmetic, a call that gives a float or has a body.

    AOTAutograd makes a constant of a float with any other reader, including a graph output. If the float is a
    tensor elsewhere, the guard is lost with its cache, and later calls get that constant (torch 2.13). Bodies
    are examined separately.
    """
    return (
        _is_tensorifiable(user)
        or isinstance(value_of(user), torch.SymFloat)
        or isinstance(user.target, HigherOrderOperator)
    )


def _is_tensorifiable(user: fx.Node) -> bool:
    """Whether AOTAutograd can compute a call on a tensor; not with keywords, like ``alpha`` (torch 2.13)."""
    return _name(user) in _ARITHMETIC and not user.kwargs


def _replace_argument(user: fx.Node, node: fx.Node, number: float) -> None:
    """Replace a node in a call's arguments by a number."""

    def known(read: fx.Node) -> Any:
        return number if read is node else read

    user.args = fx.node.map_arg(user.args, known)
    user.kwargs = fx.node.map_arg(user.kwargs, known)


def _can_be_tensor(node: fx.Node) -> bool:
    """Whether a float can be a 0-dim float64 tensor: computed from such, and equivalent for all users."""
    return (_is_item_call(node) or _is_arithmetic(node) or _is_root(node)) and all(
        _is_root(user)
        or (
            _is_arithmetic(user) and (isinstance(value_of(user), torch.SymFloat) or _takes_tensor(user, node))
        )
        for user in node.users
    )


def _is_item_call(node: Any) -> bool:
    if not isinstance(node, fx.Node):
        return False
    source = value_of(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    return (
        node.target == "item"
        and isinstance(source, torch.Tensor)
        and (source.dtype, source.ndim) == (torch.float64, 0)
    )


def _is_arithmetic(node: fx.Node) -> bool:
    return _name(node) in _AS_TENSORS and len(node.args) == 2 and not node.kwargs


def _is_root(node: fx.Node) -> bool:
    """Whether a node is the square root of a float. A tensor's is the same, to the last bit."""
    return (
        _name(node) in _ROOTS
        and len(node.args) == 1
        and not node.kwargs
        and isinstance(value_of(node), torch.SymFloat)
    )


def _takes_tensor(user: fx.Node, node: fx.Node) -> bool:
    """Whether the other operand of a call is a tensor, and the written one if the call writes."""
    other = [a for a in user.args if a is not node]
    return (
        len(other) == 1
        and isinstance(other[0], fx.Node)
        and isinstance(value_of(other[0]), torch.Tensor)
        and isinstance(value_of(user), torch.Tensor)
        and not (_writes(user) and user.args[0] is node)
    )


def _writes(user: fx.Node) -> bool:
    return _name(user).startswith("i") or _name(user).endswith("_")


def _tensorify(owner: fx.GraphModule, node: fx.Node) -> None:
    """Replace a float by the tensor that it is read or computed from."""
    users = [user for user in node.users if isinstance(value_of(user), torch.Tensor)]
    if _is_item_call(node):
        tensor = node.args[0]
        assert isinstance(tensor, fx.Node)
        node.replace_all_uses_with(tensor)
        owner.graph.erase_node(node)
    else:
        tensor = node
        if _is_root(node):
            node.target = torch.sqrt
        values: Sequence[Any] = [value_of(a) if isinstance(a, fx.Node) else a for a in node.args]
        with next(v.fake_mode for v in values if isinstance(v, _torch.FakeTensor)):
            node.meta["example_value"] = node.target(*values)  # type: ignore[operator]
    for user in users:
        _keep_result_dtype(owner.graph, user, tensor)


def _hoist(made: dict[fx.Node, fx.GraphModule]) -> None:
    """Move computations that several calls read to the start, if they only need inputs.

    Dynamo computes them at first use, in the first of several equal layers, and the other layers read them
    from there.
    """
    moving: set[fx.Node] = set()
    for node in reversed(made):
        if node.op == "call_function" and (len(node.users) > 1 or moving & set(node.users)):
            moving.add(node)
    for owner in {id(owner): owner for owner in made.values()}.values():
        at = next(n for n in owner.graph.nodes if n.op != "placeholder")
        moved: set[fx.Node] = set()
        for node in (n for n, place in made.items() if place is owner and n in moving):
            if all(n.op == "placeholder" or n in moved for n in node.all_input_nodes):
                moved.add(node)
                if node is at:
                    at = node.next
                else:
                    at.prepend(node)


def _keep_result_dtype(graph: fx.Graph, user: fx.Node, tensor: fx.Node) -> None:
    """Keep the dtype of a result if a 0-dim tensor would promote the other operand and a number would not."""
    (other,) = (value_of(a) for a in user.args if a is not tensor)  # type: ignore[arg-type]
    if _writes(user) or (other.ndim and (other.is_floating_point() or other.is_complex())):
        return
    wanted = value_of(user).dtype
    computed = _torch.computation_dtype(wanted)
    with graph.inserting_before(user), value_of(tensor).fake_mode:
        operand = graph.call_method("to", (tensor, computed))
        operand.meta["example_value"] = value_of(tensor).to(computed)
    user.replace_input_with(tensor, operand)
    if computed is not wanted:
        before = dict(user.users)
        with graph.inserting_after(user), other.fake_mode:
            result = graph.call_method("to", (user, wanted))
            result.meta["example_value"] = value_of(user)
            user.meta["example_value"] = value_of(user).to(computed)
        for reader in before:
            reader.replace_input_with(user, result)
