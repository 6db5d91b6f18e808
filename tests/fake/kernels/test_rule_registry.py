"""Rules are found by operator, once, and only for operators that exist."""

import pytest
import torch

import fake.kernels
from fake.kernels.rule_registry import _Registry

aten = torch.ops.aten


def _rule(mode, func, args, kwargs):
    return "answer"


def test_a_rule_is_found_by_the_operators_full_name():
    registry = _Registry()
    registry.rule("aten::sort.stable")(_rule)
    assert registry.find(aten.sort.stable) is _rule
    assert registry.find(aten.sort.default) is None


def test_a_rule_that_comes_later_is_found_although_the_answer_was_remembered():
    registry = _Registry()
    assert registry.find(aten.add.Tensor) is None
    registry.rule_when(lambda func: func is aten.add.Tensor)(_rule)
    assert registry.find(aten.add.Tensor) is _rule


def test_a_name_goes_before_a_family_and_an_earlier_family_before_a_later_one():
    registry = _Registry()
    first, second = (lambda *_: 1), (lambda *_: 2)
    registry.rule_when(lambda func: True)(first)
    registry.rule_when(lambda func: True)(second)
    registry.rule("aten::add.Tensor")(_rule)
    assert registry.find(aten.add.Tensor) is _rule
    assert registry.find(aten.sub.Tensor) is first


def test_two_rules_for_one_operator_are_refused():
    registry = _Registry()
    registry.rule("aten::add.Tensor")(_rule)
    with pytest.raises(ValueError, match=r"aten::add\.Tensor has two rules"):
        registry.rule("aten::add.Tensor")(_rule)


def test_every_registered_name_is_an_operator_of_this_torch():
    known = set(torch._C._dispatch_get_all_op_names())
    assert [name for name in fake.kernels.rules() if name not in known] == []


def test_operators_of_other_namespaces_and_higher_order_operators_have_no_rule():
    assert fake.kernels.find(torch.ops.prims.add.default) is None
    assert fake.kernels.find(torch.ops.higher_order.cond) is None
