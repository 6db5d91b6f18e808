"""Forward and backward of a GPT in the mode, static and with symbolic batch and length: first, later steps.

``--against-torch 0`` leaves out torch's mode and reports only the slowdown with symbolic sizes.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from benchmarks._fake_support import GPT, parser, report, tokens
from fake import FakeTensorMode


def build(mode_class: type, layers: int, symbolic: bool) -> tuple[Any, ...]:
    """Return a mode, and a model in it with its inputs."""
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
    """Return the processor seconds of one forward and backward."""
    start = time.process_time()
    with mode:
        model.zero_grad()
        model(ids, targets).backward()
    return time.process_time() - start


def symbolic_against_static(layers: int, rounds: int) -> None:
    """Report the slowdown with symbolic sizes: of the first step, and of later ones in turns with static."""
    FakeTensorMode.cache_clear()
    built = {symbolic: build(FakeTensorMode, layers, symbolic) for symbolic in (False, True)}
    first = {symbolic: step(*contents) for symbolic, contents in built.items()}
    later: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(rounds + 2):
        for symbolic, contents in built.items():
            seconds = step(*contents)
            if turn >= 2:
                later[symbolic].append(seconds)
    medians = {symbolic: statistics.median(seconds) for symbolic, seconds in later.items()}
    for name, seconds in (("first step", first), ("later steps", medians)):
        print(
            f"{name}: static {seconds[False] * 1e3:.1f} ms, symbolic {seconds[True] * 1e3:.1f} ms, "
            f"symbolic / static {seconds[True] / seconds[False]:.2f}"
        )


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    options = parser(__doc__, layers=12, rounds=5, **{"against-torch": 1}).parse_args(argv)
    torch.set_num_threads(1)
    symbolic_against_static(options.layers, max(options.rounds, 40))
    if not options.against_torch:
        return 0
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
