"""Arguments of calls that a plan may serve."""

import ast

import pytest
import torch

from fxpasses.plans import native
from fxpasses.plans._torch import TENSOR_LAYOUT
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.inputs.arguments import SameArguments, describe_arguments
from fxpasses.plans.objects._torch_notes import PROPAGATED
from fxpasses.plans.recording.generated import Module
from fxpasses.plans.running.plan import Plan


def test_a_hint_of_aotautograd_is_no_attribute_of_an_argument():
    plain, hinted = torch.ones(2), torch.ones(2)
    setattr(hinted, PROPAGATED, {0})
    described = [describe_arguments((x,), {}, lambda tensor: None)[0] for x in (plain, hinted)]
    assert described[0] == described[1]
    hinted.mine = 1
    with pytest.raises(NoPlan, match="attributes of its own"):
        describe_arguments((hinted,), {}, lambda tensor: None)


def test_sizes_of_what_an_argument_is_a_view_of():
    plan = object.__new__(Plan)
    plan._accepts, plan._guard_arguments, plan._tensors_read = lambda base: base.size(0) == 4, [(0, True)], {}
    plan.open = {}
    assert plan.accepts([torch.ones(4, 2)[:2]])
    assert not plan.accepts([torch.ones(5, 2)[:2]])
    assert not plan.accepts([torch.ones(2, 2)])


MODEL = [torch.nn.Parameter(torch.ones(2, 3)), torch.ones(2, 3)]
MEMORY = torch.ones(20)
_HINTED, _NAMED = torch.ones(2, 3), torch.ones(2, 3)
setattr(_HINTED, PROPAGATED, {0})
_NAMED.mine = 1
_X, _Y = torch.ones(2, 3), torch.ones(3)
CALLS = {
    "the same": ((_X, _Y, 1), {"flag": None}, True),
    "others": ((torch.zeros(2, 3), torch.zeros(3), 1), {"flag": None}, True),
    "a number made anew": ((_X, _Y, int("1")), {"flag": None}, True),
    "a hint": ((_HINTED, _Y, 1), {"flag": None}, True),
    "what autograd knows": ((torch.ones(2, 3).requires_grad_().detach(), _Y, 1), {"flag": None}, True),
    "another size": ((torch.ones(2, 4), _Y, 1), {"flag": None}, False),
    "other strides": ((torch.ones(3, 2).t(), _Y, 1), {"flag": None}, False),
    "another place": ((MEMORY[1:7].view(2, 3), _Y, 1), {"flag": None}, False),
    "another dtype": ((_X.double(), _Y, 1), {"flag": None}, False),
    "negative": ((torch._neg_view(_X), _Y, 1), {"flag": None}, False),
    "more dimensions": ((torch.ones(2, 3, 1), _Y, 1), {"flag": None}, False),
    "a gradient": ((torch.ones(2, 3).requires_grad_(), _Y, 1), {"flag": None}, False),
    "a result": ((_X * torch.ones(1).requires_grad_(), _Y, 1), {"flag": None}, False),
    "an inference tensor": ((torch.inference_mode()(torch.ones)(2, 3), _Y, 1), {"flag": None}, False),
    "a parameter": ((torch.nn.Parameter(_X), _Y, 1), {"flag": None}, False),
    "of the model": ((MODEL[1], _Y, 1), {"flag": None}, False),
    "memory of one": ((MEMORY[:6].view(2, 3), MEMORY[:3], 1), {"flag": None}, False),
    "attributes": ((_NAMED, _Y, 1), {"flag": None}, False),
    "no tensor": ((None, _Y, 1), {"flag": None}, False),
    "another number": ((_X, _Y, 2), {"flag": None}, False),
    "a flag": ((_X, _Y, True), {"flag": None}, False),
    "one more": ((_X, _Y, 1, 1), {"flag": None}, False),
    "one less": ((_X, _Y), {"flag": None}, False),
    "another name": ((_X, _Y, 1), {"flags": None}, False),
    "another value": ((_X, _Y, 1), {"flag": 0}, False),
}


@pytest.mark.parametrize("call", CALLS)
def test_arguments_are_told_from_others(checks, call):
    args, kwargs, same = CALLS[call]
    known = SameArguments((_X, _Y, 1), {"flag": None}, [_X, _Y], [], MODEL)
    assert (known._native_check is not None) == (checks == "memory")
    found = known.tensors(args, kwargs)
    assert (found is not None) == same
    assert found is None or list(map(id, found)) == list(map(id, args[:2]))
    if checks == "memory":
        certain = known._native_check(args, kwargs)
        assert same or certain is None
        assert certain is not None or call != "the same"


def test_other_tensors_are_known_by_their_memory():
    """Not each: bytes between the fields of a tensor may be anything, and then it is asked in the other way."""

    def pair():
        return torch.randn(2, 3), torch.randn(3)

    found = []
    for _ in range(20):
        x, y = pair()
        known = SameArguments((x, y, 1), {"flag": None}, [x, y], [], MODEL)
        if known._native_check is None:
            pytest.skip("the layout of tensors is not known here")
        found += [known._native_check((*pair(), 1), {"flag": None}) is not None for _ in range(5)]
    assert any(found)


def test_a_list_that_was_empty(checks):
    held = []
    known = SameArguments((_X, held), {}, [_X], [], [])
    assert known.tensors((_X, held), {}) is not None
    held.append(1)
    assert known.tensors((_X, held), {}) is None


def test_wrong_arguments_of_the_library_are_refused(checks):
    if checks != "memory":
        pytest.skip("there is nothing to refuse")
    library = native.library()
    known = SameArguments((_X,), {}, [_X], [], [])
    for call in (
        lambda: known._native_check([], {}),
        lambda: library.unchanged((1,), (1,)),
        lambda: library.Tensors((), ()),
        lambda: library.Arguments((_X,), {}, (True,), (), TENSOR_LAYOUT),
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(TypeError, match="same length"):
        library.unchanged((), (1,))
    with pytest.raises(ZeroDivisionError):
        library.unchanged(((divmod, 1, 0),), (1,))
    with pytest.raises(ValueError, match="not a kind for each"):
        library.Arguments((_X,), {}, (), (), TENSOR_LAYOUT)


def test_of_a_base_only_symbolic_sizes_are_asked():
    code = """
def accepts(x, base):
    _s0 = x.size(0)
    _s1 = base.size(0)
    return bool(x.size(1) == 8 and base.size(1) == 8 and base.stride(0) == 8 and _s1 >= 2 * _s0)
"""
    module = Module(fixed=False)
    assert module.add_guards(code, ["base"]) == ["x", "base"]
    accepts = {}
    exec(ast.unparse(ast.fix_missing_locations(ast.Module(module._body, []))), accepts)
    wide = torch.ones(9, 16)
    assert accepts["accepts"](torch.ones(4, 8), wide)
    assert not accepts["accepts"](torch.ones(5, 8), wide)
    assert Module(fixed=False).add_guards(
        code.replace(" and _s1 >= 2 * _s0", "").replace("_s1 = base.size(0)", "pass"), ["base"]
    ) == ["x"]
