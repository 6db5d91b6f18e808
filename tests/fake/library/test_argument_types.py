"""Argument types that schemas do not have: flattened on the way in, rebuilt for kernels."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypedDict

import pytest
import torch
from torch import Tensor
from torch._library import opaque_object
from torch._subclasses.fake_tensor import FakeTensorMode

from fake import library
from fake.library import custom_op, opcheck
from fake.library.argument_types import make_codec
from fake.library.errors import SchemaError, UnsupportedAnnotationError
from tests.fake.library.support import fresh_name, overload_of


class Mode(enum.Enum):
    ADD = "add"
    SUB = "subtract"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 10


@dataclass
class Inner:
    scale: float
    mode: Mode = Mode.ADD


@dataclass(frozen=True)
class Config:
    inner: Inner
    bias: Tensor
    steps: int = 2


class Pair(NamedTuple):
    left: Tensor
    right: int


class State(TypedDict):
    weight: Tensor
    count: int


# Torch 2.15 has a type for it.
OPTIONAL_LIST = (
    "Tensor[]? y"
    if torch.__version__ >= torch.torch_version.TorchVersion("2.15")
    else "Tensor[] y, bool y_given"
)

CASES = {
    "enum": (Mode, Mode.SUB, "str y"),
    "int enum": (Level, Level.HIGH, "str y"),
    "optional enum": (Mode | None, None, "str? y"),
    "dataclass": (
        Config,
        Config(Inner(2.0, Mode.SUB), torch.ones(2), 3),
        "float y_inner_scale, str y_inner_mode, Tensor y_bias, SymInt y_steps",
    ),
    "named tuple": (Pair, Pair(torch.ones(2), 3), "Tensor y_left, SymInt y_right"),
    "typed dict": (State, {"weight": torch.ones(1), "count": 4}, "Tensor y_weight, SymInt y_count"),
    "literal keys": (dict[Literal["a", "b"], float], {"a": 1.0, "b": 2.0}, "float y_a, float y_b"),
    "nested tuple": (
        tuple[int, tuple[float, Tensor]],
        (1, (2.0, torch.ones(1))),
        "SymInt y_0, float y_1_0, Tensor y_1_1",
    ),
    "optional list": (list[Tensor] | None, [torch.ones(1)], OPTIONAL_LIST),
    "optional list, None": (list[Tensor] | None, None, OPTIONAL_LIST),
    "strings": (list[str], ["a", "b"], "str[] y"),
    "optional strings": (list[str] | None, None, "str[]? y"),
}


def make(annotation, received=None, **options):
    def kernel(x, y):
        if received is not None:
            received.append(y)
        return x.detach().clone()

    kernel.__annotations__ = {"x": Tensor, "y": annotation, "return": Tensor}
    op = custom_op(fresh_name(), kernel, mutates_args=(), **options)
    op.register_fake(lambda x, y: torch.empty_like(x))
    return op


def same(left, right):
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, Config):
        return same(tuple(vars(left).values()), tuple(vars(right).values()))
    return type(left) is type(right) and left == right


@pytest.mark.parametrize("case", CASES)
def test_kernel_gets_what_was_passed(case):
    annotation, value, schema = CASES[case]
    received = []
    op = make(annotation, received)
    assert str(op.schema).split("(", 1)[1].startswith(f"Tensor x, {schema}) -> Tensor")
    op(torch.ones(2), value)
    op(torch.ones(2), y=value)
    assert len(received) == 2
    assert all(same(value, got) for got in received)


@pytest.mark.parametrize("case", CASES)
def test_under_compile(case):
    annotation, value, _ = CASES[case]
    op = make(annotation)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: op(x, value) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    with FakeTensorMode():
        x = torch.ones(2)
        if not any(isinstance(leaf, Tensor) for leaf in torch.utils._pytree.tree_leaves(value)) and case in (
            "enum",
            "strings",
        ):
            assert op(x, value).shape == (2,)


def test_gradients_come_in_the_structure():
    @custom_op(fresh_name(), mutates_args=())
    def scale(x: Tensor, config: Config, pair: tuple[int, tuple[float, Tensor]]) -> Tensor:
        return (x * config.inner.scale + config.bias + pair[1][1]).detach()

    def setup_context(ctx, inputs, output):
        assert isinstance(inputs[1], Config)
        assert inputs[2][0] == 7
        ctx.scale = inputs[1].inner.scale

    def backward(ctx, grad):
        return grad * ctx.scale, Config(None, grad, None), (None, (None, grad * 5))

    scale.register_autograd(backward, setup_context=setup_context)
    x, bias, extra = (torch.ones(2, requires_grad=True) for _ in range(3))
    scale(x, Config(Inner(3.0), bias), (7, (1.0, extra))).sum().backward()
    assert x.grad.tolist() == [3, 3]
    assert bias.grad.tolist() == [1, 1]
    assert extra.grad.tolist() == [5, 5]


def test_no_gradient_for_a_whole_parameter():
    op = make(Config)
    op.register_autograd(lambda ctx, grad: (grad, None))
    x = torch.ones(2, requires_grad=True)
    op(x, Config(Inner(1.0), torch.ones(2))).sum().backward()
    assert x.grad.tolist() == [1, 1]


def test_mutation_of_optional_lists():
    @custom_op(fresh_name(), mutates_args=("caches",))
    def bump(x: Tensor, caches: list[Tensor] | None = None) -> Tensor:
        for cache in caches or []:
            cache.add_(x)
        return x.clone()

    bump.register_fake(lambda x, caches=None: torch.empty_like(x))
    caches = [torch.zeros(2), torch.zeros(2)]
    versions = [c._version for c in caches]
    bump(torch.ones(2), caches)
    bump(torch.ones(2))
    assert [c.tolist() for c in caches] == [[1, 1], [1, 1]]
    assert all(c._version > v for c, v in zip(caches, versions, strict=True))
    assert opcheck(bump, (torch.ones(2), caches)).ok

    def f(x):
        cache = torch.zeros_like(x)
        return bump(x, [cache]) + cache

    assert torch.compile(f, backend="aot_eager", fullgraph=True)(torch.ones(2)).tolist() == [2, 2]


def test_vmap_sees_the_structure():
    op = make(Config)

    @op.register_vmap
    def _(info, in_dims, x, y):
        assert in_dims == (0, {"inner": {"scale": None, "mode": None}, "bias": None, "steps": None})
        assert isinstance(y, Config)
        return op(x, y), 0

    config = Config(Inner(1.0), torch.ones(2))
    assert torch.vmap(lambda x: op(x, config))(torch.ones(3, 2)).shape == (3, 2)


def test_keyword_only_and_defaults():
    received = []

    @custom_op(fresh_name(), mutates_args=())
    def op(x: Tensor, mode: Mode = Mode.ADD, *, level: Level = Level.LOW, n: int = 3) -> Tensor:
        received.append((mode, level, n))
        return x.clone()

    op(torch.ones(1))
    op(torch.ones(1), Mode.SUB, level=Level.HIGH)
    assert received == [(Mode.ADD, Level.LOW, 3), (Mode.SUB, Level.HIGH, 3)]


def test_wrong_values_are_named():
    with pytest.raises(TypeError, match="argument 'y' must be a Mode, got 'add'"):
        make(Mode)(torch.ones(1), "add")
    with pytest.raises(TypeError, match=r"exactly the keys \['weight', 'count'\]"):
        make(State)(torch.ones(1), {"weight": torch.ones(1)})
    with pytest.raises(TypeError, match="must have 2 elements"):
        make(tuple[int, tuple[float, float]])(torch.ones(1), (1, (2.0,)))
    with pytest.raises(TypeError, match="must be a Config"):
        make(Config)(torch.ones(1), 3)


def test_unsupported_fields_are_refused():
    @dataclass
    class Bad:
        things: set

    def fn(x, y): ...

    fn.__annotations__ = {"x": Tensor, "m": Mode, "y": Bad, "return": Tensor}

    def both(x, m, y): ...

    both.__annotations__ = fn.__annotations__
    with pytest.raises(UnsupportedAnnotationError, match="Parameter y has unsupported type Bad") as caught:
        custom_op(fresh_name(), both, mutates_args=())
    assert "dataclasses" in caught.value.supported


def test_clashing_names_are_refused():
    def fn(x, x_left, y): ...

    fn.__annotations__ = {"x": Pair, "x_left": Tensor, "y": Mode, "return": Tensor}
    with pytest.raises(SchemaError, match="would be called 'x_left'"):
        custom_op(fresh_name(), fn, mutates_args=())


def test_flat_operator_is_reachable():
    op = make(Mode)
    assert torch.equal(overload_of(op.qualname)(torch.ones(1), "ADD"), torch.ones(1))
    assert make_codec("y", set) is None


_PassedThrough = (
    getattr(opaque_object, "OpaqueBase", None) or opaque_object.CustomClassBase
)  # its name since 2.15


class Handle(_PassedThrough):
    """A value that the dispatcher passes through without looking at it."""

    def __init__(self, value):
        self.value = value


def test_opaque_arguments():
    library.register_opaque_type(Handle, typ="reference")
    assert library.is_opaque_type(Handle)

    def kernel(x, handle):
        return x * handle.value

    kernel.__annotations__ = {"x": Tensor, "handle": Handle, "return": Tensor}
    op = custom_op(fresh_name(), kernel, mutates_args=())
    op.register_fake(lambda x, handle: torch.empty_like(x))
    assert op(torch.ones(2), Handle(3.0)).tolist() == [3.0, 3.0]
