"""Forward and backward of a GPT in the mode, static and with symbolic batch and length: first step and later ones."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from benchmarks._fake_support import GPT, parser, report, tokens
from fake import FakeTensorMode


def build(mode_class: type, layers: int, symbolic: bool) -> tuple[Any, ...]:
    """A mode, and in it a model with its inputs."""
    mode = mode_class(shape_env=ShapeEnv() if symbolic else None, static_shapes=True)
    with mode:
        model = GPT(layers)
    if not symbolic:
        return mode, model, mode.from_tensor(tokens()), mode.from_tensor(tokens())
    mode.static_shapes = False
    both = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    inputs = [
        mode.from_tensor(tokens(), source=ConstantSource(n), symbolic_context=both)
        for n in ("ids", "targets")
    ]
    return mode, model, *inputs


def step(mode: Any, model: Any, ids: Any, targets: Any) -> float:
    """Seconds of one forward and backward."""
    start = time.perf_counter()
    with mode:
        model.zero_grad()
        model(ids, targets).backward()
    return time.perf_counter() - start


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    options = parser(__doc__, layers=12, rounds=5).parse_args(argv)
    torch.set_num_threads(1)
    for symbolic in (False, True):
        first: dict[type, list[float]] = {TorchFakeTensorMode: [], FakeTensorMode: []}
        later: dict[type, list[float]] = {TorchFakeTensorMode: [], FakeTensorMode: []}
        for _ in range(options.rounds if not symbolic else 2):
            for mode_class in first:
                mode_class.cache_clear()
                built = build(mode_class, options.layers, symbolic)
                first[mode_class].append(step(*built))
                later[mode_class].extend(step(*built) for _ in range(3))
        kind = "symbolic" if symbolic else "static"
        report(f"{kind}: first step", first[TorchFakeTensorMode], first[FakeTensorMode])
        report(f"{kind}: later steps", later[TorchFakeTensorMode], later[FakeTensorMode])
    return 0
