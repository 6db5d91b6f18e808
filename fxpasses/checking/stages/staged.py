"""Shrink a program that capture or partition gets wrong to the few calls of the user's that it takes.

These stages are not rewrites of one graph: the input is the graph of torch functions that Dynamo recorded,
and the outputs are graphs of ATen operators. So parts of Dynamo's graph are compiled up to that stage,
without any pass, and compared with the same part in eager, gradients included, until the smallest that still
fails is left.
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

from fake.error_text import describe_error, first_line
from fake.seam.pytree import tree_leaves
from fxpasses._torch import functorch_config, outside_tracing, reset_code, without_function_modes
from fxpasses.checking.comparison.rounding import PROGRAM_LIMIT, distance, perturbed, perturbed_in_dtype
from fxpasses.checking.execution.collectives import collectives
from fxpasses.checking.execution.inputs import Unsupported, cloned, placeholders
from fxpasses.checking.execution.interpret import RUN_ERRORS, Run, as_float64, seeded
from fxpasses.checking.faults.reduce import Case, extract_calls, reduce_nodes
from fxpasses.checking.faults.registered import add_decompositions
from fxpasses.checking.faults.repro import fresh_directory, why_not_reproduced, write_repro
from fxpasses.checking.faults.source import PassSource
from fxpasses.graphs.rewriting import attribute_of
from fxpasses.pass_manager.limits import VARIABLE, Limits, progress

log = logging.getLogger(__name__)

Stage = Literal["capture", "partition"]
_PERTURBATIONS = 2
_SECONDS = 240.0
"""Time limit, in seconds, of the search for a small graph, which compiles parts."""
_SEED = 20


def replay_stage(
    graph: Callable[..., Any], inputs: Sequence[Any], stage: Stage, passes: Sequence[str] = ()
) -> int:
    """Compile a function up to a stage and compare it with eager. Repro files call this.

    Args:
        graph: the function, of positional arguments.
        inputs: what to run it on; gradients are compared for those that require them.
        stage: the last stage to run.
        passes: names of passes that run before it.

    Returns:
        1 if the stage is wrong, 0 otherwise: an exit status.

    >>> replay_stage(lambda x: (torch.sin(x),), [torch.ones(2, requires_grad=True)], "partition")
    the partition is right on these inputs
    0
    """
    found = stage_differences(graph, inputs, stage, passes)
    print(f"the {stage} is wrong: {found}" if found else f"the {stage} is right on these inputs")
    return 1 if found else 0


def stage_differences(
    graph: Callable[..., Any], inputs: Sequence[Any], stage: Stage, passes: Sequence[str] = ()
) -> str:
    """Return how a function's results and gradients after a stage differ from eager; "" if they do not.

    Args:
        graph: the function, of positional arguments.
        inputs: what to run it on; gradients are compared for those that require them.
        stage: the last stage to run.
        passes: names of passes that run before it.

    Raises:
        Unsupported: the function does not run in eager, or an input cannot be copied.
    """
    for sign in (1, -1):
        found = _differences(graph, inputs, stage, passes, sign)
        if found:
            return found
    return ""


def _differences(
    graph: Callable[..., Any], inputs: Sequence[Any], stage: Stage, passes: Sequence[str], sign: int
) -> str:
    """The same for one choice of the output gradients."""
    try:
        native = _step(graph, inputs, sign)
    except Exception as error:
        raise Unsupported(f"eager raises {describe_error(error)}") from error
    try:
        nearby = [
            [as_float64(v) for v in inputs],
            *(perturbed(inputs, seed) for seed in range(_PERTURBATIONS)),
        ]
        wide = [_step(graph, given, sign, like=inputs) for given in nearby]
    except RUN_ERRORS:  # a dtype in the code does not fit
        nearby = [list(inputs), *(perturbed_in_dtype(inputs, seed) for seed in range(_PERTURBATIONS))]
        wide = [_step(graph, given, sign, like=inputs) for given in nearby]
    try:
        with _compile_up_to(stage, passes) as compiled:
            got = _step(compiled(graph), inputs, sign)
    except Exception as error:  # noqa: BLE001  (whatever a wrong stage raises is the finding)
        cause = getattr(error, "inner_exception", error)
        return f"it raises {first_line(cause)}"
    for name, usual in native.items():
        value = got.get(name)
        if value is None or (value.shape, value.dtype) != (usual.shape, usual.dtype):
            return f"{name}: {'missing' if value is None else f'{value.dtype}{tuple(value.shape)}'}"
        how = distance(usual, value, [run[name] for run in wide if name in run])
        if how is not None and how.times > PROGRAM_LIMIT:
            return f"{name}: {how}"
    extra = [name for name in got if name not in native]
    return f"{extra[0]}: eager has none" if extra else ""


@contextmanager
def _compile_up_to(stage: Stage, passes: Sequence[str]) -> Iterator[Callable[[Any], Any]]:
    """Compile functions up to a stage, each on its own and without caches."""
    options: Any = {"check": "off", "report": None, "compiler": "eager", "passes": list(passes)}
    limits = Limits(stage="passes" if passes else stage).to_json()
    functions: list[Any] = []

    def compiled(function: Callable[..., Any]) -> Any:
        def alone(*args: Any) -> Any:  # Dynamo caches compiled code per code object
            return function(*args)

        functions.append(alone)
        return torch.compile(alone, backend="fxpasses", dynamic=False, options=options)

    uncached = functorch_config.patch(
        enable_autograd_cache=False
    )  # cached results do not run through the stages
    with mock.patch.dict(os.environ, {VARIABLE: limits}), uncached:
        try:
            yield compiled
        finally:
            for function in functions:
                reset_code(function)


def _step(
    function: Callable[..., Any], inputs: Sequence[Any], sign: int, like: Sequence[Any] | None = None
) -> dict[str, Tensor]:
    """Return results, inputs afterwards and gradients of one step, by name.

    Args:
        function: of the inputs.
        inputs: what to run it on.
        sign: of the output gradients.
        like: tensors that tell which inputs require gradients; the inputs themselves if None.
    """
    leaves = _require_grad_like(inputs if like is None else like, cloned(inputs))
    # In-place writes must not be to leaves.
    given = [v.view_as(v) if isinstance(v, Tensor) and v.requires_grad else v for v in leaves]
    with seeded(_SEED), torch.enable_grad():
        results = [v for v in tree_leaves(function(*given)) if isinstance(v, Tensor)]
        wanted = [v for v in results if v.requires_grad]
        if wanted:
            generator = torch.Generator().manual_seed(_SEED)
            drawn = [torch.randn(v.shape, generator=generator, dtype=torch.float64) for v in wanted]
            gradients = [sign * d.to(v) for d, v in zip(drawn, wanted, strict=True)]
            torch.autograd.backward(wanted, gradients)
    found = {f"output {i}": v for i, v in enumerate(results)}
    for i, value in enumerate(given):
        if isinstance(value, Tensor):
            found[f"input {i} after the run"] = value
    for i, value in enumerate(leaves):
        if isinstance(value, Tensor) and value.grad is not None:
            found[f"gradient of input {i}"] = value.grad
    return {name: value.detach().clone() for name, value in found.items()}


def stage_repro(
    gm: fx.GraphModule, inputs: Sequence[Any], stage: Stage, directory: Path
) -> tuple[str, int, str]:
    """Shrink Dynamo's graph to what a stage gets wrong, and write it to a file.

    Args:
        gm: Dynamo's graph.
        inputs: its inputs.
        stage: the stage.
        directory: where to write the file.

    Returns:
        The file ("" if there is none), how many calls its graph has, and why there is none.
    """
    if any(collectives(gm)):
        return (
            "",
            0,
            "parts of a program that speaks with other processes are not run alone: they would wait for them",
        )
    deadline = time.perf_counter() + _SECONDS
    passes: list[str] = []
    fixed: set[str] = set()
    """Inputs of the whole graph that require no gradient."""

    def fails(case: Case) -> bool:
        if time.perf_counter() > deadline:
            return False
        for node, value in zip(placeholders(case.gm), case.inputs, strict=True):
            if isinstance(value, Tensor) and value.is_floating_point() and node.name not in fixed:
                value.requires_grad_()
        try:
            return bool(stage_differences(case.gm, case.inputs, stage, passes))
        except Unsupported:
            return False

    with outside_tracing(), torch.enable_grad():
        try:
            whole = _to_plain_calls(gm, inputs)
            given = zip(placeholders(whole.gm), whole.inputs, strict=True)
            fixed |= {n.name for n, v in given if isinstance(v, Tensor) and not v.requires_grad}
            whole = _without_rng(whole)
            for behind in ((), ("default",)) if stage == "partition" else ((),):
                passes[:] = behind
                if fails(whole):
                    break
            else:
                return "", 0, f"the {stage} is right when the graph is compiled alone"
            case = reduce_nodes(whole, None, (), fails)
            return _write(case, stage, passes, fails, directory)
        except (Unsupported, OSError) as reason:
            return "", 0, str(reason)


def in_eager_with_repro(
    gm: fx.GraphModule, stage: Stage, directory: Path, tell: Callable[[str, int, str], None]
) -> Callable[..., Any]:
    """Run Dynamo's graph in eager, and look for a fault of a stage on the inputs of its first call.

    Args:
        gm: the graph.
        stage: the stage.
        directory: where to write the repro file.
        tell: called with what :func:`stage_repro` returns.
    """
    looked_at = False

    def run(*inputs: Any) -> Any:
        nonlocal looked_at
        if not looked_at:
            looked_at = True
            tell(*stage_repro(gm, inputs, stage, directory))
        with without_function_modes():
            return gm.forward(*inputs)

    return run


def _to_plain_calls(gm: fx.GraphModule, inputs: Sequence[Any]) -> Case:
    """Convert the graph to plain calls: its parameters become inputs, methods become functions."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    values: list[Any] = []
    given = iter(inputs)
    for node in gm.graph.nodes:
        if node.op == "placeholder" or (node.op == "get_attr" and isinstance(attribute_of(node, gm), Tensor)):
            made[node] = graph.placeholder(node.name)
            values.append(next(given) if node.op == "placeholder" else attribute_of(node, gm))
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
    if any(isinstance(v, torch.SymInt) and v.node.is_nested_int() for v in values):
        raise Unsupported("a ragged size")
    values = [int(v) if isinstance(v, torch.SymInt) else v for v in values]
    return Case(fx.GraphModule(gm, graph), values)


class _RngRecordingRun(Run):
    """Records which calls use the RNG: those that change the state of the generators."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, keep=True)
        self.rng_calls: set[fx.Node] = set()

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a call, and note whether it used the RNG. Args: those of :meth:`torch.fx.Interpreter.call_function`."""
        before = _rng_states()
        result = super().call_function(target, args, kwargs)
        if self.current is not None and not all(map(torch.equal, before, _rng_states())):
            self.rng_calls.add(self.current)
        return result


def _require_grad_like(these: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Make floats require gradients if those in their places do."""
    return [
        v.requires_grad_(t.requires_grad) if isinstance(v, Tensor) and v.is_floating_point() else v
        for t, v in zip(these, values, strict=True)
    ]


def _rng_states() -> list[Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def _without_rng(case: Case) -> Case:
    """Turn random draws into inputs: compiled graphs draw differently from eager."""
    run = _RngRecordingRun(case.gm)
    try:
        run(cloned(case.inputs), _SEED)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise Unsupported(f"eager raises {describe_error(error)}") from error
    if not run.rng_calls:
        return case
    calls = {n for n in case.gm.graph.nodes if n.op == "call_function"}
    rest = extract_calls(case.gm, calls - run.rng_calls, run.values)
    if rest is None:
        raise Unsupported("every call calls the RNG")
    return rest


def _write(
    case: Case, stage: Stage, passes: Sequence[str], fails: Callable[[Case], bool], directory: Path
) -> tuple[str, int, str]:
    found = stage_differences(case.gm, case.inputs, stage, passes)
    behind = f", {list(passes)!r}" if passes else ""
    file = fresh_directory(directory, stage) / "repro.py"
    wanting = [i for i, v in enumerate(case.inputs) if isinstance(v, Tensor) and v.requires_grad]
    source = PassSource()
    add_decompositions(source)
    write_repro(
        file,
        f"The {stage} is wrong on a graph of {case.size} calls: {found}.",
        Case(case.gm, [v.detach() if isinstance(v, Tensor) else v for v in case.inputs]),
        lambda drawn: fails(Case(case.gm, _require_grad_like(case.inputs, drawn))),
        f'fxpasses.checking.stages.staged.replay_stage(graph, inputs, "{stage}"{behind})',
        source,
        more=[f"for position in {wanting}:", "    inputs[position].requires_grad_()"] if wanting else [],
    )
    if (why := why_not_reproduced(file)) is not None:
        return "", case.size, f"{file} does not show it: {why}"
    progress.note("repro", str(file))
    return str(file), case.size, ""
