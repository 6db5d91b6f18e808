"""Repro files: a small file that shows that a pass is wrong, and the functions that it calls."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import re
import runpy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from fake.error_text import describe_error
from fxpasses._torch import OpOverload, outside_tracing
from fxpasses.checking.comparison.values import Mismatch, Reference, compare, value_names
from fxpasses.checking.comparison.windows import changed_nodes
from fxpasses.checking.execution.fake_values import propagate_fakes
from fxpasses.checking.execution.inputs import Unsupported
from fxpasses.checking.faults.blame import TimeLimited, after_passes, apply_pass
from fxpasses.checking.faults.reduce import Case, failing_part, smaller_sizes
from fxpasses.checking.faults.source import CannotEmbed, PassSource, pass_sources
from fxpasses.errors import PassError, StructureError
from fxpasses.graphs.numbers import computable
from fxpasses.graphs.provenance import is_backward
from fxpasses.graphs.rewriting import constants_of, copy_graph, subgraphs
from fxpasses.pass_manager.manager import PassManager
from fxpasses.pass_manager.pass_base import Contract, FunctionPass, Pass


def replay(
    graph: Callable[..., Any],
    inputs: Sequence[Any],
    item: Pass,
    *,
    dynamic: bool = False,
    traced: Sequence[Any] | None = None,
    backward: Collection[int] = (),
    bitwise: bool = False,
    after: Sequence[Pass] = (),
    fault: str = "",
) -> int:
    """Run ``item`` on the graph of a function and compare before and after. Repro files call this.

    Args:
        graph: a function of operator calls, which becomes a graph call by call.
        inputs: what to run it on.
        item: the pass.
        dynamic: whether the graph's sizes are symbolic.
        traced: inputs with the sizes that the pass sees as hints, if those of ``inputs`` differ.
        backward: positions of the calls to mark as the backward pass's, as AOTAutograd does.
        bitwise: whether results must match bit for bit.
        after: passes that run before: ``item`` is compared with the graph that they leave.
        fault: the kind of fault that was found. Another one that only the smaller graph shows is not reported
            in its place.

    Returns:
        1 if the pass is wrong, 0 otherwise: an exit status.

    >>> import torch, fxpasses
    >>> @fxpasses.graph_pass
    ... def wrong(gm):
    ...     for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
    ...         node.target = torch.ops.aten.cos.default
    ...     return True
    >>> replay(lambda x: (torch.ops.aten.sin.default(x),), [torch.zeros(2)], wrong)
    pass 'wrong' is wrong: output 0: element [0]: 0 became 1, in float64
    1
    """
    case = _with_metadata(
        Case(recorded_calls(graph), list(inputs), None if traced is None else list(traced)), dynamic, backward
    )
    if after:
        case = Case(after_passes(after, case.gm, min(item.graphs)), case.inputs, case.traced)
    structural = structural_faults(item, case)
    found = (
        structural
        if structural and fault in ("", structural[0].fault)
        else _mismatches_of(item, case, bitwise)
    )
    found = [m for m in found if m.fault == fault] or found or structural
    if not found:
        print(f"pass {item.name!r} is right on these inputs")
        return 0
    print(f"pass {item.name!r} is wrong: " + "; ".join(map(str, found)))
    return 1


class _RecordCalls(TorchFunctionMode):
    """Records every operator call, also without tensor arguments (which symbolic tracing would run)."""

    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self.graphs: dict[str, fx.GraphModule] = {}
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload):
            return self._tracer.create_proxy("call_function", func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def call(self, operator: Any, args: tuple[Any, ...]) -> fx.Proxy:
        """Make a node of a call of a higher-order operator."""
        args = tuple(self._graph(a) if inspect.isfunction(a) else a for a in args)
        return self._tracer.create_proxy("call_function", operator, args, {})

    def _graph(self, function: Callable[..., Any]) -> fx.Proxy:
        self.graphs[function.__name__] = recorded_calls(function)
        return self._tracer.create_proxy("get_attr", function.__name__, (), {})


def recorded_calls(function: Callable[..., Any]) -> fx.GraphModule:
    """Return the operator calls of a function as a graph."""
    tracer = fx.Tracer()
    with _RecordCalls(tracer) as record:
        token = _recording.set(record)
        try:
            graph = tracer.trace(function)
        finally:
            _recording.reset(token)
    # The tracer made tensors that the function passes to operators attributes of its module.
    held = {name: value for name, value in vars(tracer.root).items() if isinstance(value, Tensor)}
    held |= dict(tracer.root.named_parameters(recurse=False)) | dict(tracer.root.named_buffers(recurse=False))
    return fx.GraphModule({**held, **record.graphs}, graph)


_recording: ContextVar[_RecordCalls | None] = ContextVar("recording", default=None)


def higher_order(operator: Any, *args: Any) -> Any:
    """Call a higher-order operator such as ``torch.ops.higher_order.cond``. Repro files call this."""
    record = _recording.get()
    return operator(*args) if record is None else record.call(operator, args)


def structural_faults(item: Pass, case: Case) -> list[Mismatch]:
    """The error of a pass manager that runs only this pass on the graph; empty if it accepts the result."""
    contract = Contract(item.graphs, numerics=item.contract.numerics, metadata=item.contract.metadata)
    alone = FunctionPass(function=item.apply, name=item.name, contract=contract)
    try:
        PassManager([alone]).run(copy_graph(case.gm, constants=True), min(item.graphs))
    except PassError as error:
        return [Mismatch("structure" if isinstance(error, StructureError) else "error", "", -1, error.reason)]
    return []


def _mismatches_of(item: Pass, case: Case, bitwise: bool = False) -> list[Mismatch]:
    """Return the mismatches of the rewritten graph on its inputs.

    Raises:
        Unsupported: the graph cannot run on them.
    """
    reference = Reference(case.gm, case.inputs)
    assert reference.native is not None
    try:
        after, _ = apply_pass(item, case.gm)
    except Exception as error:  # noqa: BLE001  (whatever a wrong pass raises is the finding)
        return [Mismatch("error", "", -1, f"the pass raises {describe_error(error)}")]
    return compare(reference, after, value_names(case.gm, "joint"), bitwise)


def _may_reproduce(item: Pass, gm: fx.GraphModule, fault: str) -> bool:
    """Whether the pass changes a part of a graph as the fault requires.

    That needs no values to find out, and holds for few parts if the pass is a pattern.
    """
    if fault == "structure":
        return True  # perhaps of the metadata
    try:
        after, _ = apply_pass(item, gm)
    except Exception:  # noqa: BLE001  (a fault of its own)
        return fault == "error"
    return any(changed_nodes(gm, after))


def _with_metadata(case: Case, dynamic: bool, backward: Collection[int] = ()) -> Case:
    """Reset metadata to fake values computed from the inputs, plus marks on the backward pass's calls.

    Raises:
        Exception: an operator rejects its inputs.
    """
    gm = copy_graph(case.gm)
    for inner in (gm, *subgraphs(gm).values()):
        for node in inner.graph.nodes:
            node.meta = {}
    propagate_fakes(gm, case.inputs if case.traced is None else case.traced, dynamic)
    for position, node in enumerate(_operator_calls(gm)):
        if position in backward:
            node.meta |= BACKWARD_MARKS
    return Case(gm, case.inputs, case.traced)


def _operator_calls(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function"]


@dataclass(frozen=True)
class _Setting:
    """The metadata that a graph needs for the pass to be wrong on it."""

    dynamic: bool
    marked: bool

    def rebuild(self, case: Case) -> Case:
        return _with_metadata(case, self.dynamic, self.backward(case))

    def backward(self, case: Case) -> list[int]:
        """Return the positions of the calls to mark."""
        return [i for i, node in enumerate(_operator_calls(case.gm)) if self.marked and is_backward(node)]


_SECONDS = 1.5
"""CPU time of the search for a small graph, since the user waits."""
_MIN_ATTEMPTS = 24
"""How many parts of the graph to try even if that takes longer."""


def make_repro(
    item: Pass,
    before: fx.GraphModule,
    after: fx.GraphModule | None,
    inputs: Sequence[Any],
    traced: Sequence[Any] | None,
    suspects: Collection[str],
    fault: str,
    bitwise: bool,
    directory: Path,
    headline: str,
    earlier: Sequence[Pass] = (),
) -> tuple[Path | None, int, str]:
    """Shrink what fails and write the repro file.

    Args:
        item: the pass.
        before: the graph before it (with ``earlier``, before those).
        after: the graph after it, which tells where to look first.
        inputs: inputs on which it is wrong.
        traced: inputs with the sizes that it was traced with, if those differ.
        suspects: names of nodes to blame.
        fault: the kind of fault to show.
        bitwise: whether the pass promises the same bits.
        directory: where to write the file.
        headline: the summary at the top of the file.
        earlier: passes that have to run before ``item``.

    Returns:
        The file (``None`` if there is none), the number of calls in its graph, and why there is none.
    """
    whole = Case(before, list(inputs), None if traced is None else list(traced))

    def rebuilt(case: Case) -> Case | None:
        try:
            return setting.rebuild(case)
        except Exception:  # noqa: BLE001  (sizes that do not fit together are not a smaller case)
            return None

    def fails(case: Case) -> bool:
        if not (earlier or _may_reproduce(item, case.gm, fault)):
            return False
        fresh = rebuilt(case)
        if fresh is None:
            return False
        if earlier:
            try:
                gm = after_passes(earlier, fresh.gm, min(item.graphs))
            except Exception:  # noqa: BLE001  (a graph that they do not take is not a smaller case)
                return False
            fresh = Case(gm, fresh.inputs, fresh.traced)
        if fault in ("structure", "error") and any(m.fault == fault for m in structural_faults(item, fresh)):
            return True
        try:
            return any(m.fault == fault for m in _mismatches_of(item, fresh, bitwise))
        except Unsupported:
            return False

    fails_in_time, case = TimeLimited(_SECONDS, fails, _MIN_ATTEMPTS), None
    # A part of the graph shows as much, sooner.
    for is_whole, dynamic, marked in itertools.product(
        (False, True), (False, True) if traced is None else (True,), (False, True)
    ):
        setting = _Setting(dynamic, marked)
        if not is_whole:
            case = failing_part(whole, after, suspects, fails_in_time)
        elif fails(whole):
            case = failing_part(whole, after, suspects, fails_in_time, whole=True) or whole
        if case is not None:
            break
    else:
        return None, 0, "the fault does not show on the graph alone, without the metadata of its compilation"
    if not setting.dynamic:
        case = smaller_sizes(case, lambda c: c if rebuilt(c) else None, fails_in_time)
    try:
        source, expressions = pass_sources([item, *earlier])
    except CannotEmbed as reason:
        return None, case.size, f"the pass cannot be written to a file: {reason}"
    file = fresh_directory(directory, item.name) / "repro.py"
    marks = setting.backward(case)
    call = "graph, inputs, PASS" + ", dynamic=True" * setting.dynamic + ", bitwise=True" * bitwise
    call += ", traced=traced" * (case.traced is not None)
    call += f", backward={marks}" * bool(marks)
    call += ", after=EARLIER" * bool(earlier) + f", fault={fault!r}"
    source.definitions.append(f"PASS = {expressions[0]}")
    if earlier:
        source.definitions.append(f"EARLIER = [{', '.join(expressions[1:])}]")
    more = [f"    {_random_like(value)[0]}," for value in case.traced or ()]
    write_repro(
        file,
        headline,
        case,
        lambda drawn: fails(Case(case.gm, drawn, case.traced)),
        f"fxpasses.checking.faults.repro.replay({call})",
        source,
        [] if case.traced is None else ["traced = [", *more, "]"],
    )
    if (why := why_not_reproduced(file)) is not None:
        return None, case.size, f"{file} does not show it: {why}"
    return file, case.size, ""


def write_repro(
    file: Path,
    headline: str,
    case: Case,
    fails: Callable[[list[Any]], bool],
    call: str,
    source: PassSource | None = None,
    more: Sequence[str] = (),
) -> None:
    """Write a file that shows a fault on a graph, and exits with 1 as long as the fault is there.

    Args:
        file: the file. Saved data is put next to it.
        headline: the summary at its top.
        case: the graph, and inputs on which it fails.
        fails: whether it fails on other inputs with the same metadata.
        call: what the file runs: a function with its module, called with ``graph``, ``inputs`` and its other
            arguments.
        source: imports and definitions that the graph or the call needs.
        more: lines to put after those that make the inputs.
    """
    source = source or PassSource()
    code, paths = _graph_text(case.gm), [f"sys.path.insert(0, {path!r})" for path in source.paths]
    constants, given = _constant_lines(case.gm, file), _input_lines(case.inputs, fails, file)
    module, _, function = call.partition("(")[0].rpartition(".")
    lines = [
        f'"""{headline}',
        "",
        'Exits with 1 as long as that is so. Written by fxpasses."""',
        "",
        *(["import operator"] if "operator." in code else []),
        *(["import sys"] if paths else []),
        *(["from pathlib import Path"] if "Path(" in "".join([*constants, *given]) else []),
        "",
        "import torch",
        *(["", *paths] if paths else []),
        "",
        *dict.fromkeys(i for i in source.imports if i != "import torch"),
        *(["from fxpasses.checking.faults.repro import higher_order"] if "higher_order(" in code else []),
        f"from {module} import {function}",
        "",
        *source.definitions,
        "",
        "",
        *constants,
        code,
        "",
        *given,
        *more,
        "",
        'if __name__ == "__main__":',
        f"    raise SystemExit({call.removeprefix(f'{module}.')})",
        "",
    ]
    file.write_text("\n".join(lines))


def why_not_reproduced(file: Path) -> str | None:
    """Run a repro file here. Return ``None`` if it ends as it should, else what it did."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), outside_tracing(), torch.random.fork_rng():
            runpy.run_path(str(file), run_name="__main__")
    except SystemExit as end:
        return None if end.code == 1 else output.getvalue().strip()
    except Exception as error:  # noqa: BLE001  (a file that cannot be run shows nothing)
        return describe_error(error)
    return "it ends without a verdict"


BACKWARD_MARKS = {"partitioner_tag": "is_backward", "autograd_backward": True}


def _graph_text(gm: fx.GraphModule, name: str = "graph") -> str:
    """Render the graph as a function of operator calls, preceded by functions for its subgraphs."""
    inner = [_graph_text(graph, f"_{name}") for name, graph in subgraphs(gm).items()]
    code = gm.graph.python_code("self").src
    code = re.sub(r";  (\w+ = )+None", "", code)
    code = re.sub(r"(?m)^( *\w+) : [^=\n]*=", r"\1 =", code)
    code = code.replace("def forward(self, ", f"def {name}(").replace("def forward(self", f"def {name}(")
    for other in subgraphs(gm):
        code = re.sub(rf"\bself\.{other}\b", f"_{other}", code)
    for constant in constants_of(gm):
        code = re.sub(rf"\bself\.{re.escape(constant)}\b", f'CONSTANTS["{name}.{constant}"]', code)
    code = re.sub(r"torch\.ops\.higher_order\.(\w+)\(", r"higher_order(torch.ops.higher_order.\1, ", code)
    code = re.sub(r"\btorch_Tensor_(\w+)\(", r"torch.Tensor.\1(", code)
    code = re.sub(r"\bdevice\(", "torch.device(", code).replace("torch.torch.", "torch.")
    code = re.sub(r"(?<![\w.])(inf|nan)(?!\w)", r"float('\1')", code)
    return "\n".join([*inner, *(line.rstrip() for line in code.strip().splitlines() if line.strip())])


def _constant_lines(gm: fx.GraphModule, file: Path) -> list[str]:
    """Lines that make the ``CONSTANTS`` of :func:`_graph_text`: as numbers, or saved next to the file."""
    held = dict(_constants(gm, "graph"))
    if not held:
        return []
    if sum(value.numel() for value in held.values()) <= _FEW_NUMBERS and all(map(_is_plain, held.values())):
        made = [
            f"    {name!r}: torch.tensor({value.tolist()}, dtype={value.dtype}),"
            for name, value in held.items()
        ]
        return ["CONSTANTS = {", *made, "}", "", ""]
    torch.save({name: value.detach() for name, value in held.items()}, file.with_name("constants.pt"))
    return ['CONSTANTS = torch.load(Path(__file__).with_name("constants.pt"))', "", ""]


_FEW_NUMBERS = 32


def _constants(gm: fx.GraphModule, name: str) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"{name}.{target}", value) for target, value in constants_of(gm).items())
    for inner, graph in subgraphs(gm).items():
        yield from _constants(graph, f"_{inner}")


def _is_plain(value: Tensor) -> bool:
    if value.device.type != "cpu" or value.layout is not torch.strided or value.is_complex():
        return False
    return value.is_contiguous() and value.numel() > 0 and bool(computable(value).isfinite().all())


def _input_lines(inputs: Sequence[Any], fails: Callable[[list[Any]], bool], file: Path) -> list[str]:
    """Return lines that make the inputs: random ones if these fail, too, else saved next to the file."""
    plain = [_random_like(value) for value in inputs]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = [make() for _, make in plain]
    if fails(drawn):
        return ["torch.manual_seed(0)", "inputs = [", *(f"    {text}," for text, _ in plain), "]"]
    torch.save(list(inputs), file.with_name("inputs.pt"))
    return ['inputs = torch.load(Path(__file__).with_name("inputs.pt"))']


def _random_like(value: Any) -> tuple[str, Callable[[], Any]]:
    """Return an expression for a random value like this one, and its evaluation."""
    if not isinstance(value, Tensor):
        return repr(value), lambda: value
    shape, dtype, device = tuple(value.shape), value.dtype, value.device
    strided = "" if value.is_contiguous() else f".as_strided({shape}, {value.stride()})"
    if strided:  # one number per memory location: elements may share them (an expanded tensor)
        shape = (1 + sum((size - 1) * stride for size, stride in zip(shape, value.stride(), strict=True)),)
    if dtype is torch.bool:
        text = f"torch.rand({shape}) < 0.5"
    elif dtype.is_floating_point or dtype.is_complex:
        text = f"torch.randn({shape}, dtype={dtype})"
        if dtype.itemsize == 1:
            text = f"torch.randn({shape}).to({dtype})"
    else:
        numbers = computable(value)
        low, high = (int(numbers.min()), int(numbers.max())) if value.numel() else (0, 0)
        text = f"torch.randint({low}, {high + 1}, {shape}, dtype={dtype})"
    if strided:
        text = f"({text}){strided}"
    if device.type != "cpu":
        text = f"({text}).to({str(device)!r})"
    return text, lambda: eval(text, {"torch": torch})


def fresh_directory(root: Path, name: str) -> Path:
    name = re.sub(r"\W+", "_", name)
    for number in itertools.count():
        directory = root / (f"{name}_{number}" if number else name)
        try:
            directory.mkdir(parents=True)
            return directory
        except FileExistsError:
            continue
    raise AssertionError("itertools.count() ended")
