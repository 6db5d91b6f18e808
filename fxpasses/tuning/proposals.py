"""Proposals: the steps that would change a graph at all, ordered by how much a cost model expects of them.

A pass that leaves the captured graph unchanged is never compiled. The others are ranked by predicted time.
Matmuls, convolutions and attention are predicted from a measurement of each alone on this machine. Other
calls take the longer of their arithmetic and their memory traffic. Steps with measured gains on other graphs
come first. The ranking only orders the candidates; it decides nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from fxpasses._torch import functorch_config, inductor_config, outside_tracing
from fxpasses.compiling.observing import Observer
from fxpasses.compiling.options import Options
from fxpasses.graphs.rewriting import copy_graph
from fxpasses.partitioner.cost import CostModel, is_view
from fxpasses.pass_manager.manager import PassManager
from fxpasses.pass_manager.pass_base import Pass
from fxpasses.passes import EliminateDeadCode, default_passes, library
from fxpasses.pipeline.compile_graph import compile_graph
from fxpasses.pipeline.stages import Participants
from fxpasses.tuning.choice import PARTITIONED_KINDS, PLAIN, THE_REST, Choice, Step, runs_after_partition
from fxpasses.tuning.content import family_of
from fxpasses.tuning.freezing import FREEZING, weights_to_freeze
from fxpasses.tuning.kernels import KernelTimes
from fxpasses.tuning.search import Goal

aten = torch.ops.aten

_FLOPS_PER_SECOND, _BYTES_PER_SECOND = 5e10, 1e10
"""Per second, for calls that are not measured. Only the ratio of the two matters."""

_SETTING_RATIO = 1.1
"""The prediction for settings without a cost model.

It ranks them below passes that should change little, as predictions are off by some 5%.
"""

_PARTITION_RATIO = 0.985
"""The prediction for torch's partition. A few models gain a tenth by it, most gain nothing.

Passes that are predicted to gain less come after it.
"""

_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


def default_candidates() -> tuple[Pass, ...]:
    """Return the library's passes that preserve results up to rounding and do not run by default."""
    default_types = {type(item) for item in default_passes()}
    return tuple(
        kind()
        for kind in library().values()
        if kind not in default_types and kind.contract.numerics != "none"
    )


class Proposals:
    """The steps for one graph.

    Args:
        gm: a Dynamo graph.
        inputs: real inputs for it.
        options: the user's options.
        goal: the goal of the search.
        passes: the passes to choose from; ``None`` for :func:`default_candidates`.
        allowed: further passes, whose results may differ from eager.
        regions: whether repeated layers of the graph are compiled once.
        median_ratios: what steps gained on other graphs, by name. These steps come first.
        kernels: times of kernels; ``None`` to measure none.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        options: Options,
        goal: Goal,
        passes: Sequence[Pass] | None,
        allowed: Sequence[Pass],
        regions: bool,
        median_ratios: Mapping[str, float] = MappingProxyType({}),
        kernels: KernelTimes | None = None,
    ) -> None:
        self._kernels = kernels or KernelTimes(0.0)
        self._candidates = (*(default_candidates() if passes is None else passes), *allowed)
        self._allowed, self._median_ratios = allowed, median_ratios
        whole_options = dataclasses.replace(options, compiler="eager", regions="off")
        self._capture_whole = lambda choice: _capture(
            gm, inputs, choice.without_inductor().options(whole_options)
        )
        captured = self._capture_whole(Choice())
        self._graphs = captured.graphs_by_place.get(THE_REST, {})
        self._settings = [
            Step.setting(*pair) for pair in _candidate_settings(self._graphs, inputs, options, goal, regions)
        ]
        may_freeze = (
            options.compiler == "inductor" and "freezing" not in options.inductor and goal != "memory"
        )
        if may_freeze and "joint" not in self._graphs and weights_to_freeze(gm, inputs):
            predicted = _freezing_ratio(self._graphs, self._kernels)
            self._settings.insert(0, dataclasses.replace(FREEZING, predicted=predicted))
        default_names = {item.name for item in default_passes()}
        if regions or any(run.changed and run.name in default_names for run in captured.runs):
            self._settings.append(PLAIN)
        self._steps_by_choice: dict[Choice, list[tuple[Step, int]]] = {}
        self._changes_by_pass = (
            self._find_changes(_capture(gm, inputs, options).graphs_by_place) if regions else {}
        )

    def __call__(self, choice: Choice) -> list[tuple[Step, int]]:
        """Return the steps that would change the program of a choice, the most promising first.

        Each has the number of calls that it changes.
        """
        if choice not in self._steps_by_choice:
            chosen = [step.item for step in choice.steps if step.item is not None]
            # Passes on joint graphs also change the partition. Capture again to see both.
            captured = (
                self._capture_whole(choice.everywhere()).graphs_by_place.get(THE_REST, {})
                if chosen
                else self._graphs
            )
            graphs = {kind: _apply_passes(gm, chosen, kind)[0] for kind, gm in captured.items()}
            pairs = [self._propose(item, graphs) for item in self._candidates if item not in chosen]
            self._steps_by_choice[choice] = sorted(
                (pair for pair in pairs if pair is not None), key=lambda p: p[0].predicted
            )
        has_no_regions = any(step.settings.get("regions") == "off" for step in choice.steps)
        settings = [
            s for s in self._settings if s == PLAIN or not (has_no_regions and "regions" in s.settings)
        ]
        whole = [*self._steps_by_choice[choice], *((step, 0) for step in settings)]
        found = [*sorted(whole, key=lambda pair: _expected_ratio(pair[0])), *self._placement_steps(choice)]
        return sorted(found, key=lambda pair: self._median_ratios.get(pair[0].name, 1.0))

    def _placement_steps(self, choice: Choice) -> list[tuple[Step, int]]:
        """For passes that change several places, return steps that run them in one place more or fewer."""
        found: list[tuple[Step, int]] = []
        if any(step.settings.get("regions") == "off" for step in choice.steps):
            return found
        for item, changed in self._changes_by_pass.items():
            current = [
                place for place in changed if any(s.item == item and s.runs_in(place) for s in choice.steps)
            ]
            for place, (step, calls) in changed.items():
                places = tuple(p for p in changed if (p in current) != (p == place))
                if places:
                    found.append(
                        (Step.of_pass(item, places, predicted=step.predicted, allowed=step.allowed), calls)
                    )
        return found

    def _find_changes(
        self, places: Mapping[str, dict[str, fx.GraphModule]]
    ) -> dict[Pass, dict[str, tuple[Step, int]]]:
        """Return the passes that change several places, and what they change in each."""
        found: dict[Pass, dict[str, tuple[Step, int]]] = {}
        for item in self._candidates:
            steps = {place: self._propose(item, graphs) for place, graphs in places.items()}
            changed = {place: step for place, step in steps.items() if step is not None}
            if len(changed) > 1:
                found[item] = changed
        return found

    def _propose(self, item: Pass, graphs: dict[str, fx.GraphModule]) -> tuple[Step, int] | None:
        late = runs_after_partition(item)
        kinds = [
            kind
            for kind in graphs
            if kind in item.contract.graphs and (late or kind not in PARTITIONED_KINDS)
        ]
        if not kinds:
            return None
        try:
            pairs = [_apply_passes(graphs[kind], (item,), kind) for kind in kinds]
            changed = sum(calls for _, calls in pairs)
            after, before = [gm for gm, _ in pairs], [graphs[kind] for kind in kinds]
            ratio = self._predicted_ratio(after, before) if changed else 1.0
        except Exception:  # noqa: BLE001  (a pass fails or breaks the graph: compiling will tell)
            return self._step(item), 0
        growth = sum(len(gm.graph.nodes) for gm in after) / sum(len(gm.graph.nodes) for gm in before)
        return (self._step(item, ratio, max(growth, 1.0)), changed) if changed else None

    def _predicted_ratio(self, after: Sequence[fx.GraphModule], before: Sequence[fx.GraphModule]) -> float:
        """Return the time of ``after`` over that of ``before``: both with measured kernels, or neither."""
        kernels = self._kernels if all(map(self._kernels.has_all_times, (*before, *after))) else None
        seconds_before = sum(_seconds(gm, kernels) for gm in before)
        return sum(_seconds(gm, kernels) for gm in after) / seconds_before if seconds_before else 1.0

    def _step(self, item: Pass, predicted: float = 1.0, growth: float = 1.0) -> Step:
        return Step.of_pass(item, predicted=predicted, growth=growth, allowed=item in self._allowed)


def _expected_ratio(step: Step) -> float:
    """Return the time with a step over the time without, as predicted before it is measured."""
    if step.item is not None or step == FREEZING:
        return step.predicted
    return _PARTITION_RATIO if step.settings.keys() == {"partition"} else _SETTING_RATIO


class _GraphCollector(Observer):
    """Collects the graphs that passes see, by place: those of regions, and the graph around them."""

    def __init__(
        self, place: str = THE_REST, graphs_by_place: dict[str, dict[str, fx.GraphModule]] | None = None
    ) -> None:
        super().__init__()
        self.graphs_by_place: dict[str, dict[str, fx.GraphModule]] = (
            {} if graphs_by_place is None else graphs_by_place
        )
        self._place = place

    def of_region(self, gm: fx.GraphModule) -> _GraphCollector:
        return _GraphCollector(family_of(gm), self.graphs_by_place)

    def graph(self, kind: str, gm: fx.GraphModule) -> None:
        """Keep a copy. Args: those of :meth:`Observer.graph`."""
        self.graphs_by_place.setdefault(self._place, {})[kind] = copy_graph(gm)


def _capture(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> _GraphCollector:
    captured = _GraphCollector()
    # Bypass the AOTAutograd cache, and lower the backward graph now: its backward pass never runs.
    with functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
        compile_graph(gm, inputs, options, Participants(observers=[captured], counts=False))
    return captured


def _apply_passes(gm: fx.GraphModule, passes: Sequence[Pass], kind: Any) -> tuple[fx.GraphModule, int]:
    """Return the graph after some passes, and how many calls they added, changed or removed."""
    if not passes:
        return gm, 0
    copy = copy_graph(gm)
    with outside_tracing():
        runs = PassManager(passes, structure=False).run(copy, kind)
        PassManager([EliminateDeadCode()], structure=False).run(copy, kind)
    return copy, sum(len(run.added) + len(run.removed) + len(run.modified) for run in runs if run.changed)


def _seconds(gm: fx.GraphModule, kernels: KernelTimes | None) -> float:
    costs = CostModel()
    total = 0.0
    for node in gm.graph.nodes:
        flops = costs.flops_of(node)
        measured = kernels.seconds(node) if flops and kernels is not None else None
        if measured is not None:
            total += measured
        elif flops:
            bytes_moved = costs.bytes_of(node) + sum(costs.bytes_of(n) for n in node.all_input_nodes)
            total += max(flops / _FLOPS_PER_SECOND, bytes_moved / _BYTES_PER_SECOND)
    return total


def _freezing_ratio(graphs: Mapping[str, fx.GraphModule], kernels: KernelTimes) -> float:
    """Return the time with weights laid out for the kernel once, over the time with a layout in each call."""
    costs, weights, total = CostModel(), set(), 0.0
    known = kernels if all(map(kernels.has_all_times, graphs.values())) else None
    for gm in graphs.values():
        total += _seconds(gm, known)
        for node in gm.graph.nodes:
            if node.target in (*_CONVOLUTIONS, *_MATMULS):
                weight = node.args[2 if node.target is aten.addmm.default else 1]
                while weight.op == "call_function" and is_view(weight):
                    weight = weight.args[0]
                if weight.op == "placeholder":
                    weights.add(weight)
    layout_seconds = 2 * sum(map(costs.bytes_of, weights)) / _BYTES_PER_SECOND
    return total / (total + layout_seconds) if total else 1.0


def _candidate_settings(
    graphs: dict[str, fx.GraphModule], inputs: Sequence[Any], options: Options, goal: Goal, regions: bool
) -> list[tuple[str, Any]]:
    """Return options other than passes, each with a value to try."""
    calls = {node.target for gm in graphs.values() for node in gm.graph.nodes}
    cuda = any(isinstance(v, torch.Tensor) and v.is_cuda for v in inputs)
    found: list[tuple[str, Any]] = [("regions", "off")] if regions and goal != "memory" else []
    inductor: list[dict[str, Any]] = []
    if cuda and calls & set(
        _CONVOLUTIONS
    ):  # on the CPU, Inductor already lays out every convolution channels-last
        inductor.append({"force_layout_optimization": True})
    if goal != "memory":
        # Do not try the C++ wrapper alone. On the CPU, plans call kernels directly. On a GPU, a CUDA graph
        # gains more, and a process died while the wrapper was tried. Autotuning comes last, as one candidate
        # compiles for a minute.
        if cuda:
            inductor.append({"triton.cudagraphs": True})
        if cuda and calls & set(_MATMULS):
            inductor += [{"coordinate_descent_tuning": True}, {"max_autotune": True}]
    if options.compiler == "inductor":
        valid = inductor_config.get_config_copy()  # type: ignore[attr-defined]
        found += [
            ("inductor", patch)
            for patch in inductor
            if all(key in valid and key not in options.inductor for key in patch)
        ]
    if "joint" in graphs and options.partition == "fxpasses" and goal != "memory":
        found.append(("partition", "torch"))
    if "joint" in graphs and options.memory_budget is None:
        found += [("memory_budget", budget) for budget in ((0.8,) if goal == "time" else (0.7, 0.4, 0.1))]
    return found
