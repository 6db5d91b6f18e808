"""Passes made of functions: their options, wherever a pass may be written."""

import functools
from typing import Literal

import pytest
import torch

import fxpasses
from fxpasses import OptionsError
from fxpasses.pass_manager.specification import parse_pass


@fxpasses.graph_pass(graphs="inference", numerics="none")
def shift(gm, by: float = 1.0, *, often: bool = False):
    "x + y is x + y + by."
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        if "shifted" in node.meta or not fxpasses.claim(node):
            continue
        with gm.graph.inserting_after(node):
            new = fxpasses.insert_call(gm.graph, node.target, (node, by), like=node)
        node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
        node.meta["shifted"] = new.meta["shifted"] = True
        changed = True
    return changed


def run(*passes):
    torch._dynamo.reset()
    options = {"passes": [*passes], "compiler": "eager"}
    return torch.compile(lambda x: x + x, backend="fxpasses", options=options)(torch.ones(1)).item()


def test_the_function_gets_the_options():
    assert run(shift) == 3.0
    assert run(shift(by=5.0)) == 7.0
    with fxpasses.use_passes(shift):
        assert run("shift{by=7}") == 9.0


def test_it_is_for_the_graphs_that_it_was_made_for():
    assert shift.graphs == shift(by=5.0).graphs == shift.contract.graphs == {"inference"}


def test_written_as_text():
    assert str(shift) == "shift"
    assert str(shift(by=0.5, often=True)) == "shift{by=0.5 often=True}"
    assert parse_pass(str(shift(by=0.5)), {"shift": shift}) == shift(by=0.5)
    assert shift(by=1.0) == shift != shift(by=2.0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("shift{bye=1}", "unknown pass option 'bye'; did you mean 'by'?"),
        ("shift{by=far}", "a value of type float"),
        ("shift{function=1}", "unknown pass option 'function'"),
    ],
)
def test_wrong_options_in_text(text, problem):
    with pytest.raises(OptionsError, match=problem.replace("?", r"\?")):
        parse_pass(text, {"shift": shift})


def test_a_wrong_option_in_a_call():
    with pytest.raises(TypeError, match="pass 'shift' has no option 'bye'; its options: by, often"):
        shift(bye=1.0)


def test_options_are_factors_of_the_identity():
    assert shift.identify().differences(shift(by=2.0).identify()) == ["option by"]
    assert shift.identity() == shift(by=1.0).identity() is not None


def test_what_is_no_plain_function():
    partial = fxpasses.graph_pass(functools.partial(lambda gm, k: False, k=3), name="partial")
    assert str(partial(k=4)) == "partial{k=4}"
    assert "partial" in repr(partial)
    assert run(partial) == 2.0


def test_both_sides_of_a_conflict_are_shown_with_their_place():
    other = fxpasses.graph_pass(lambda gm: False, name="shift")
    with fxpasses.use_passes(shift), pytest.raises(fxpasses.ContractError) as caught:
        with fxpasses.use_passes(other):
            pass
    assert str(caught.value).count(__file__) == 2


@pytest.mark.parametrize(
    "option",
    [{"limit": "x"}, {"limit": 1.5}, {"limit": None}, {"rate": "1"}, {"kind": "c"}, {"pair": (1, 2)}],
)
def test_options_have_the_types_that_the_function_says(option):
    @fxpasses.graph_pass
    def typed(gm, limit: int = 1, rate: float = 0.5, kind: Literal["a", "b"] = "a", pair: tuple[int, str] = (1, "x"), free=3):  # fmt: skip
        return False

    with pytest.raises(OptionsError, match=f"'typed: {next(iter(option))}'"):
        typed(**option)
    assert typed(limit=2, rate=1, kind="b", pair=(2, "y"), free=None).rate == 1
