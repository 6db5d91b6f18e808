"""Tensors that enter an accelerated trace: constructed and converted in fewer steps, the same as torch does it."""

import pytest
import torch
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fake

ATTRIBUTES = [
    "constant",
    "pytype",
    "dispatch_keys",
    "real_tensor",
    "nonzero_memo",
    "item_memo",
    "unique_memo",
    "unique_consecutive_memo",
    "nested_int_memo",
    "requires_grad",
    "is_leaf",
    "shape",
    "dtype",
    "device",
    "fake_device",
    "grad_fn",
]


def constructed(**options: object) -> list[object]:
    mode = FakeTensorMode()
    element = torch.empty(2, 3, device="meta", requires_grad=bool(options.pop("gradient", False)))
    made = FakeTensor(mode, element, torch.device(str(options.pop("device", "cpu"))), **options)
    assert made.fake_mode is mode
    return [type(made), *(getattr(made, name) for name in ATTRIBUTES)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient": True},
        {"constant": None},
        {"requires_grad": True},
        {"device": "cuda:0"},
        {"pytype": torch.nn.Parameter},
        {"dispatch_keys": torch._C._dispatch_keys(torch.empty(0))},
    ],
    ids=str,
)
def test_a_constructed_tensor_has_the_same_attributes(options: dict[str, object]) -> None:
    expected = constructed(**options)
    with fake.accelerate():
        assert constructed(**options) == expected


def test_wrong_elements_are_still_refused() -> None:
    with fake.accelerate():
        with pytest.raises(AssertionError, match="meta"):
            FakeTensor(FakeTensorMode(), torch.empty(2), torch.device("cpu"))
        mode = FakeTensorMode()
        mode.allow_meta = False
        with pytest.raises(AssertionError, match="allow_meta"):
            FakeTensor(mode, torch.empty(2, device="meta"), torch.device("meta"))


def converted(real: torch.Tensor, **context: object) -> tuple[object, ...]:
    env = ShapeEnv()
    made = FakeTensorMode(shape_env=env).from_tensor(
        real, source=LocalSource("x"), symbolic_context=StatelessSymbolicContext(**context)
    )
    sizes = [*made.shape, *made.stride(), made.storage_offset()]
    return [str(s) for s in sizes], [type(s) for s in sizes], sorted(map(str, env.var_to_range)), env.guards


STATIC, DYNAMIC = DimDynamic.STATIC, DimDynamic.DYNAMIC


@pytest.mark.parametrize(
    "context",
    [
        {"dynamic_sizes": [STATIC, STATIC]},
        {"dynamic_sizes": [DYNAMIC, STATIC]},
        {"dynamic_sizes": [STATIC, STATIC], "dynamic_strides": [DYNAMIC, DYNAMIC]},
        {"dynamic_sizes": [DYNAMIC, DYNAMIC]},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "part"])
def test_sizes_are_converted_as_by_torch(context: dict[str, object], layout: str) -> None:
    real = {
        "contiguous": torch.rand(4, 6),
        "transposed": torch.rand(6, 4).t(),
        "part": torch.rand(8, 8)[1:5, 2:],
    }
    expected = converted(real[layout], **context)
    with fake.accelerate():
        assert converted(real[layout], **context) == expected


def test_a_context_for_another_rank_is_refused_as_by_torch() -> None:
    with pytest.raises(AssertionError) as expected:
        converted(torch.rand(4, 6), dynamic_sizes=[STATIC])
    with fake.accelerate(), pytest.raises(AssertionError) as found:
        converted(torch.rand(4, 6), dynamic_sizes=[STATIC])
    assert str(found.value) == str(expected.value)
