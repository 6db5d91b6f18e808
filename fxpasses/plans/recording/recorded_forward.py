"""Whether a call with gradients on can have a plan without a backward pass.

See :mod:`fxpasses.plans.running.forward_alone`.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpasses.graphs.aliasing import is_mutating, uses_rng
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.recording.recorded_inputs import RecordedInputs
from fxpasses.plans.recording.recorded_trace import RecordedTrace
from fxpasses.plans.running.forward_alone import DeferredWriter, defer_write, write_deferred_plans
from fxpasses.plans.walks.results import Layout

_REASON = "a call with gradients on, and no backward pass"
_MAX_RUNS = 3
"""After this many further calls, later ones get a plan without a backward pass, in this process too."""


class RecordedForward:
    """The facts about a forward graph.

    Args:
        given: the arguments of the call.
        tensors: those among them.
        objects: likewise.
    """

    def __init__(self, given: Any, tensors: Sequence[torch.Tensor], objects: Sequence[Any]) -> None:
        self._runs, self._may_differ_again = 0, False
        self._directory: Path | None = None
        self._refused = ""
        numbers = {id(value): ["argument", i] for i, value in enumerate((*tensors, *objects))}
        try:
            self._given = Layout(given, numbers, numbers).content
        except NoPlan as error:
            self._refused = error.reason

    def count_run_alone(self) -> bool:
        """Count another run without a backward pass. Returns whether to assume now that none comes."""
        self._runs += 1
        return self._runs == _MAX_RUNS

    def defer_write(self, recording: DeferredWriter, directory: Path) -> None:
        """Have a plan written at process exit if no backward pass comes.

        Args:
            recording: writes it.
            directory: of plans. Created now; if it is gone at exit, it is not created again.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            return
        self._directory = directory
        _write_at_exit()
        defer_write(recording)

    def note_graph(self, gm: fx.GraphModule) -> None:
        """Note whether a second run of the graph may differ: it draws random numbers or mutates tensors."""
        graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
        self._may_differ_again = any(uses_rng(n) or is_mutating(n) for graph in graphs for n in graph.nodes)

    def note_trace(self, graph: fx.Graph) -> None:
        """Note whether part of Dynamo's graph cannot be differentiated by itself."""
        modules = graph.owning_module.modules() if graph.owning_module is not None else ()
        graphs = [module.graph for module in modules if isinstance(module, fx.GraphModule)]
        if any(node.kwargs.get("use_reentrant") for graph in graphs for node in graph.nodes):
            self._refused = "checkpoint(use_reentrant=True), which only .backward() can differentiate"

    def note_inputs(self, inputs: Sequence[Any], sources: Sequence[Sequence[Any]]) -> None:
        """Note whether autograd can save the inputs of the graph and tell their gradients apart.

        Args:
            inputs: of the graph.
            sources: where each comes from.
        """
        for value, source in zip(inputs, sources, strict=True):
            if isinstance(value, torch.Tensor) and value.is_inference():
                self._refused = "an inference tensor"
            elif isinstance(value, torch.Tensor) and source[0] != "argument" and not value.is_leaf:
                self._refused = "a tensor of the model that is computed from others"

    def check_repeatable(
        self,
        content: Mapping[str, Any],
        facts: Mapping[str, Any],
        trace: RecordedTrace,
        inputs: RecordedInputs,
    ) -> dict[str, Any]:
        """Check that the call is repeatable and that its results are graph outputs with memory of their own.

        Args:
            content: of the plan.
            facts: of the compilation.
            trace: of the call.
            inputs: of the graph.

        Returns:
            What the plan says besides.

        Raises:
            NoPlan: the check fails.
        """
        if self._directory is None or not self._directory.is_dir():
            raise NoPlan(_REASON, "the directory is gone")
        if self._refused:
            raise NoPlan(_REASON, self._refused)
        if self._may_differ_again or trace.operators or inputs.open:
            raise NoPlan(_REASON, "a second call may give other values")
        for name in ("updated", "aliases", "changed", "changed_for_autograd", "sharded", "results"):
            if facts[name]:
                raise NoPlan(_REASON, f"the graph has {name}")
        if "frame" in content:
            raise NoPlan(_REASON, "more than a graph")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise NoPlan(_REASON, "one of many processes")
        return {"given": self._given}


@functools.cache
def _write_at_exit() -> None:
    atexit.register(write_deferred_plans)
