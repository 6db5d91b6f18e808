"""Number of guards and graphs for a sequence of sizes: torch's shape environment against ours.

The programs are those of ``tests/fake/symbols/test_against_torch.py`` and the models of
``tests/models/zoo.py`` (with changing batch sizes). Each is compiled with ``dynamic=True`` on ``aot_eager``
and called at all sizes, including 1. A condition is one line of ``produce_guards``: a range, an equality of
sizes or strides, or a relation.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fake
from benchmarks._fake_support import parser
from tests.fake.symbols.test_against_torch import PROGRAMS
from tests.models.zoo import ZOO

__all__ = ["main"]

BATCHES = (4, 6, 1, 9, 3)


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the conditions of each environment that produces guards within the context."""
    counts: list[int] = []
    produce = ShapeEnv.produce_guards_verbose

    def counting(self: Any, *args: Any, **options: Any) -> Any:
        produced = produce(self, *args, **options)
        counts.append(len(set(produced[0].exprs)))
        return produced

    ShapeEnv.produce_guards_verbose = counting  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        ShapeEnv.produce_guards_verbose = produce  # type: ignore[method-assign]


def guards_and_graphs(
    program: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], *, ours: bool
) -> tuple[list[int], int]:
    """Return the number of conditions of each graph, and the number of graphs, for a sequence of calls."""
    torch._dynamo.reset()
    graphs = 0

    def backend(gm: Any, example: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return lookup_backend("aot_eager")(gm, example)

    with _counted() as counts, fake.using_shape_env() if ours else contextlib.nullcontext():
        compiled = torch.compile(program, backend=backend, dynamic=True)
        for given in inputs:
            compiled(*given)
    return list(counts), graphs


def _cases() -> Iterator[tuple[str, Callable[..., Any], Callable[[], list[tuple[Any, ...]]]]]:
    """Yield names, programs and input factories: inputs must be new, as Dynamo remembers dynamic sizes."""
    for program, sizes in PROGRAMS.items():
        yield program.__name__, program, lambda s=sizes: [(torch.ones(size),) for size in s]  # type: ignore[misc]
    for name, entry in ZOO.items():
        yield name, entry.build(), lambda e=entry: [e.inputs(n) for n in BATCHES]  # type: ignore[misc]


def main(arguments: list[str] | None = None) -> int:
    """Print a row per program. Return 1 if any needs more guards or graphs than with torch's environment."""
    parser(__doc__).parse_args(arguments)
    worse = 0
    print(f"{'program':<20} {'conditions, torch':<28} {'ours':<28} graphs, torch  ours")
    for name, program, inputs in _cases():
        theirs, their_graphs = guards_and_graphs(copy.deepcopy(program), inputs(), ours=False)
        ours, our_graphs = guards_and_graphs(copy.deepcopy(program), inputs(), ours=True)
        worse += our_graphs > their_graphs or sum(ours) > sum(theirs)
        print(
            f"{name:<20} {' '.join(map(str, theirs)):<28} {' '.join(map(str, ours)):<28} {their_graphs:>13} {our_graphs:>5}"
        )
    print(f"{worse} programs with more conditions or graphs than with torch's environment")
    return 1 if worse else 0
