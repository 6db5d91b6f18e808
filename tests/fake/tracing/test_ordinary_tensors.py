"""Under acceleration tensors become the fake tensors that torch's converter makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fake


def _static(t: torch.Tensor) -> Any:
    return StatelessSymbolicContext(dynamic_sizes=[DimDynamic.STATIC] * t.dim())


def _with_gradient() -> torch.Tensor:
    t = torch.nn.Parameter(torch.randn(3))
    t.grad = torch.ones(3)
    return t


def _told(t: Any) -> tuple[Any, ...]:
    return (
        type(t),
        isinstance(t, torch.nn.Parameter),
        t.shape,
        t.layout is torch.strided and t.stride(),
        t.storage_offset(),
        t.dtype,
        t.device,
        t.requires_grad,
        t.is_leaf,
        t._is_view(),
        t.is_conj(),
        t.is_neg(),
        t.is_inference(),
        t.layout,
        t.layout is torch.strided and t.untyped_storage().nbytes(),
        getattr(t, "item_memo", None) is not None,
        t.is_leaf and t.grad is not None,
    )


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(2, 3)


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "parameter": lambda: torch.nn.Parameter(torch.randn(4, 3)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.randn(4, 3), requires_grad=False),
    "tensor": lambda: torch.randn(4, 3),
    "requires grad": lambda: torch.randn(4, 3, requires_grad=True),
    "integers": lambda: torch.arange(5),
    "bfloat16": lambda: torch.nn.Parameter(torch.randn(4, 3, dtype=torch.bfloat16)),
    "transposed": lambda: torch.nn.Parameter(torch.randn(4, 3).t()),
    "channels last": lambda: torch.nn.Parameter(
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ),
    "empty": lambda: torch.empty(0, 3),
    "one": lambda: torch.randn(1, 1),
    "scalar": lambda: torch.tensor(2.0, dtype=torch.float64),
    "view": lambda: torch.randn(4, 3)[1:],
    "detached slice": lambda: torch.randn(6, 3).detach().data[:2].data,
    "result": lambda: torch.randn(3, requires_grad=True) * 2,
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "inference": _inference,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "with a gradient": _with_gradient,
    "buffer": lambda: torch.nn.Buffer(torch.randn(3)),
    "meta": lambda: torch.randn(3, 4, device="meta"),
}


@pytest.mark.parametrize("symbolic", [False, True], ids=["without symbols", "with an environment"])
@pytest.mark.parametrize("name", TENSORS)
def test_the_fake_tensor_is_the_one_that_torch_makes(name: str, symbolic: bool) -> None:
    t = TENSORS[name]()

    def convert() -> tuple[Any, ...]:
        mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
        given = {"symbolic_context": _static(t), "source": ConstantSource("t")} if symbolic else {}
        made = mode.from_tensor(t, **given)
        assert mode.from_tensor(t, **given) is made
        return _told(made)

    expected = convert()
    with fake.accelerate():
        assert convert() == expected


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda t: t, lambda t: t.detach()[1:]),
        (lambda t: t.detach()[1:], lambda t: t),
        (lambda t: t, lambda t: t.detach()),
        (lambda t: t, lambda t: torch.nn.Parameter(t.detach().view(-1))),
        (lambda t: t.data, lambda t: t),
    ],
    ids=["slice after", "slice before", "alias after", "parameter after", "alias before"],
)
def test_tensors_on_one_storage_stay_on_one(first: Any, second: Any) -> None:
    t = torch.nn.Parameter(torch.randn(4, 3))
    one, two = first(t), second(t)

    def same_storage(mode: FakeTensorMode) -> tuple[Any, ...]:
        a, b = mode.from_tensor(one), mode.from_tensor(two)
        return a.untyped_storage()._cdata == b.untyped_storage()._cdata, _told(a), _told(b)

    expected = same_storage(FakeTensorMode())
    assert expected[0]
    with fake.accelerate():
        assert same_storage(FakeTensorMode()) == expected


def test_a_dynamic_size_is_a_symbol() -> None:
    t = torch.randn(4, 3)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    with fake.accelerate():
        mode = FakeTensorMode(shape_env=ShapeEnv())
        made = mode.from_tensor(t, source=ConstantSource("t"), symbolic_context=context)
    assert isinstance(made.shape[0], torch.SymInt)


def test_under_inference_mode_and_transforms_torch_decides() -> None:
    t = torch.randn(4, 3)

    def made_under(surrounding: Any) -> tuple[Any, ...]:
        with surrounding:
            return _told(FakeTensorMode().from_tensor(t))

    expected = made_under(torch.inference_mode())
    with fake.accelerate():
        assert made_under(torch.inference_mode()) == expected

        def inside(x: torch.Tensor) -> torch.Tensor:
            assert _told(FakeTensorMode().from_tensor(t)) == plain
            return x

        plain = made_under(torch.no_grad())
        torch.vmap(inside)(torch.ones(2))


def test_the_tensor_is_not_kept_alive() -> None:
    import gc
    import weakref

    t = torch.nn.Parameter(torch.randn(3))
    with fake.accelerate():
        mode = FakeTensorMode()
        made = mode.from_tensor(t)
    dead = weakref.ref(t)
    del t
    gc.collect()
    assert dead() is None
    assert made.shape == (3,)


@pytest.mark.parametrize("accelerated", [True, False], ids=["accelerated", "own mode"])
def test_views_of_a_base_on_a_known_storage_are_on_it(accelerated: bool) -> None:
    """The base of a view that is converted after another tensor on its storage is moved there before views are taken."""
    with fake.accelerate():
        kind: Any = FakeTensorMode if accelerated else fake.FakeTensorMode
        for _ in range(2):  # the second view is taken by a recipe of the first
            t = torch.nn.Parameter(torch.randn(4, 3))
            mode = kind()
            a, b = mode.from_tensor(t), mode.from_tensor(t.detach()[1:])
            assert a.untyped_storage()._cdata == b.untyped_storage()._cdata
            assert b.storage_offset() == 3
