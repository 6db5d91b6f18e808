"""cache_custom_op: a promise about one operator, for every mode."""

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode as TorchMode

import fake
from fake.cache.calls import PURE_OPS


@pytest.fixture
def operator() -> Iterator[tuple[object, list[int]]]:
    calls: list[int] = []
    library = torch.library.Library("fake_pure_ops", "FRAGMENT")
    library.define("grow(Tensor x, int by, str name) -> Tensor[]")

    def kernel(x: torch.Tensor, by: int, name: str) -> list[torch.Tensor]:
        calls.append(by)
        return [x.new_empty(x.shape[0] + by), x.new_empty(len(name))]

    torch.library.register_fake("fake_pure_ops::grow", kernel, lib=library)
    op = torch.ops.fake_pure_ops.grow.default
    yield op, calls
    PURE_OPS.discard(op)
    library._destroy()


def shapes(op: object, mode: object, *args: object) -> list[tuple[int, ...]]:
    with mode:  # type: ignore[attr-defined]
        x = torch.empty(4)
        return [tuple(t.shape) for t in op(x, *args)]  # type: ignore[operator]


@pytest.mark.parametrize("kind", [fake.FakeTensorMode, TorchMode])
def test_the_kernel_runs_once_for_equal_arguments(operator: tuple[object, list[int]], kind: type) -> None:
    op, calls = operator
    with fake.accelerate():
        shapes(op, kind(), 1, "ab"), shapes(op, kind(), 1, "ab")
        assert len(calls) == 2  # nothing was promised
        fake.cache_custom_op(op)
        assert [shapes(op, kind(), 1, "ab") for _ in range(3)] == [[(5,), (2,)]] * 3
        assert len(calls) == 3
        assert shapes(op, kind(), 2, "ab") == [(6,), (2,)]
        assert shapes(op, kind(), 1, "abc") == [(5,), (3,)]
        assert len(calls) == 5


def test_another_kernel_is_asked_again(operator: tuple[object, list[int]]) -> None:
    op, _calls = operator
    fake.cache_custom_op(op)
    mode = fake.FakeTensorMode()
    assert shapes(op, mode, 1, "ab") == [(5,), (2,)]

    def other(x: torch.Tensor, by: int, name: str) -> list[torch.Tensor]:
        return [x.new_empty(by)]

    torch.library.register_fake("fake_pure_ops::grow", other, allow_override=True)
    assert shapes(op, mode, 1, "ab") == [(1,)]


def test_symbolic_sizes(operator: tuple[object, list[int]]) -> None:
    op, _calls = operator
    fake.cache_custom_op(op)
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    for size in (5, 7):
        real = torch.rand(size)
        torch._dynamo.mark_dynamic(real, 0)
        x = mode.from_tensor(real)
        with mode:
            first, second = op(x, 1, "ab")  # type: ignore[operator]
        assert first.shape[0] == x.shape[0] + 1
        assert str(first.shape[0]) == f"{x.shape[0]} + 1"
        assert second.shape == (2,)


@pytest.mark.parametrize(
    ("op", "error", "words"),
    [
        (torch.ops.aten.add, TypeError, "overload"),
        (torch.relu, TypeError, "overload"),
        (torch.ops.aten.add.Tensor, ValueError, "aten::add.Tensor"),
    ],
)
def test_what_is_no_custom_operator_is_refused(op: object, error: type, words: str) -> None:
    before = set(PURE_OPS)
    with pytest.raises(error, match=words):
        fake.cache_custom_op(op)
    assert before == PURE_OPS


def test_results_that_depend_on_data_are_refused() -> None:
    library = torch.library.Library("fake_pure_ops", "FRAGMENT")
    library.define("count(Tensor x) -> Tensor", tags=(torch.Tag.data_dependent_output,))
    op = torch.ops.fake_pure_ops.count.default
    with pytest.raises(ValueError, match=r"fake_pure_ops::count.*data dependent"):
        fake.cache_custom_op(op)
    assert op not in PURE_OPS
