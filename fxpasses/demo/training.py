"""The same training steps for each contestant: eager in float64 and float32, fxpasses, Inductor.

All contestants start each step from the weights that fxpasses trains. A difference is then due to that step
alone, not to an earlier rounding error, which training amplifies.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxpasses._torch import dynamo_counters
from fxpasses.demo.data import batches, standard_library_bytes
from fxpasses.demo.gpt import GPT


@dataclass(frozen=True)
class DemoSettings:
    """The settings of the demo's model and data.

    Attributes:
        steps: training steps, each with its own batch size and length.
        layers: blocks of the model.
        width: the width of the model.
        heads: attention heads.
        context: the longest sequence.
        learning_rate: the learning rate of AdamW.
        seed: the seed of weights and batches.
        report: a directory for the captured graphs, or ``None``.
        device: where to train, such as ``"cpu"`` or ``"cuda"``.
    """

    steps: int = 50
    layers: int = 6
    width: int = 128
    heads: int = 4
    context: int = 128
    learning_rate: float = 1e-3
    seed: int = 0
    report: str | None = None
    device: str = "cpu"


@dataclass
class Run:
    """One contestant: its own model and its measurements.

    Attributes:
        name: the name of the contestant.
        losses: the loss of each step, in nats.
        gradients: for each step, the gradients by parameter name, in float64.
        seconds: time of forward and backward of each step, in seconds.
        sizes: batch and length of each step.
        compiled: for each step, whether it compiled something.
        graphs: number of graphs that Dynamo compiled for it.
        recompiles: those beyond the first.
        repeated: seconds of a repetition of the last step, if every step had compiled something.
    """

    name: str
    model: nn.Module
    call: Callable[[Tensor, Tensor], Tensor]
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    compiled: list[bool] = field(default_factory=list)
    graphs: int = 0
    repeated: float | None = None

    @property
    def recompiles(self) -> int:
        return max(0, self.graphs - 1)

    @property
    def step_seconds(self) -> float:
        """Median time of steps that compiled nothing, without the first three steps if others remain."""
        steady = [s for s, compiled in zip(self.seconds, self.compiled, strict=True) if not compiled]
        if not steady:
            return min(self.seconds) if self.repeated is None else self.repeated
        later = [s for s, compiled in zip(self.seconds[3:], self.compiled[3:], strict=True) if not compiled]
        return statistics.median(later or steady)

    @property
    def compile_seconds(self) -> float:
        """Seconds by which steps that compiled took longer than a usual step."""
        usual = self.step_seconds
        compiling = [s for s, compiled in zip(self.seconds, self.compiled, strict=True) if compiled]
        return sum(max(0.0, s - usual) for s in compiling)

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """Run one training step. Only forward and backward are timed."""
        before = _graph_count()
        loss, seconds = self._forward_and_backward(tokens, targets)
        self.seconds.append(seconds)
        self.compiled.append(_graph_count() > before)
        self.graphs += _graph_count() - before
        self.sizes.append((tokens.shape[0], tokens.shape[1]))
        self.losses.append(loss.item())
        named = self.model.named_parameters()
        self.gradients.append({name: p.grad.double() for name, p in named if p.grad is not None})

    def time_again(self, tokens: Tensor, targets: Tensor) -> None:
        """Repeat the last step to time it if every step compiled something. Discard its results."""
        if all(self.compiled):
            self.repeated = self._forward_and_backward(tokens, targets)[1]
            self.model.zero_grad()

    def _forward_and_backward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        start = time.perf_counter()
        loss = self.call(tokens, targets)
        loss.backward()
        if loss.is_cuda:
            torch.cuda.synchronize()  # kernels are launched asynchronously
        return loss, time.perf_counter() - start

    def follow(self, leader: nn.Module) -> None:
        """Copy the weights of ``leader``."""
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), leader.parameters(), strict=True):
                mine.copy_(theirs)


def train(settings: DemoSettings) -> Iterator[list[Run]]:
    """Run each step with all contestants, on the same batch and weights. Yield the runs after each step."""
    torch.manual_seed(settings.seed)
    model = GPT(settings.layers, settings.width, settings.heads, settings.context).to(settings.device)
    options: dict[str, Any] = {"report": settings.report} if settings.report else {}
    # Compilations are timed, so none may come from a disk cache or include one-time costs of the process.
    with torch.compiler.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        _warm_up(settings.device)
        runs = [
            _run("eager float64", copy.deepcopy(model).double(), lambda m: m),
            _run("eager", copy.deepcopy(model), lambda m: m),
            _run("fxpasses", model, lambda m: _compile(m, backend="fxpasses", options=options)),
            _run("inductor", copy.deepcopy(model), lambda m: _compile(m, backend="inductor")),
        ]
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
        text = standard_library_bytes()
        for number, (tokens, targets) in enumerate(
            batches(text, settings.steps, settings.context, settings.seed), start=1
        ):
            tokens, targets = tokens.to(settings.device), targets.to(settings.device)
            for run in runs:
                run.step(tokens, targets)
            optimizer.step()
            for run in runs:
                run.model.zero_grad()
                run.follow(model)
                if number == settings.steps:
                    run.time_again(tokens, targets)
            yield runs


def _run(name: str, model: nn.Module, make: Callable[[nn.Module], Any]) -> Run:
    return Run(name, model, make(model))


def _compile(model: nn.Module, **how: Any) -> Callable[..., Any]:
    # Each contestant needs its own code object, because Dynamo caches compilations per code object.
    def forward(tokens: Tensor, targets: Tensor) -> Tensor:
        return model(tokens, targets)

    forward.__code__ = forward.__code__.replace()
    return torch.compile(forward, dynamic=True, **how)


def _warm_up(device: str) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x).square().sum()

    torch.compile(f, backend="inductor")(torch.ones(2, 2, 8, 8, device=device, requires_grad=True)).backward()


def _graph_count() -> int:
    return dynamo_counters["stats"]["unique_graphs"]
