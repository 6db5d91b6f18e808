"""Programs at a sequence of sizes, 1 among them: no more graphs and no more guards than torch's own environment makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.registry import lookup_backend

import fake
from fake.seam.symbolic_shapes import TorchShapeEnv


def tiles(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, 4, x.shape[1]).sum(1)
    return rows.reshape(rows.shape[0], -1, 4).sum(2).reshape(-1, 2)


def patches(x: torch.Tensor) -> torch.Tensor:
    h, w, c = x.shape
    y = x.reshape(h // 2, 2, w // 2, 2, c).permute(0, 2, 1, 3, 4).reshape(-1, 4 * c)
    return y.reshape(h // 2, w // 2, 2, 2, c).permute(0, 2, 1, 3, 4).reshape(h, w, c)


def branches(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, 2).t().reshape(2, -1, 2) if x.numel() % 4 == 0 else x + 1


def broadcasts(x: torch.Tensor) -> torch.Tensor:
    return x * x[:1] + x[:, :1]


def images(x: torch.Tensor) -> torch.Tensor:
    y = F.max_pool2d(x[None, None], 2, ceil_mode=True)
    return F.interpolate(y, size=x.shape)[0, 0]


def shuffles(x: torch.Tensor) -> torch.Tensor:
    return F.pixel_unshuffle(x[None, None], 2) if x.shape[0] % 2 == 0 == x.shape[1] % 2 else x


PROGRAMS: dict[Callable[[torch.Tensor], torch.Tensor], Sequence[tuple[int, ...]]] = {
    tiles: [(8, 8), (16, 8), (4, 16), (8, 4), (24, 16)],
    patches: [(4, 4, 3), (8, 4, 3), (6, 2, 1)],
    branches: [(4, 6), (8, 6), (3, 5), (1, 6), (4, 1), (1, 1), (16, 18)],
    broadcasts: [(3, 4), (5, 4), (1, 4), (3, 1), (1, 1), (7, 9)],
    images: [(8, 9), (9, 8), (5, 5), (2, 7), (16, 3)],
    shuffles: [(4, 6), (8, 6), (3, 5), (6, 6), (2, 4), (1, 1)],
}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_no_more_graphs_and_guards_than_torch(
    program: Callable[[torch.Tensor], torch.Tensor], dynamic: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    conditions: list[int] = []
    produce = TorchShapeEnv.produce_guards_verbose

    def counting(self: Any, *args: Any, **options: Any) -> Any:
        produced = produce(self, *args, **options)
        conditions.append(len(set(produced[0].exprs)))
        return produced

    monkeypatch.setattr(TorchShapeEnv, "produce_guards_verbose", counting)
    made = []
    for environment in (contextlib.nullcontext(), fake.using_shape_env()):
        torch._dynamo.reset()
        conditions.clear()
        graphs = []

        def backend(gm: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(gm)
            return lookup_backend("aot_eager")(gm, inputs)

        with environment:
            run = torch.compile(program, backend=backend, dynamic=dynamic)
            for size in PROGRAMS[program]:
                x = torch.arange(float(torch.Size(size).numel())).reshape(size)
                torch.testing.assert_close(run(x), program(x))
        made.append((len(graphs), list(conditions)))
    (their_graphs, theirs), (our_graphs, ours) = made
    assert our_graphs <= their_graphs
    assert all(few <= many for few, many in zip(ours, theirs, strict=True)), (ours, theirs)
