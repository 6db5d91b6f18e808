"""Cached operators, static and symbolic, and on fake tensors outside of any mode: ours against torch's."""

from __future__ import annotations

import math
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from benchmarks._fake_support import parser, report
from fake import FakeTensorMode

OPERATORS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "add": lambda t: t["x"] + t["y"],
    "mul by a number": lambda t: t["x"] * 2.0,
    "relu": lambda t: t["x"].relu(),
    "mm": lambda t: torch.mm(t["a"], t["b"]),
    "view": lambda t: t["x"].view(-1, 32),
    "transpose": lambda t: t["x"].transpose(0, 1),
    "sum": lambda t: t["x"].sum(1),
    "native_layer_norm": lambda t: torch.native_layer_norm(t["x"], [32], t["w"], t["w"], 1e-5),
    "add_": lambda t: t["y"].add_(t["x"]),
    "linear": lambda t: F.linear(t["x"], t["c"]),
    "cat": lambda t: torch.cat([t["x"], t["y"]]),
    "split": lambda t: t["x"].split(8, 2),
    "empty": lambda t: torch.empty(t["x"].shape[0], 4),
}


def make(mode_class: type, symbolic: bool) -> tuple[Any, dict[str, Any]]:
    """Return a mode and its inputs."""
    mode = mode_class(shape_env=ShapeEnv()) if symbolic else mode_class()
    return mode, inputs(mode, symbolic)


def inputs(mode: Any, symbolic: bool, prefix: str = "") -> dict[str, Any]:
    """Return inputs in a mode. Symbolic are the first two sizes of ``x`` and ``y``, and the rows of ``a``."""
    real = {
        "x": torch.randn(8, 16, 32),
        "y": torch.randn(8, 16, 32),
        "a": torch.randn(8, 32),
        "b": torch.randn(32, 64),
        "c": torch.randn(16, 32),
        "w": torch.randn(32),
    }
    if not symbolic:
        return {name: mode.from_tensor(t) for name, t in real.items()}
    dims = {"x": 2, "y": 2, "a": 1}
    fakes = {}
    for name, t in real.items():
        dynamic = [DimDynamic.DYNAMIC if i < dims.get(name, 0) else DimDynamic.STATIC for i in range(t.dim())]
        fakes[name] = mode.from_tensor(
            t,
            source=ConstantSource(prefix + name),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic),
        )
    return fakes


def seconds(
    operator: Callable[[dict[str, Any]], Any], mode: Any, tensors: dict[str, Any], number: int
) -> float:
    """Return the processor seconds of one cached call inside the mode."""
    with mode:
        operator(tensors), operator(tensors)
        return (
            min(timeit.repeat(lambda: operator(tensors), timer=time.process_time, number=number, repeat=3))
            / number
        )


def compare(symbolic: bool, rounds: int, number: int) -> None:
    """Print one table: every operator, torch's and ours in turns."""
    theirs, ours = make(TorchFakeTensorMode, symbolic), make(FakeTensorMode, symbolic)
    ratios = []
    print("symbolic sizes" if symbolic else "static sizes")
    for name, operator in OPERATORS.items():
        a, b = [], []
        for _ in range(rounds):
            a.append(seconds(operator, *theirs, number))
            b.append(seconds(operator, *ours, number))
        ratios.append(report("  " + name, [min(a)], [min(b)], 1e6, "us"))
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"  geometric mean {mean:.2f} x, worst {min(ratios):.2f} x\n")


def outside(rounds: int, number: int) -> None:
    """Time an operator on fake tensors while no mode is active."""
    best = []
    for mode_class in (TorchFakeTensorMode, FakeTensorMode):
        _, t = make(mode_class, symbolic=False)
        x, y = t["x"], t["y"]
        repeated = timeit.repeat(
            lambda x=x, y=y: x + y, timer=time.process_time, number=number, repeat=rounds
        )
        best.append(min(repeated) / number)
    report("outside any mode: add", [best[0]], [best[1]], 1e6, "us")


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    options = parser(__doc__, rounds=5, number=200).parse_args(argv)
    torch.set_num_threads(1)
    compare(False, options.rounds, options.number)
    outside(options.rounds, options.number)
    print()
    compare(True, options.rounds, max(options.number // 4, 1))
    return 0
