"""Copy a trace in Dynamo's graph: its nodes, with the inputs and the guards of another call."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from fake.seam.dtensor import mesh_of
from fxpasses.dynamo import _torch, _torch_inputs
from fxpasses.dynamo.traces import Leaf, Plan, SourceMap, Trace, template

_NUMBERED = re.compile(r"_\d+$")


def copy_trace(trace: Trace, tx: Any, module: Any, leaves: list[Leaf], moved: SourceMap) -> Any:
    """Insert a copy of a trace into the graph, with the guards of the new call.

    Args:
        trace: the trace of the earlier call.
        tx: Dynamo's instruction translator.
        module: Dynamo's variable for the new call's module.
        leaves: the arguments of the new call.
        moved: maps sources of the traced call to those of the new one (from :func:`.traces.matched_sources`).

    Returns: Dynamo's variable for the result, or None if the call must be traced after all.
    """
    plan = trace.plan
    form = template(trace.result, {})
    if plan is None or form is None:
        return None
    read = moved.read
    same: dict[fx.Node, fx.Node] = {}
    variables: dict[fx.Node, Any] = {}
    for old, new in zip(trace.leaves, leaves, strict=True):
        if old.node is not None and new.node is not None:
            same[old.node] = new.node
            variables[new.node] = new.variable
    like = _torch_inputs.inputs_like(tx)
    for node, source in plan.captured.items():
        moved_source = moved(source)
        built = like(moved_source, read(moved_source), node) or _torch.build_variable(
            tx, moved_source, read(moved_source)
        )
        if type(built) is not _torch.TensorVariable:
            return None
        same[node] = built.as_proxy().node
        variables[same[node]] = built
    constants: dict[fx.Node, float] = {}
    for node, source in plan.numbers.items():
        moved_source = moved(source)
        if _torch.is_specialized_or_guarded(node.meta["example_value"]):
            # The number became a constant of the traced call when something asked for it. Here it is a
            # constant from the start: not a graph input, and a plain comparison instead of a guard on a
            # symbol.
            constants[node] = read(moved_source)
            _torch.guard_constant(tx, moved_source)
            continue
        built = _torch.build_number(tx, moved_source, read(moved_source))
        if built is None:
            return None
        same[node] = built
    if len(set(same.values())) != len(same):
        return None  # two tensors of the traced call are one tensor here
    if moved.table:
        _install_guards(plan, tx, moved)
    paths = _paths(trace, tx, module)
    replaced: dict[fx.Node, Any] = {**same, **constants}
    with _torch.fake_node_runner(tx) as run:
        for node in trace.nodes:
            if node not in plan.numbers:
                same[node] = replaced[node] = made = _copy_node(node, tx, replaced, paths)
                run(made)
    return _result(form, tx, same, variables)


def _install_guards(plan: Plan, tx: Any, moved: SourceMap) -> None:
    installed = tx.output.guards
    _torch.key_order_sources(tx).update(map(moved, plan.key_ordered))
    for guard, _, _ in plan.guards:
        if guard.create_fn_name() == "TENSOR_MATCH":
            moved_source = moved(guard.originating_source)
            if not _torch_inputs.is_guarded(tx, moved_source):
                _torch.build_variable(
                    tx, moved_source, moved.read(moved_source)
                )  # its guard refers to the tensor
        elif guard not in plan.class_guards:
            moved_source = moved(guard.originating_source)
            made = _torch.Guard(moved_source, guard.create_fn, user_stack=guard.user_stack)
            installed.add(made, collect_debug_stack=False)
    for guard, other in plan.same_objects:
        install: Any = guard.inner_create_fn()
        check = functools.partial(install, source_b=moved(other))
        moved_source = moved(guard.originating_source)
        if moved_source != moved(other) and not (
            mesh_of(moved.read(moved_source)) is not None and _torch.guard_mesh(tx, moved_source)
        ):
            installed.add(
                _torch.Guard(moved_source, check, user_stack=guard.user_stack), collect_debug_stack=False
            )


def _copy_node(node: fx.Node, tx: Any, replaced: Mapping[fx.Node, Any], paths: _Paths) -> fx.Node:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: replaced.get(n, n))
    name = _NUMBERED.sub("", node.name)
    made = tx.output.current_tracer.create_node(node.op, node.target, args, kwargs, name=name)
    made.meta.update({k: v for k, v in node.meta.items() if k not in ("example_value", "creation_timestamp")})
    if "nn_module_stack" in node.meta:
        made.meta["nn_module_stack"] = paths(node.meta["nn_module_stack"])
    if "source_fn_stack" in node.meta:
        *outer, (_, function) = node.meta["source_fn_stack"]
        made.meta["source_fn_stack"] = [*outer, (made.name, function)]
    return made


@dataclass
class _Paths:
    """Module stacks for copied nodes: the traced module's part is replaced by that of the new module."""

    outer: dict[str, Any]
    first: str
    old_name: str
    new_name: str
    modules: dict[str, str]

    def __call__(self, stack: Mapping[str, Any]) -> dict[str, Any]:
        made = dict(self.outer)
        entries = iter(stack.items())
        for key, (name, kind) in itertools.dropwhile(lambda e: e[0].partition("@")[0] != self.first, entries):
            number, _, calls = key.partition("@")
            renamed = self.modules.get(number, number) + ("@" + calls if calls else "")
            if name.startswith(self.old_name):
                name = self.new_name + name[len(self.old_name) :]
            made[renamed] = (name, kind)
        return made


def _paths(trace: Trace, tx: Any, module: Any) -> _Paths:
    old = trace.leaves[1].variable
    names = _torch.readable_path(old), _torch.readable_path(module)
    pairs = zip(old.value.modules(), module.value.modules(), strict=False)
    modules = {str(id(a)): str(id(b)) for a, b in pairs}
    return _Paths(dict(tx.nn_module_stack), str(id(old.value)), *names, modules)


def _result(form: Any, tx: Any, same: Mapping[fx.Node, fx.Node], variables: Mapping[fx.Node, Any]) -> Any:
    kind, *rest = form
    if kind == "constant":
        return _torch.ConstantVariable.create(rest[1])
    if kind == "tuple":
        return _torch.TupleVariable([_result(item, tx, same, variables) for item in rest[0]])
    node = same.get(rest[0], rest[0])
    return variables.get(node) or _torch.tensor_variable(tx, node)
