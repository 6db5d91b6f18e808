"""Capture of backward passes against torch's compiled autograd and eager: first call, later calls, node cost.

    python -m benchmarks backward_capture [first|steady|inductor|nodes ...] [--repeats N]

Each figure is a ratio measured in one process with alternating turns. It compares medians of the CPU time of
the calling thread, which other processes disturb least. Lower is better.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._dynamo import compiled_autograd as torch_compiled_autograd

import compiled_autograd

Enable = Callable[[], AbstractContextManager[Any]]


def keep(graph: torch.fx.GraphModule) -> Any:
    """An identity compiler."""
    return graph


def mlp(layers: int, hidden: int) -> torch.nn.Sequential:
    """Return ``layers`` pairs of Linear and ReLU."""
    modules: list[torch.nn.Module] = []
    for _ in range(layers):
        modules += [torch.nn.Linear(hidden, hidden), torch.nn.ReLU()]
    return torch.nn.Sequential(*modules)


class Case:
    """A model whose backward pass is timed alone."""

    def __init__(self, layers: int, hidden: int, batch: int) -> None:
        torch.manual_seed(0)
        self.model = mlp(layers, hidden)
        self.parameters = list(self.model.parameters())
        self.batch, self.hidden = batch, hidden

    def backward(self, enable: Enable, batch: int | None = None) -> float:
        """Return the seconds of one backward pass into empty gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        loss = self.model(torch.randn(batch or self.batch, self.hidden)).sum()
        with enable():
            started = time.thread_time()
            loss.backward()
            return time.thread_time() - started


def ours(compiler: Any, dynamic: bool) -> Enable:
    """Enable our capture."""
    return lambda: compiled_autograd.enable(compiler, dynamic=dynamic)


def torchs(compiler: Any, dynamic: bool) -> Enable:
    """Enable torch's compiled autograd."""
    return lambda: torch_compiled_autograd._enable(compiler, dynamic=dynamic)


def reset() -> None:
    """Clear the graphs before the other library's turn, because both keep them in one cache."""
    compiled_autograd.reset()
    torch._dynamo.reset()


def first_call(repeats: int) -> Iterator[str]:
    """Time the first call without the compiler's own time."""
    for dynamic in (False, True):
        case = Case(12, 16, 8)
        case.backward(compiled_autograd.disable)
        times: dict[str, list[float]] = {"ours": [], "torch": []}
        for _ in range(repeats):
            for name, enable in (("ours", ours(keep, dynamic)), ("torch", torchs(keep, dynamic))):
                reset()
                times[name].append(case.backward(enable))
        mine, theirs = statistics.median(times["ours"]), statistics.median(times["torch"])
        yield (
            f"first call, identity compiler, dynamic={dynamic}: {mine * 1e3:.1f} ms, torch {theirs * 1e3:.1f} ms, "
            f"ratio {mine / theirs:.3f} (wanted: at most 0.1)"
        )


def interleaved(case: Case, enables: dict[str, Enable], calls: int) -> dict[str, float]:
    """Return the median seconds of a steady call per contender.

    Contenders alternate in blocks, because both capture libraries share one cache in the process. Each turn
    begins with warm-up calls.
    """
    times: dict[str, list[float]] = {name: [] for name in enables}
    for _ in range(3):
        for name, enable in enables.items():
            compiled_autograd.reset()
            for _ in range(4):
                case.backward(enable)
            times[name] += [case.backward(enable) for _ in range(calls)]
    return {name: statistics.median(values) for name, values in times.items()}


def steady(repeats: int) -> Iterator[str]:
    """Time a steady call with an identity compiler, against eager."""
    for hidden in (16, 256):
        case = Case(12, hidden, 8)
        enables = {
            "eager": compiled_autograd.disable,
            "ours": ours(keep, True),
            "lowered": ours(_flat_backend, True),
            "torch": torchs(keep, True),
        }
        found = interleaved(case, enables, 20 * repeats)
        yield (
            f"steady call, hidden {hidden}: eager {found['eager'] * 1e6:.0f} us; identity "
            f"{found['ours'] / found['eager']:.2f} x eager, lowered to ATen {found['lowered'] / found['eager']:.2f}, "
            f"torch identity {found['torch'] / found['eager']:.2f} (wanted at 256: at most 1.5)"
        )


def _flat_backend(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    return graph.forward


def _torch_inductor(graph: torch.fx.GraphModule) -> Any:
    return torch.compile(graph, backend="inductor", dynamic=True)


def inductor(repeats: int) -> Iterator[str]:
    """Time a steady call with Inductor, static and dynamic."""
    for dynamic in (False, True):
        case = Case(12, 256, 8)

        def static_compiler(graph: torch.fx.GraphModule) -> Any:
            return torch.compile(graph, backend="inductor", dynamic=False)

        compiler = _torch_inductor if dynamic else static_compiler
        contenders = {"torch": torchs(compiler, dynamic), "ours": ours("inductor", dynamic)}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        eager: list[float] = []
        batches = (8, 12, 20) if dynamic else (8,)
        reset()
        for _ in range(4):  # the contenders' turns alternate; each begins with warm-up calls
            for name, enable in contenders.items():
                compiled_autograd.reset()
                for batch in batches * 3:
                    case.backward(enable, batch)
                for _ in range(10 * repeats):
                    for batch in batches:
                        times[name].append(case.backward(enable, batch))
                        eager.append(case.backward(compiled_autograd.disable, batch))
        mine, theirs = statistics.median(times["ours"]), statistics.median(times["torch"])
        yield (
            f"steady call, inductor, dynamic={dynamic}: {mine * 1e6:.0f} us, torch {theirs * 1e6:.0f} us, "
            f"ratio {mine / theirs:.2f} (wanted: at most 1); eager {statistics.median(eager) * 1e6:.0f} us"
        )


def nodes(repeats: int) -> Iterator[str]:
    """Measure the cost per autograd node in small and large graphs."""
    for count in (500, 5000):
        first, later = [], []
        for _ in range(max(1, repeats // 3)):
            compiled_autograd.reset()
            for call in range(8):
                x = torch.randn(4, requires_grad=True)
                y = x
                for _ in range(count):
                    y = y * 1.0001
                with compiled_autograd.enable(keep):
                    started = time.thread_time()
                    y.sum().backward()
                    (later if call else first).append(time.thread_time() - started)
        yield (
            f"{count} nodes: first call {statistics.median(first) / count * 1e6:.0f} us per node, "
            f"later {statistics.median(later) / count * 1e6:.1f} us per node"
        )


_PARTS = {"first": first_call, "steady": steady, "inductor": inductor, "nodes": nodes}


def main(argv: list[str]) -> int:
    """Print the figures named in ``argv``, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks backward_capture", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*_PARTS, []], help="which figures; all by default")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for part in options.parts or _PARTS:
        for line in _PARTS[part](options.repeats):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
