"""Overhead of a custom operator call over its kernel: ours against torch.library.custom_op, interleaved.

Prints medians over rounds in which every contender runs in turn, and the ratio of the overheads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fake.library import custom_op

#: Maximum overhead over the raw kernel, relative to torch's.
TARGETS = {"no grad": 0.35, "grad": 0.45, "two inputs": None, "mutating": None}


def _build(make: Callable[..., Callable[..., object]], prefix: str) -> dict[str, Callable[..., object]]:
    def copy(x: Tensor) -> Tensor:
        return x.clone()

    def add(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        return torch.add(x, y, alpha=alpha)

    def bump(x: Tensor) -> None:
        x.add_(1)

    unary = make(f"bench_{prefix}::copy", copy, mutates_args=())
    unary.register_autograd(  # type: ignore[attr-defined]
        lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
    )
    return {
        "no grad": unary,
        "grad": unary,
        "two inputs": make(f"bench_{prefix}::add", add, mutates_args=()),
        "mutating": make(f"bench_{prefix}::bump", bump, mutates_args=("x",)),
    }


def _once(function: Callable[..., object], args: tuple[object, ...], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        function(*args)
    return (time.process_time() - start) / calls * 1e6


def main(argv: list[str]) -> int:
    """Run the benchmark. Return 1 if a target is missed and ``--check`` was given."""
    parser = argparse.ArgumentParser(prog="custom_op_call", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="rounds per case (default 60)")
    parser.add_argument(
        "--calls", type=int, default=1000, help="calls per round and contender (default 1000)"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    ours, torchs = _build(custom_op, "ours"), _build(torch.library.custom_op, "torch")
    x, y, r = torch.randn(4), torch.randn(4), torch.randn(4, requires_grad=True)
    raw: dict[str, tuple[Callable[..., object], tuple[object, ...]]] = {
        "no grad": (lambda x: x.clone(), (x,)),
        "grad": (lambda x: x.clone(), (r,)),
        "two inputs": (lambda x, y, alpha=1.0: torch.add(x, y, alpha=alpha), (x, y)),
        "mutating": (lambda x: x.add_(1), (x,)),
    }
    print(f"{'case':<12}{'raw us':>9}{'ours us':>9}{'torch us':>10}{'overhead ratio':>16}{'target':>9}")
    missed = False
    for case, (kernel, args) in raw.items():
        contenders = (kernel, ours[case], torchs[case])
        samples: list[list[float]] = [[], [], []]
        for function in contenders:
            _once(function, args, options.calls)
        for _ in range(options.rounds):
            for function, sample in zip(contenders, samples, strict=True):
                sample.append(_once(function, args, options.calls))
        base, mine, theirs = (statistics.median(sample) for sample in samples)
        ratios = [(b - a) / (c - a) for a, b, c in zip(*samples, strict=True)]
        ratio = statistics.median(ratios)
        target = TARGETS[case]
        missed |= target is not None and ratio > target
        print(f"{case:<12}{base:9.2f}{mine:9.2f}{theirs:10.2f}{ratio:16.2f}{target if target else '-':>9}")
    return int(missed and options.check)
