"""How long operators live: replacement, destruction, copies."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fake import library
from fake.library import CustomOpDef, custom_op, registry
from fake.library.errors import OpDestroyedError, OpReplacedWarning, ProbeError, UnknownOpError
from tests.fake.library.support import NAMESPACE, fresh_name, numpy_sin, overload_of


def test_replacement_warns():
    name = fresh_name()
    first = custom_op(name, lambda x: x.sin(), mutates_args=(), schema="(Tensor x) -> Tensor")
    x = torch.randn(3)
    first(x)
    with pytest.warns(OpReplacedWarning, match="registered again") as caught:
        second = custom_op(name, lambda x: x.cos(), mutates_args=(), schema="(Tensor x) -> Tensor")
    assert caught[0].filename == __file__
    assert torch.equal(second(x), x.cos())
    assert torch.equal(overload_of(name)(x), x.cos())
    with pytest.raises(OpDestroyedError, match="registered again"):
        first(x)


def test_failed_replacement_leaves_the_old_operator():
    name = fresh_name()
    first = custom_op(name, lambda x: x.sin(), mutates_args=(), schema="(Tensor x) -> Tensor")
    with pytest.raises(ValueError, match="annotation"):
        custom_op(name, lambda x: x.cos(), mutates_args=())
    assert torch.equal(first(torch.ones(1)), torch.ones(1).sin())


def test_operator_outlives_its_python_object():
    def define():
        op = numpy_sin()
        return op.qualname

    name = define()
    gc.collect()
    x = torch.randn(3, requires_grad=True)
    overload_of(name)(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_destroy():
    op = numpy_sin()
    assert op.qualname in registry.names()
    assert library.destroy(op)
    assert not library.destroy(op)
    with pytest.raises(OpDestroyedError):
        op(torch.ones(1))
    assert not hasattr(getattr(torch.ops, NAMESPACE), op.qualname.split("::")[1])


@pytest.mark.parametrize(
    "use",
    [
        lambda op: op.schema,
        lambda op: op.overload,
        lambda op: op.register_kernel("cpu", lambda x: x.sin()),
        lambda op: op.register_fake(torch.empty_like),
        lambda op: op.register_autograd(lambda ctx, grad: grad),
        lambda op: op.register_vmap(lambda info, in_dims, x: (x, 0)),
        lambda op: op.register_torch_dispatch(FakeTensorMode, lambda mode, func, types, args, kwargs: None),
        lambda op: op.register_autocast("cpu", torch.bfloat16),
        lambda op: op.register_effect(None),
        lambda op: op.set_kernel_enabled("cpu", False),
        lambda op: library.register_fake(op, torch.empty_like),
        lambda op: library.opcheck(op, (torch.ones(1),)),
        lambda op: library.probe(op, [(torch.ones(1),)]),
    ],
)
def test_a_destroyed_operator_cannot_be_used(use):
    op = numpy_sin()
    library.destroy(op)
    with pytest.raises(OpDestroyedError, match=op.qualname):
        use(op)
    assert op.qualname not in registry.names()


def test_a_destroyed_overload_is_not_called():
    op = numpy_sin()
    overload = op.overload
    library.destroy(op)
    with pytest.raises(UnknownOpError, match="was destroyed"):
        library.opcheck(overload, (torch.ones(1),))
    with pytest.raises(ProbeError, match="was destroyed"):
        library.probe(overload, [(torch.ones(1),)])


@pytest.mark.filterwarnings("ignore::fake.library.errors.OpReplacedWarning")
def test_destroying_a_replaced_operator_leaves_its_successor():
    name = fresh_name()
    first, second = (
        custom_op(name, lambda x: x.sin(), mutates_args=(), schema="(Tensor x) -> Tensor") for _ in range(2)
    )
    assert not library.destroy(first)
    assert torch.equal(second(torch.ones(1)), torch.ones(1).sin())


def test_copy_and_pickle():
    op = numpy_sin()
    assert copy.deepcopy({"op": op})["op"] is op
    assert copy.copy(op) is op
    assert pickle.loads(pickle.dumps(op)) is op


def test_is_a_torch_custom_op():
    op = numpy_sin()
    assert isinstance(op, CustomOpDef)
    assert isinstance(op, torch._library.custom_ops.CustomOpDef)
    torch.library.register_fake(op.qualname, lambda x: x.new_empty(7))
    with FakeTensorMode():
        assert op(torch.ones(3)).shape == (7,)
    assert torch.library.opcheck(numpy_sin(), (torch.randn(3),))["test_schema"] == "SUCCESS"
