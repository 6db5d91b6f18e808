"""A whole model, stage by stage: eager, the captured graphs, each pass, the partition, repeated regions, the compiled program."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fxpasses import _torch
from fxpasses.checking.blame import first_difference
from fxpasses.checking.calls import Rewrite
from fxpasses.checking.interpret import RoundedMode
from fxpasses.checking.lowered import LoweringCheck
from fxpasses.checking.region_calls import RegionCalls
from fxpasses.checking.staged import Stage, in_eager_with_repro
from fxpasses.checking.tolerance import deviation
from fxpasses.checking.values import Reference, compare, largest_error, value_names
from fxpasses.checking.watch import ValueCheck
from fxpasses.compiling.inductor import EagerCompiler, InductorCompiler, UnpartitionedCompiler
from fxpasses.compiling.options import Options
from fxpasses.compiling.pipeline import Compiler, Pipeline
from fxpasses.regional import kept_by, runs_directly, with_regions

__all__ = ["ModelCheck", "StageCheck", "check"]

_SAMPLES = 4


@dataclass(frozen=True)
class StageCheck:
    """One line of the table.

    Attributes:
        stage: ``"eager"``, ``"capture"``, ``"pass NAME (joint)"``, ``"partition"``, ``"regions"``, or the compiler's name.
        max_error: the largest distance of any result from float64.
        ulps: the largest distance in units in the last place of the result's type, among elements that matter (not
            smaller than a thousandth of their tensor's largest).
        module: path of the first module whose values differ, "" when none does.
        problems: what is wrong; empty when the stage is right.
    """

    stage: str
    max_error: float
    ulps: float
    module: str
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


@dataclass(frozen=True)
class ModelCheck:
    """The stages of a model, in order. Prints as a table; true when all is right.

    Attributes:
        stages: one entry a stage.
        notes: what could not be compared, and why.
    """

    stages: tuple[StageCheck, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every stage is right."""
        return all(stage.ok for stage in self.stages)

    def __bool__(self) -> bool:
        return self.ok

    def __rich__(self) -> Table:
        table = Table(title="compiled against eager", title_justify="left")
        for name in ("stage", "max error", "ulp", "first difference", "verdict"):
            table.add_column(
                name, justify="right" if name in ("max error", "ulp") else "left", overflow="fold"
            )
        for stage in self.stages:
            verdict = "ok" if stage.ok else "WRONG"
            table.add_row(stage.stage, f"{stage.max_error:.2g}", f"{stage.ulps:.3g}", stage.module, verdict)
        return table

    @property
    def details(self) -> list[str]:
        """What is wrong at each stage, in words, and the notes: what is printed under the table."""
        wrong = [f"{stage.stage}: {problem}" for stage in self.stages for problem in stage.problems[:3]]
        return [*wrong, *self.notes]

    def __str__(self) -> str:
        console = Console(width=100, force_terminal=False)
        with console.capture() as captured:
            console.print(self, *self.details, sep="\n")
        return captured.get()


def check(
    model: nn.Module | Callable[..., Any],
    inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    backward: bool = True,
    show: bool = True,
) -> ModelCheck:
    """Compare a model in eager, after each stage of the compilation, and compiled: results and gradients.

    The model itself is left alone: copies run. Its results, the gradients of parameters and inputs, and its buffers are
    compared; the loss is a fixed weighted sum of the outputs.

    Args:
        model: a module, or a function of tensors.
        inputs: its positional arguments: a tuple or list, or a single value.
        kwargs: its keyword arguments.
        options: as for ``torch.compile(backend="fxpasses")``.
        dynamic: as for ``torch.compile``.
        backward: whether gradients are compared.
        show: whether the table is printed.

    Raises:
        OptionsError: for a wrong option.
        StageError: when a stage fails.

    >>> import torch, fxpasses
    >>> fxpasses.check(torch.nn.Linear(3, 2), torch.ones(4, 3), options={"compiler": "eager"}, show=False).ok
    True
    """
    given = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    parsed = Options.parse({"report": None, **(options or {})})
    run = _Runs(model, given, dict(kwargs or {}), dynamic, backward)
    with tempfile.TemporaryDirectory() as scratch:
        result = run.stages(parsed, Path(scratch))
    if show:
        Console().print(result, *result.details, sep="\n")
    return result


class _Runs:
    """The same step of a model, run in different ways."""

    def __init__(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool | None, backward: bool
    ) -> None:
        self._model, self._args, self._kwargs = model, args, kwargs
        self._dynamic, self._backward = dynamic, backward

    def stages(self, options: Options, scratch: Path) -> ModelCheck:
        """Run every stage."""
        notes: list[str] = []
        try:
            eager = self._step(lambda f: f)
        except Exception as error:
            error.add_note("fxpasses.check: this is the model itself, in eager; nothing was compiled yet")
            raise
        exact = self._exact(notes)
        samples = [self._step(lambda f: f, RoundedMode(seed)) for seed in range(_SAMPLES)]
        stages = [_stage("eager", eager, exact, [], eager)]
        random = self._draws_random()
        if random:
            notes.append(
                "the model draws random numbers: compiled graphs draw them in another way than eager, so that only graphs are compared with graphs"
            )

        def whole(name: str, compile: Callable[[Any], Any], regions: RegionCalls | None = None) -> None:
            got = self._step(compile)
            if not random and (regions is None or regions.found):
                stage = _stage(name, eager, exact, samples, got)
                if regions is not None and any(p.startswith("output") for p in stage.problems):
                    stage = dataclasses.replace(stage, module=regions.first_wrong_module())
                stages.append(stage)

        quiet = dataclasses.replace(options, check="off", report=None)
        whole("capture", self._compiled(dataclasses.replace(quiet, passes=()), _unpartitioned))
        if not stages[-1].ok:
            self._stage_repro("capture", options, notes)
        collector = _Collector(scratch)
        self._step(self._compiled(dataclasses.replace(quiet, compiler="eager"), _eager, collector))
        stages += collector.stages()
        notes += collector.notes
        if any(stage.stage == "partition" and not stage.ok for stage in stages):
            self._stage_repro("partition", options, notes)
        whole("passes and partition", self._compiled(dataclasses.replace(quiet, compiler="eager"), _eager))
        regions = RegionCalls()
        whole("regions", self._compiled(dataclasses.replace(quiet, compiler="eager"), _eager, regions=regions), regions)  # fmt: skip
        if options.compiler == "inductor":
            whole("inductor", self._compiled(quiet, InductorCompiler))
            wrong = not random and not stages[-1].ok
            regions = RegionCalls()
            whole("inductor with regions", self._compiled(quiet, InductorCompiler, regions=regions), regions)
            if not wrong and not stages[-1].ok:
                notes.append("only repeated layers that are compiled once are wrong: options={'regions': 'off'} does without them")  # fmt: skip
            lowered = LoweringCheck(options.repro_directory())
            if wrong:
                with _torch.inductor_config.patch(force_disable_caches=True):
                    self._step(self._compiled(quiet, InductorCompiler, lowered=lowered))
            elif not stages[-1].ok:
                for graph in regions.graphs.found:
                    lowered.look_alone(graph)
            if lowered.repro:
                notes.append(f"`python {lowered.repro}` shows what Inductor does on {lowered.calls} calls")
        return ModelCheck(tuple(stages), tuple(notes))

    def _compiled(
        self,
        options: Options,
        compiler: Callable[..., Compiler],
        values: ValueCheck | None = None,
        lowered: LoweringCheck | None = None,
        regions: RegionCalls | None = None,
    ) -> Callable[[Any], Any]:
        def backend(gm: Any, example_inputs: Sequence[Any]) -> Any:
            whole = gm
            kept: list[Any] = []
            if regions is not None:
                gm, kept = with_regions(gm, options, [regions.graphs])
            made: Any = compiler(options, gm, example_inputs)
            if kept:
                made.runs_directly = runs_directly
            pipeline = Pipeline(options, made, values=values, lowered=lowered)
            compiled = kept_by(pipeline.compile(gm, example_inputs, whole), kept)
            return regions.watch(whole, gm, compiled) if regions is not None and kept else compiled

        return lambda function: torch.compile(function, backend=backend, dynamic=self._dynamic)

    def _stage_repro(self, stage: Stage, options: Options, notes: list[str]) -> None:
        def tell(file: str, calls: int, why: str) -> None:
            if file:
                notes.append(f"`python {file}` shows what the {stage} does on {calls} calls")

        def backend(gm: Any, example_inputs: Sequence[Any]) -> Any:
            return in_eager_with_repro(gm, stage, options.repro_directory(), tell)

        self._step(lambda function: torch.compile(function, backend=backend, dynamic=self._dynamic))

    def _exact(self, notes: list[str]) -> dict[str, Tensor] | None:
        try:
            return self._step(lambda f: f, wide=True)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            notes.append(f"the model does not run in float64 ({error}): errors are distances from eager")
            return None

    def _draws_random(self) -> bool:
        first = self._step(lambda f: f)
        return any(not torch.equal(v, other) for v, other in zip(first.values(), self._step(lambda f: f, seed=1).values(), strict=True) if not v.isnan().any())  # fmt: skip

    def _step(
        self, compile: Callable[[Any], Any], mode: Any = None, wide: bool = False, seed: int = 0
    ) -> dict[str, Tensor]:
        """Outputs, gradients and buffers of one step, by name, in the order in which they are computed."""
        model = copy.deepcopy(self._model)
        if wide and isinstance(model, nn.Module):
            model = model.double()
        args, kwargs = tree_map(lambda v: _fresh(v, wide), (self._args, self._kwargs))

        # A function of its own: Dynamo's cache of the user's code is left alone, and this one's is emptied each time.
        @_torch.with_own_code
        def step(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        try:
            with torch.random.fork_rng(), mode or contextlib.nullcontext():
                torch.manual_seed(seed)
                with torch.enable_grad() if self._backward else torch.no_grad():
                    outputs = [v for v in _leaves(compile(step)(*args, **kwargs)) if isinstance(v, Tensor)]
                    losses = [(v * _weights(v)).sum() for v in outputs if v.requires_grad]
                    if losses:
                        torch.stack([loss.double() for loss in losses]).sum().backward()
        finally:
            _torch.reset_code(step)
        found = {f"output {i}": v for i, v in enumerate(outputs)}
        inputs = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        found |= {f"input {i}": v for i, v in enumerate(inputs)}
        if isinstance(model, nn.Module):
            found |= {
                f"gradient of {n}": p.grad
                for n, p in reversed(list(model.named_parameters()))
                if p.grad is not None
            }
            found |= {f"buffer {n}": b for n, b in model.named_buffers()}
        found |= {f"gradient of input {i}": v.grad for i, v in enumerate(inputs) if v.grad is not None}
        return {name: value.detach().clone() for name, value in found.items()}


def _unpartitioned(options: Options, gm: Any, inputs: Any) -> Compiler:
    return UnpartitionedCompiler(options, decompose=True)


def _eager(options: Options, gm: Any, inputs: Any) -> Compiler:
    return EagerCompiler(options, decompose=True)


def _leaves(value: Any) -> Iterator[Any]:
    """The tensors in a result, in dataclasses such as transformers' outputs, too."""
    for leaf in tree_leaves(value):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tree_leaves([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])
        else:
            yield leaf


def _fresh(value: Any, wide: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().clone()
    if wide and copied.is_floating_point():
        copied = copied.double()
    return copied.requires_grad_(value.requires_grad)


def _weights(value: Tensor) -> Tensor:
    # A plain sum would not see values that are exchanged for each other.
    weights = torch.linspace(-1.0, 1.3, value.numel(), dtype=torch.float64, device=value.device)
    return weights.reshape(value.shape).to(value.dtype)


def _stage(
    name: str,
    eager: Mapping[str, Tensor],
    exact: Mapping[str, Tensor] | None,
    samples: Sequence[Mapping[str, Tensor]],
    got: Mapping[str, Tensor],
) -> StageCheck:
    problems: list[str] = []
    module, largest, most = "", 0.0, 0.0
    for key, usual in eager.items():
        value = got.get(key)
        if value is None or (value.shape, value.dtype) != (usual.shape, usual.dtype):
            problems.append(f"{key} is missing or of another type")
            continue
        center = (exact or eager)[key]
        error, ulps = largest_error(center, value)
        largest, most = max(largest, error), max(most, ulps)
        how = (
            deviation(usual, center if exact else None, [s[key] for s in samples], value)
            if got is not eager
            else None
        )
        if how is not None:
            problems.append(f"{key}: {how}")
            if not module:
                module = key.removeprefix("gradient of ").removeprefix("buffer ").rpartition(".")[0]
    return StageCheck(name, largest, most, module, tuple(problems))


class _Collector(ValueCheck):
    """A value check that writes down what it finds instead of raising."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._found: dict[str, StageCheck] = {}
        self.notes: list[str] = []

    def stages(self) -> list[StageCheck]:
        """One entry a rewrite, the worst of its inputs."""
        return list(self._found.values())

    def examine(
        self, rewrite: Rewrite, inputs: Sequence[Any], where: str, traced: Sequence[Any] | None
    ) -> None:
        name = f"pass {rewrite.item.name} ({rewrite.kind})" if rewrite.item else "partition"
        reference = Reference(rewrite.before, inputs)
        found = compare(reference, rewrite.after, value_names(rewrite.before, rewrite.kind), rewrite.bitwise)
        errors = [(0.0, 0.0)]
        outcome = (
            Reference(rewrite.after, inputs).native if not any(m.fault == "error" for m in found) else None
        )
        # Made-up values may be any number of times as large: their errors say nothing about the model.
        real = outcome.values if outcome is not None and where.startswith("the inputs of this call") else []
        for center, value in zip(reference.exact if real else [], real, strict=False):
            if isinstance(value, Tensor) and isinstance(center, Tensor) and center.shape == value.shape:
                errors.append(largest_error(center, value))
        module = ""
        if found:
            module = first_difference(rewrite.before, rewrite.after, inputs).module
        known = self._found.get(name, StageCheck(name, 0.0, 0.0, "", ()))
        self._found[name] = StageCheck(
            name,
            max(known.max_error, *(e for e, _ in errors)),
            max(known.ulps, *(u for _, u in errors)),
            known.module or module,
            known.problems or tuple(f"{m}, on {where}" for m in found),
        )
