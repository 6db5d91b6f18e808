"""The quicker walks over arguments against torch's own."""

import collections
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode as TorchMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils import _pytree

import fake
from fake.tracing import shortcuts
from fake.tracing.shortcuts import leaves_of_arguments, map_arguments, visit_arguments


class Pair(NamedTuple):
    first: Any
    second: Any


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3)
    return st.one_of(
        items,
        items.map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.builds(Pair, inner, inner),
        items.map(collections.deque),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(collections.OrderedDict),
    )


LEAVES = st.one_of(
    st.integers(0, 3),
    st.booleans(),
    st.none(),
    st.floats(0, 1),
    st.sampled_from(
        [torch.float32, torch.Size([2, 3]), torch.device("cpu"), "text", slice(1, 2), object, {1, 2}]
    ),
)
TREES = st.recursive(LEAVES, containers, max_leaves=8)


@given(TREES, st.sampled_from([int, (int, float), tuple, str, object]))
def test_maps_as_torch_does(tree: Any, kinds: Any) -> None:
    def changed(value: Any) -> Any:
        return ("changed", value)

    expected = _pytree.tree_map_only(kinds, changed, tree)
    found = map_arguments(kinds, changed, tree)
    assert repr(found) == repr(expected)
    assert _pytree.tree_structure(found) == _pytree.tree_structure(expected)


@given(TREES, st.sampled_from([int, (int, float), str]))
def test_visits_the_leaves_that_torch_visits(tree: Any, kinds: Any) -> None:
    ours: list[Any] = []
    theirs: list[Any] = []
    assert visit_arguments(kinds, ours.append, tree) is tree
    _pytree.tree_map_only_(kinds, theirs.append, tree)
    assert list(map(repr, ours)) == list(map(repr, theirs))


@given(TREES)
def test_finds_the_leaves_that_torch_finds(tree: Any) -> None:
    assert list(map(repr, leaves_of_arguments(tree))) == list(map(repr, _pytree.tree_iter(tree)))


def test_a_predicate_in_the_place_of_types_and_is_leaf() -> None:
    tree = (1, [2, (3, 4)])
    assert map_arguments(lambda v: v == 2, str, tree) == (1, ["2", (3, 4)])
    pairs = map_arguments(tuple, len, tree, is_leaf=lambda v: isinstance(v, tuple) and v != tree)
    assert pairs == (1, [2, 2])


def test_tensors_are_leaves_whatever_their_class() -> None:
    class Own(torch.Tensor):
        pass

    own = torch.rand(2).as_subclass(Own)
    tree = (own, torch.nn.Parameter(torch.rand(1)), {"a": torch.rand(3)})
    counted = map_arguments(torch.Tensor, lambda t: t.numel(), tree)
    assert counted == (2, 1, {"a": 3})


def test_functionalization_is_not_asked_for_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = shortcuts._FUNCTIONALIZE

    def counting(mode: Any, func: Any, *given: Any) -> Any:
        asked.append(func)
        return original(mode, func, *given)

    monkeypatch.setattr(shortcuts, "_FUNCTIONALIZE", counting)
    device = torch.ops.prim.device.default
    with fake.accelerate(), TorchMode() as mode, FunctionalTensorMode():
        value = mode.from_tensor(torch.empty(2, 3))
        functional = FunctionalTensor.to_functional(value)
        assert functional.device == device(value) == torch.device("cpu")
        assert device not in asked
        mode.in_kernel_invocation = True
        device(value)
        mode.in_kernel_invocation = False
        torch.sin(functional)
    assert asked.count(device) == 1  # inside of a kernel it is for torch to say
    assert torch.ops.aten.sin.default in asked
    assert FunctionalTensorMode.__torch_dispatch__ is original
