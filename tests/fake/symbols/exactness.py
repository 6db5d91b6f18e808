"""Compare symbolic results with eager at many concrete sizes. Property tests and the sweep share this.

``check(program, sizes, others)`` traces a program once, on fake tensors of the given sizes. For each other
choice of sizes:

- If the guards accept them, eager must run. The symbolic sizes, strides and offsets of all results, evaluated
  there, must equal eager's. A graph traced along must give eager's values.
- If the guards reject them, nothing is claimed. The example itself must always be accepted.

As a program, it sweeps over many random cases: ``python -m tests.fake.symbols.exactness --examples 2000``.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import sympy
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import fake
from tests.fake.symbols.programs import FAMILIES

Sizes = tuple[int, ...]


@dataclass
class Traced:
    """A program on symbolic inputs: its results, its guards, its graph."""

    results: list[Any]
    accepts: Any
    graph: torch.fx.GraphModule
    symbols: dict[sympy.Symbol, tuple[int, int]]

    def numbers(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """What the symbolic results are at the sizes of real inputs."""
        values = {s: sympy.Integer(inputs[i].shape[d]) for s, (i, d) in self.symbols.items()}
        return [_metadata(result, lambda number: _at(number, values)) for result in self.results]


class Refused(Exception):
    """The program raises for the example sizes, in eager and on fake tensors."""


def example(sizes: Sizes) -> torch.Tensor:
    """Distinct small integers: sums are exact, and a wrong element shows."""
    return torch.arange(float(max(torch.Size(sizes).numel(), 0))).reshape(sizes) % 17


def _metadata(result: Any, number: Callable[[Any], float]) -> Any:
    if not isinstance(result, torch.Tensor):
        return number(result) if isinstance(result, (int, float, torch.SymInt, torch.SymFloat)) else result
    sizes = [number(s) for s in result.shape]
    strides = [number(s) for s in result.stride()]
    empty = 0 in sizes
    # The stride of a dimension of size 1, or of an empty tensor, has no effect.
    strides = [0 if empty or size == 1 else stride for size, stride in zip(sizes, strides, strict=True)]
    return sizes, strides, number(result.storage_offset()), result.dtype


def _at(number: Any, values: dict[sympy.Symbol, sympy.Integer]) -> float:
    if not isinstance(number, (torch.SymInt, torch.SymFloat)):
        return number
    return (int if isinstance(number, torch.SymInt) else float)(number.node.expr.xreplace(values))


def trace(program: Callable[..., Any], sizes: Sequence[Sizes], **settings: Any) -> Traced:
    """Run a program on symbolic tensors, and trace its graph.

    Raises:
        Refused: neither eager nor the mode takes these sizes.
    """
    real = [example(s) for s in sizes]
    try:
        program(*real)
    except (RuntimeError, IndexError, ValueError) as expected:
        try:
            _run_fake(program, real, settings)
        except Exception as error:
            raise Refused(str(expected)) from error
        raise AssertionError(f"fake tensors accept what eager refuses: {expected}") from expected
    mode, inputs, results, graph = _run_fake(program, real, settings)
    env = mode.shape_env
    symbols: dict[sympy.Symbol, tuple[int, int]] = {}
    for i, made in enumerate(inputs):
        for d, size in enumerate(made.shape):
            if isinstance(size, torch.SymInt):
                symbols.setdefault(size.node._expr, (i, d))
                if isinstance(size.node.expr, sympy.Symbol):
                    symbols.setdefault(size.node.expr, (i, d))
    return Traced(results, env.guards.compile(), graph, symbols)


def _run_fake(program: Callable[..., Any], real: Sequence[torch.Tensor], settings: Any) -> Any:
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv(**settings))
    inputs = [mode.from_tensor(t, name=f"x{i}") for i, t in enumerate(real)]
    with mode, enable_python_dispatcher():
        results = tree_leaves(program(*inputs))
        graph = make_fx(program)(*inputs)
    return mode, inputs, results, graph


def check(
    program: Callable[..., Any], sizes: Sequence[Sizes], others: Sequence[Sequence[Sizes]], **settings: Any
) -> int:
    """Compare with eager at the example and at other sizes; returns how many of the others were accepted."""
    traced = trace(program, sizes, **settings)
    accepted = 0
    for choice in (sizes, *others):
        inputs = [example(s) for s in choice]
        if not traced.accepts(*inputs):
            assert choice is not sizes, f"the guards refuse the example {sizes}:\n{traced.accepts.code}"
            continue
        accepted += choice is not sizes
        try:
            expected = program(*inputs)
        except (RuntimeError, IndexError, ValueError) as error:
            raise AssertionError(
                f"accepted {choice}, which eager refuses: {error}\n{traced.accepts.code}"
            ) from error
        leaves = tree_leaves(expected)
        wanted = [_metadata(leaf, lambda number: number) for leaf in leaves]
        found = traced.numbers(inputs)
        assert found == wanted, f"at {choice}, traced at {sizes}: {found} instead of {wanted}"
        for leaf, value in zip(leaves, tree_leaves(traced.graph(*inputs)), strict=True):
            if isinstance(leaf, torch.Tensor):
                # Decompositions may round differently from kernels. A wrong size or element still shows.
                same = torch.allclose(leaf, value, rtol=1e-4, atol=1e-4)
                assert same, f"at {choice}, traced at {sizes}: the graph gives other values"
    return accepted


def choices_of(program: Any, number: int, count: int) -> list[dict[str, int]]:
    """Sizes for the letters of a program: the first choice is the example."""
    random = Random(number)
    return [
        {letter: random.randint(2 if i == 0 else 1, 7) for letter in program.letters} for i in range(count)
    ]


def check_program(program: Any, number: int, count: int = 12, **settings: Any) -> int:
    """Check one random program at random sizes; -1 if eager refuses the example."""
    first, *others = choices_of(program, number, count)
    try:
        return check(
            program.run, program.sizes(first), [program.sizes(choice) for choice in others], **settings
        )
    except Refused:
        return -1


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep over random programs of all families, or of those named; print what fails."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--examples", type=int, default=200, help="programs for each family")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    counts = {family: _sweep(family, options.examples, options.seed) for family in options.families}
    return 1 if any(count["failed"] for count in counts.values()) else 0


def _sweep(family: str, examples: int, first_seed: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    told: set[str] = set()

    @seed(first_seed)
    @settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )  # fmt: skip
    @given(FAMILIES[family](), st.integers(0, 1000), st.booleans())
    def run(program: Any, number: int, duck: bool) -> None:
        try:
            accepted = check_program(program, number, duck_shape=duck)
        except Exception as error:  # noqa: BLE001 - every failure is a finding, and the sweep goes on
            counts["failed"] += 1
            if program.text not in told:
                told.add(program.text)
                problem = str(error).splitlines()[0][:150]
                print(f"    {program.text} ({number}, {duck}): {type(error).__name__}: {problem}", flush=True)
            return
        counts["refused by eager" if accepted < 0 else "right"] += 1
        counts["other sizes accepted"] += max(accepted, 0)

    run()
    print(f"{family}: {dict(counts)}", flush=True)
    return counts


if __name__ == "__main__":
    sys.exit(main())
