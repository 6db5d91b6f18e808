"""A program that capture or partition gets wrong, cut down to the few calls of the user's that it takes.

These stages are no rewrites of one graph: what goes in is the graph of torch functions that Dynamo recorded, and what comes
out are graphs of ATen operators. So parts of Dynamo's graph are compiled up to that stage, without any pass, and compared with
the same part in eager, gradients included, until the smallest is left that still fails.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from fxpasses._torch import outside_tracing, reset_code
from fxpasses.aliasing import is_random
from fxpasses.checking.inputs import Unsupported, cloned
from fxpasses.checking.interpret import RoundedMode, seeded, widened
from fxpasses.checking.limits import VARIABLE, Limits, progress
from fxpasses.checking.reduce import Case, reduce_nodes
from fxpasses.checking.repro import fresh_directory, graph_text, input_lines, why_not_shown
from fxpasses.checking.tolerance import deviation

__all__ = ["Stage", "replay_stage", "stage_differences", "stage_repro"]

log = logging.getLogger(__name__)

Stage = Literal["capture", "partition"]
_SAMPLES = 4
_SECONDS = 240.0
"""How long parts of a graph are compiled in the search for a small one."""
_SEED = 20


def replay_stage(graph: Callable[..., Any], inputs: Sequence[Any], stage: Stage) -> int:
    """Compile a function up to a stage and compare it with eager; what a repro file calls.

    Returns:
        1 when the stage is wrong, 0 otherwise: an exit status.

    >>> replay_stage(lambda x: (torch.sin(x),), [torch.ones(2, requires_grad=True)], "partition")
    the partition is right on these inputs
    0
    """
    found = stage_differences(graph, inputs, stage)
    print(f"the {stage} is wrong: {found}" if found else f"the {stage} is right on these inputs")
    return 1 if found else 0


def stage_differences(graph: Callable[..., Any], inputs: Sequence[Any], stage: Stage) -> str:
    """How a function's results and gradients after a stage differ from eager's; "" when they do not.

    Args:
        graph: the function, of positional arguments.
        inputs: what it runs on; gradients are compared for those that require them.
        stage: the last stage that runs, on no passes.

    Raises:
        Unsupported: when the function does not run in eager, or an input cannot be copied.
    """
    try:
        native = _step(graph, inputs)
        samples = [_step(graph, inputs, RoundedMode(seed)) for seed in range(_SAMPLES)]
    except Exception as error:
        raise Unsupported(f"eager raises {type(error).__name__}: {error}") from error
    exact: dict[str, Tensor] | None
    try:
        exact = _step(graph, inputs, wide=True)
    except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
        exact = None  # a type in the code that does not fit
    try:
        with _up_to(stage) as compiled:
            got = _step(compiled(graph), inputs)
    except Exception as error:  # noqa: BLE001  (whatever a wrong stage raises is the finding)
        cause = getattr(error, "inner_exception", error)
        return f"it raises {type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
    for name, usual in native.items():
        value = got.get(name)
        if value is None or (value.shape, value.dtype) != (usual.shape, usual.dtype):
            return f"{name}: {'missing' if value is None else f'{value.dtype}{tuple(value.shape)}'}"
        center = None if exact is None or exact[name].shape != usual.shape else exact[name]
        how = deviation(usual, center, [s[name] for s in samples if s[name].shape == usual.shape], value)
        if how is not None:
            return f"{name}: {how}"
    extra = [name for name in got if name not in native]
    return f"{extra[0]}: eager has none" if extra else ""


@contextmanager
def _up_to(stage: Stage) -> Iterator[Callable[[Any], Any]]:
    """Compile functions up to a stage, each alone and without caches."""
    limits = Limits(stage=stage).to_json()
    functions: list[Any] = []

    def compiled(function: Callable[..., Any]) -> Any:
        def alone(*args: Any) -> Any:  # Dynamo keeps what it compiled with the code
            return function(*args)

        functions.append(alone)
        return torch.compile(
            alone, backend="fxpasses", dynamic=False, options={"check": "off", "report": None, "compiler": "eager"}
        )

    with mock.patch.dict(os.environ, {VARIABLE: limits}):
        try:
            yield compiled
        finally:
            for function in functions:
                reset_code(function)


def _step(function: Callable[..., Any], inputs: Sequence[Any], mode: Any = None, wide: bool = False) -> dict[str, Tensor]:
    """Results, inputs afterwards and gradients of one step, by name."""
    copies = [widened(v) for v in cloned(inputs)] if wide else cloned(inputs)
    leaves = [
        c.requires_grad_(v.requires_grad) if isinstance(c, Tensor) and c.is_floating_point() else c
        for v, c in zip(inputs, copies, strict=True)
    ]
    # What is written to has to be no leaf.
    given = [v.view_as(v) if isinstance(v, Tensor) and v.requires_grad else v for v in leaves]
    with seeded(_SEED), mode or torch.enable_grad(), torch.enable_grad():
        results = [v for v in tree_leaves(function(*given)) if isinstance(v, Tensor)]
        wanted = [v for v in results if v.requires_grad]
        if wanted:
            generator = torch.Generator().manual_seed(_SEED)
            gradients = [torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v) for v in wanted]
            torch.autograd.backward(wanted, gradients)
    found = {f"output {i}": v for i, v in enumerate(results)}
    for i, value in enumerate(given):
        if isinstance(value, Tensor):
            found[f"input {i} after the run"] = value
    for i, value in enumerate(leaves):
        if isinstance(value, Tensor) and value.grad is not None:
            found[f"gradient of input {i}"] = value.grad
    return {name: value.detach().clone() for name, value in found.items()}


def stage_repro(gm: fx.GraphModule, inputs: Sequence[Any], stage: Stage, directory: Path) -> tuple[str, int, str]:
    """Cut Dynamo's graph down to what a stage gets wrong, and write it to a file.

    Args:
        gm: Dynamo's graph.
        inputs: what it is called with.
        stage: the stage.
        directory: where the file goes.

    Returns:
        The file ("" if there is none), how many calls its graph has, and why there is none.
    """
    if any(is_random(node) for node in gm.graph.nodes):
        return "", 0, "the graph draws random numbers, which eager draws in another way"
    until = time.perf_counter() + _SECONDS

    def fails(case: Case) -> bool:
        if time.perf_counter() > until:
            return False
        try:
            return bool(stage_differences(case.gm, case.inputs, stage))
        except Unsupported:
            return False

    with outside_tracing(), torch.enable_grad():
        try:
            whole = _with_numbers(gm, inputs)
            if not fails(whole):
                return "", 0, f"the {stage} is right when the graph is compiled alone"
            case = reduce_nodes(whole, None, (), fails)
            return _write(case, stage, stage_differences(case.gm, case.inputs, stage), fails, directory)
        except (Unsupported, OSError) as reason:
            return "", 0, str(reason)


def _with_numbers(gm: fx.GraphModule, inputs: Sequence[Any]) -> Case:
    """The graph as one of plain calls: parameters that it holds become inputs, methods become functions."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    values: list[Any] = []
    given = iter(inputs)
    for node in gm.graph.nodes:
        if node.op == "placeholder" or (node.op == "get_attr" and isinstance(_attribute(gm, node), Tensor)):
            made[node] = graph.placeholder(node.name)
            values.append(next(given) if node.op == "placeholder" else _attribute(gm, node))
        elif node.op == "call_method":
            made[node] = graph.create_node(
                "call_function",
                getattr(torch.Tensor, str(node.target)),
                fx.node.map_arg(node.args, made.__getitem__),
                fx.node.map_arg(node.kwargs, made.__getitem__),
                node.name,
            )
        elif node.op == "call_module":
            raise Unsupported(f"a module is called: {node.target}")
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
    for old, new in made.items():
        new.meta = {"val": old.meta.get("example_value", 0)}
    values = [int(v) if isinstance(v, torch.SymInt) else v for v in values]
    return Case(fx.GraphModule(gm, graph), values)


def _attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _write(
    case: Case, stage: Stage, found: str, fails: Callable[[Case], bool], directory: Path
) -> tuple[str, int, str]:
    code = graph_text(case.gm)
    file = fresh_directory(directory, stage) / "repro.py"

    def like_these(drawn: list[Any]) -> list[Any]:
        return [
            d.requires_grad_(v.requires_grad) if isinstance(d, Tensor) and d.is_floating_point() else d
            for d, v in zip(drawn, case.inputs, strict=True)
        ]

    given, saved = input_lines(
        [v.detach() if isinstance(v, Tensor) else v for v in case.inputs],
        lambda drawn: fails(Case(case.gm, like_these(drawn))),
        file,
    )
    wanting = [i for i, v in enumerate(case.inputs) if isinstance(v, Tensor) and v.requires_grad]
    lines = [
        f'"""The {stage} is wrong on a graph of {case.size} calls: {found}.',
        "",
        'Exits with 1 as long as it is. Written by fxpasses."""',
        "",
        *(["from pathlib import Path"] if saved else []),
        "",
        "import torch",
        *(["import operator"] if "operator." in code else []),
        "",
        "from fxpasses.checking.staged import replay_stage",
        "",
        "",
        code,
        "",
        *given,
        *([f"for position in {wanting}:", "    inputs[position].requires_grad_()"] if wanting else []),
        "",
        'if __name__ == "__main__":',
        f'    raise SystemExit(replay_stage(graph, inputs, "{stage}"))',
        "",
    ]
    file.write_text("\n".join(lines))
    if (why := why_not_shown(file)) is not None:
        return "", case.size, f"{file} does not show it: {why}"
    progress.note("repro", str(file))
    return str(file), case.size, ""
