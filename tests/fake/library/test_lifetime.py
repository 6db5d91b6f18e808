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
from fake.library.errors import OpDestroyedError, OpReplacedWarning
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
