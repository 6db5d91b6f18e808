"""How one compiler runs one captured graph: with a few forms of each segment, first static, then dynamic.

Numbers that the forward multiplied by are constants in a static form. If they change while sizes do not, one
more form is compiled that takes them as inputs.
"""

import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from compiled_autograd import _torch
from compiled_autograd.config import config
from compiled_autograd.program.lower import Lowered, lower, reason_not_to_lower
from compiled_autograd.program.segments import FunctionalSegment, build_driver, merge_inputs, split_segments
from compiled_autograd.program.shapes import ShapePattern, dynamic_module
from compiled_autograd.runtime.executing import executable, graph_module
from compiled_autograd.session.compilers import Compiler
from compiled_autograd.session.log import log_compile
from compiled_autograd.session.session import sessions
from fake.error_text import error_text
from fake.seam.dynamo import DynamoError
from fake.tracing.compiling import compiling, one_at_a_time

Run = Callable[..., Sequence[Any]]

_MOST_STATIC = 2
"""Limit on static forms, each for one pattern of sizes: the first, and one if more than sizes differs."""
_MOST_FORMS = 8
"""Limit on all forms, like Dynamo's. Each dynamic form makes symbolic all sizes seen to change so far."""


def build_program(module: fx.GraphModule, compiler: Compiler, dynamic: bool) -> Run:
    """Return a function of the captured graph's five arguments that runs it with ``compiler``.

    Args:
        module: the captured graph.
        compiler: the user's compiler.
        dynamic: whether sizes that change become symbolic.
    """
    whole = compiler.whole(module)
    if whole is module:
        return executable(module)
    compile_part = compiler.part(whole, dynamic) if config.lower else None
    if compile_part is None:
        return whole if whole is not None else executable(module)
    segments = split_segments(module)
    forms: set[str] = set() if compiler.is_backend else {"static"}  # the whole graph is already counted
    callables = [
        None if part is None else _Segment(part, compiler, compile_part, forms) for part, _ in segments
    ]
    return executable(build_driver(module, segments, callables))


class _Segment:
    """One segment at run time. It is pure, so a compiler that fails costs only time."""

    __module__ = "compiled_autograd.program"

    def __init__(
        self,
        part: FunctionalSegment,
        compiler: Compiler,
        compile_part: Callable[[fx.GraphModule], Callable[..., Any]],
        forms: set[str],
    ) -> None:
        self.__name__ = part.module._get_name()
        self.part = part
        self.compiler = compiler
        self.compile_part = compile_part
        self.statics: list[_Static] = []
        self.lifted: _Static | None = None
        self.dynamics: list[_Dynamic] = []
        self.give_up_reason: str | None = None
        self.communicates = False
        """Whether it communicates. A failed run then cannot be retried: other processes would not."""
        self._forms = forms
        self._merged: dict[tuple[int, ...], _Segment] = {}

    def count(self, form: str) -> None:
        """Count the compilation of the graph in this form. All its segments count as one."""
        if form not in self._forms:
            self._forms.add(form)
            sessions.records.count("compiles")

    def __call__(
        self, values: list[Any], rest: Sequence[Any], sizes: Sequence[int], scalars: Sequence[Any]
    ) -> Any:
        """Run the form that matches this call. If there is none, make one, or run uncompiled."""
        values.extend(rest)
        if len(set(map(id, values))) != len(values) and (positions := _first_positions(values)) is not None:
            kept = [values[position] for index, position in enumerate(positions) if position == index]
            values.clear()
            return self._merged_segment(positions)(kept, (), sizes, scalars)
        form = self._matching_form(values, sizes, scalars)
        if form is None and self.give_up_reason is None and self._may_compile(values, sizes, scalars):
            with one_at_a_time:
                form = self._matching_form(
                    values, sizes, scalars
                )  # another thread may have compiled it in between
                if form is None and self.give_up_reason is None and self._may_compile(values, sizes, scalars):
                    return self._new_form(values, sizes, scalars)
        if form is not None:
            if form.has_not_run:
                return self._first_run(form, values, sizes, scalars)
            return form.run(values, sizes)
        forms = len(self.statics) + len(self.dynamics)
        sessions.records.ran_uncompiled(self.give_up_reason or f"it has been compiled {forms} times")
        return self.part.run(values, sizes, scalars)

    def _first_run(
        self, form: "_Static | _Dynamic", values: list[Any], sizes: Sequence[int], scalars: Sequence[Any]
    ) -> Sequence[Any]:
        """Run a form for the first time that could not run when it was made: Dynamo compiles it now."""
        kept = list(values)
        try:
            results = form.run(values, sizes)
        except Exception as error:
            if self.communicates and not isinstance(error, DynamoError):
                raise
            self.statics = [static for static in self.statics if static is not form]
            self.lifted = None if self.lifted is form else self.lifted
            self._give_up(f"its compiler raised {type(error).__name__}: {_first_line(error)}")
            return self.part.run(kept, sizes, scalars)
        form.has_not_run = False
        return results

    def _merged_segment(self, positions: tuple[int, ...]) -> "_Segment":
        """Return the segment for calls that pass one tensor as several inputs.

        A form compiled for distinct inputs computes something else for them, or vice versa, and Dynamo's
        guards reject it.
        """
        merged = self._merged.get(positions)
        if merged is None:
            part = merge_inputs(self.part, positions)
            forms = set() if self.statics else self._forms
            merged = self._merged[positions] = _Segment(part, self.compiler, self.compile_part, forms)
        return merged

    def _matching_form(
        self, values: list[Any], sizes: Sequence[int], scalars: Sequence[Any]
    ) -> "_Static | _Dynamic | None":
        """Return a compiled form that matches this call, if any."""
        for static in self.statics:
            if static.matches(values, sizes, scalars):
                return static
        if self.lifted is not None and self.lifted.matches(values, sizes, scalars):
            return self.lifted
        # The last form is the most general.
        return next((form for form in reversed(self.dynamics) if form.matches(values, sizes, scalars)), None)

    def _may_compile(self, values: list[Any], sizes: Sequence[int], scalars: Sequence[Any]) -> bool:
        if len(self.statics) < _MOST_STATIC or self._changed_numbers(values, sizes, scalars):
            return True
        forms = len(self.statics) + len(self.dynamics)
        return forms < _MOST_FORMS and self._pattern(values, sizes, scalars) is not None

    def _pattern(
        self, values: list[Any], sizes: Sequence[int], scalars: Sequence[Any]
    ) -> ShapePattern | None:
        """Return this call's pattern with those of a dynamic form (latest first), or else of a static one."""
        call = ShapePattern.observe(values, sizes, scalars)
        before = [form.pattern.calls for form in reversed(self.dynamics)]
        before += [(form.example,) for form in reversed(self.statics)]
        patterns = (ShapePattern.of((*calls, call)) for calls in before)
        return next((pattern for pattern in patterns if pattern is not None), None)

    def _changed_numbers(
        self, values: list[Any], sizes: Sequence[int], scalars: Sequence[Any]
    ) -> Sequence[int]:
        """Return the constants of a static form that fits except for them; empty if they are inputs."""
        if self.lifted is not None:
            return ()
        matching = (
            static for static in self.statics if static.matches_except_numbers(values, sizes, scalars)
        )
        return next((static.lowered.baked for static in matching), ())

    def _new_form(self, values: list[Any], sizes: Sequence[int], scalars: Sequence[Any]) -> Any:
        problem = reason_not_to_lower(values)
        if problem is not None:
            # Do not give up: the next call may have plain tensors.
            sessions.records.ran_uncompiled(problem)
            log_compile(self.part.title, f"runs uncompiled: {problem}")
            return self.part.run(values, sizes, scalars)
        baked = self._changed_numbers(values, sizes, scalars)
        if baked:
            return self._compile_static(values, sizes, scalars, lifted=baked)
        pattern = self._pattern(values, sizes, scalars)
        if pattern is not None:
            return self._compile_dynamic(pattern, values, sizes, scalars)
        return self._compile_static(values, sizes, scalars)

    def _give_up(self, reason: str) -> None:
        self.give_up_reason = reason
        sessions.records.ran_uncompiled(reason)
        log_compile(self.part.title, f"runs uncompiled: {reason}")

    def _compile_static(
        self, values: list[Any], sizes: Sequence[int], scalars: Sequence[Any], lifted: Sequence[int] = ()
    ) -> Any:
        """Record the segment on these values and compile the recording for them. Return the results."""
        started = time.perf_counter()
        kept = list(values)
        lowered = lower(self.part, values, sizes, scalars, lifted)
        sessions.records.add_seconds("lower", time.perf_counter() - started)
        self.communicates = self.communicates or lowered.communicates

        def eager() -> Any:
            return self.part.run(list(kept), sizes, scalars) if lowered.communicates else lowered.results

        if lowered.problem is not None:
            self._give_up(lowered.problem)
            return eager()
        static = _Static(lowered, kept, sizes, scalars)
        if not lowered.is_empty:
            started = time.perf_counter()
            try:
                static.compile(self, kept)
            except Exception as error:  # noqa: BLE001 - a compiler may raise anything; the result is at hand
                self._give_up(f"its compiler raised {type(error).__name__}: {_first_line(error)}")
                return eager()
            finally:
                sessions.records.add_seconds("compile", time.perf_counter() - started)
        if lifted:
            self.lifted = static
        else:
            self.statics.append(static)
        if lowered.communicates:
            lowered.results = ()
            return self._first_run(static, list(kept), sizes, scalars)
        results, lowered.results = lowered.results, ()
        return results

    def _compile_dynamic(
        self, pattern: ShapePattern, values: list[Any], sizes: Sequence[int], scalars: Sequence[Any]
    ) -> Any:
        kept = list(values)
        started = time.perf_counter()
        try:
            dynamic = _Dynamic(self, pattern)
            results = dynamic.run(values, sizes, first=True)
        except Exception as error:
            if self.communicates and not isinstance(error, DynamoError):
                raise
            self._give_up(
                f"its compiler raised {type(error).__name__} for symbolic sizes: {_first_line(error)}"
            )
            return self.part.run(kept, sizes, scalars)
        finally:
            sessions.records.add_seconds("compile", time.perf_counter() - started)
        self.dynamics.append(dynamic)
        self.count(f"dynamic {len(self.dynamics)}")
        return results


def _first_positions(values: Sequence[Any]) -> tuple[int, ...] | None:
    """Return, per value, the position of its first occurrence, or None if all tensors are distinct."""
    seen: dict[int, int] = {}
    positions = tuple(
        index if value is None else seen.setdefault(id(value), index) for index, value in enumerate(values)
    )
    return None if positions == tuple(range(len(values))) else positions


def _first_line(error: Exception) -> str:
    """Return the first line, and the next after a colon: Dynamo names the backend, then quotes it."""
    lines = error_text(error).strip().splitlines() or ["no message"]
    return " ".join(lines[: 1 + lines[0].endswith(":")])


class _Static:
    """A segment recorded to ATen, for one pattern of sizes."""

    def __init__(
        self, lowered: Lowered, values: Sequence[Any], sizes: Sequence[int], scalars: Sequence[Any]
    ) -> None:
        self.lowered = lowered
        self.sizes = tuple(sizes)
        self.scalars = tuple(scalars)
        self.example = ShapePattern.observe(values, sizes, scalars)
        self.missing = tuple(index for index, value in enumerate(values) if value is None)
        present = [value for value in values if value is not None]
        self.guards = _torch.tensor_guards(present) if present else None
        self.numbers = tuple((index, values[index].item()) for index in lowered.baked)
        self.used = lowered.used_inputs
        self.outputs = lowered.outputs
        self.compiled: Callable[[list[Any]], Sequence[Any]] | None = None
        self.has_not_run = False
        """Whether it has yet to run."""
        self.outputs_are_computed = lowered.outputs == [
            ("computed", index) for index in range(len(lowered.outputs))
        ]

    def matches(self, values: list[Any], sizes: Sequence[int], scalars: Sequence[Any]) -> bool:
        """Whether a call may use this form: sizes, scalars and numbers are equal, and inputs pass its guards.

        Args:
            values: a tensor or None for each input of the segment.
            sizes: the graph's sizes.
            scalars: the graph's scalars.
        """
        return self.matches_except_numbers(values, sizes, scalars) and all(
            _same_number(values[index].item(), number) for index, number in self.numbers
        )

    def matches_except_numbers(self, values: list[Any], sizes: Sequence[int], scalars: Sequence[Any]) -> bool:
        """Whether everything except the numbers matches.

        Args:
            values: a tensor or None for each input of the segment.
            sizes: the graph's sizes.
            scalars: the graph's scalars.
        """
        if tuple(sizes) != self.sizes or tuple(scalars) != self.scalars:
            return False
        if self.missing:
            if any(values[index] is not None for index in self.missing):
                return False
            present = [value for value in values if value is not None]
        else:
            present = values
            if any(value is None for value in values):
                return False
        return self.guards is None or self.guards.check(*present)

    def compile(self, segment: _Segment, values: list[Any]) -> None:
        """Compile and run once, so that compilation is complete and the result can be checked."""
        example = [values[index] for index in self.used]
        backend = segment.compiler.backend()
        if backend is not None:
            flat = graph_module(self.lowered.root, self.lowered.graph, segment.__name__)
            with torch.no_grad(), compiling():
                compiled = backend(flat, example)
            self.compiled = lambda args: compiled(*args)
        else:
            self.compiled = _without_dynamic_marks(
                segment.compile_part(_list_module(self.lowered, segment.__name__))
            )
        segment.count("dynamic 1" if segment.statics else "static")
        log_compile(segment.part.title, "compiled for one pattern of sizes")
        if self.lowered.communicates:
            return
        if self.lowered.random:
            self.has_not_run = True
            return
        expected = [
            result for result, output in zip(self.lowered.results, self.outputs, strict=True) if output
        ]
        found = self.run(list(values))
        for result, other in zip(expected, [value for value in found if value is not None], strict=True):
            if result.shape != other.shape or result.dtype != other.dtype:
                raise RuntimeError(
                    f"compiled gradient is {tuple(other.shape)} {other.dtype}, "
                    f"eager's is {tuple(result.shape)} {result.dtype}"
                )

    def run(self, values: list[Any], sizes: Sequence[int] = ()) -> Sequence[Any]:
        passed_through = {
            output[1]: values[output[1]] for output in self.outputs if output and output[0] == "input"
        }
        arguments = values
        if len(self.used) != len(values):
            arguments = [values[index] for index in self.used]
            values.clear()
        computed = self.compiled(arguments) if self.compiled is not None else ()
        if self.outputs_are_computed:
            return computed
        return tuple(
            None
            if output is None
            else computed[output[1]]
            if output[0] == "computed"
            else passed_through[output[1]]
            for output in self.outputs
        )


def _without_dynamic_marks(compiled: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """Drop the user's dynamic marks from tensors given to ``compiled``: we choose the symbolic sizes."""

    def call(values: list[Any], *rest: Any) -> Sequence[Any]:
        for index, value in enumerate(values):
            if _torch.is_marked(value):
                values[index] = value.detach()
        value = None
        return compiled(values, *rest)

    return call


def _same_number(left: Any, right: Any) -> bool:
    """Whether two numbers give the same results: NaN equals itself, and 0.0 differs from -0.0."""
    if left != left:
        return bool(right != right)
    return left == right and (left != 0 or repr(left) == repr(right))


def _list_module(lowered: Lowered, name: str) -> fx.GraphModule:
    """Return the flat graph with one argument, a list whose elements Dynamo may free."""
    graph = fx.Graph()
    inputs = graph.placeholder("inputs")
    placeholders = [node for node in lowered.graph.nodes if node.op == "placeholder"]
    env = {
        node: graph.create_node("call_function", operator.getitem, (inputs, index), name=node.name)
        for index, node in enumerate(placeholders)
    }
    graph.output(graph.graph_copy(lowered.graph, env))
    module = graph_module(lowered.root, graph, name)
    _torch.steal_list(module, "inputs")
    return module


class _Dynamic:
    """A segment whose symbolic sizes are exactly those seen to change."""

    has_not_run = False

    def __init__(self, segment: _Segment, pattern: ShapePattern) -> None:
        self.pattern, self.matches = pattern, pattern.matches
        module, self.carried_sizes = dynamic_module(segment.part.module, pattern)
        _torch.steal_list(module, "values")
        self.compiled = _without_dynamic_marks(segment.compile_part(module))
        log_compile(segment.part.title, "compiled for symbolic sizes")

    def run(self, values: list[Any], sizes: Sequence[int], first: bool = False) -> Sequence[Any]:
        """Run the compiled segment.

        Args:
            values: a tensor or None for each input of the segment; cleared.
            sizes: the graph's sizes.
            first: whether this call compiles it. Varying dimensions are then marked as dynamic.
        """
        carriers: list[torch.Tensor] = []
        if self.carried_sizes:  # on the same device as the rest, so that CUDA graphs can hold them
            device = next((value.device for value in values if value is not None), None)
            carriers = [torch.empty(0, sizes[index], device=device) for index in self.carried_sizes]
        if first:
            for position in {position for position, _ in self.pattern.dynamic_dims}:
                values[position] = values[position].detach()  # do not mark the user's own tensors
            for position, dim in self.pattern.dynamic_dims:
                _torch.mark_dynamic(values[position], dim)
            for carrier in carriers:
                _torch.mark_dynamic(carrier, 1)
        return self.compiled(values, carriers)
