"""Order, fixpoint groups, records and metadata."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

import fxpasses
from fxpasses import (
    Contract,
    ContractError,
    Fixpoint,
    FixpointWarning,
    PassManager,
    claim,
    fixpoint,
    graph_pass,
    insert_call,
)
from fxpasses.passes import EliminateCommonSubexpressions, EliminateDeadCode, RemoveNoOps, default_passes
from tests.fxpasses.support import traced

aten = torch.ops.aten
X = torch.ones(2, 3)


def nothing(name, **contract):
    return graph_pass(lambda gm: False, name=name, **{"graphs": "any", **contract})


def order(*passes, kind="joint", **how):
    return [item.name for item in PassManager(passes, **how).order(kind)]


# --- contracts


def test_contracts_take_words_and_sets():
    contract = Contract("any", requires="a", provides=["b", "c"])
    assert contract.graphs == {"joint", "forward", "backward", "inference"}
    assert contract.requires == {"a"}
    assert contract == Contract(["any"], requires={"a"}, provides=("c", "b"))


@pytest.mark.parametrize(
    ("given", "named"),
    [({"graphs": "jiont"}, "jiont"), ({"numerics": "exact"}, "exact"), ({"metadata": "all"}, "all")],
)
def test_a_contract_says_what_it_does_not_know(given, named):
    with pytest.raises(ContractError, match=named):
        Contract(**given)


def test_a_pass_may_say_only_which_graphs_it_takes():
    class Short(fxpasses.Pass):
        name = "short"
        graphs = frozenset({"backward"})

        def apply(self, gm):
            return False

    assert Short().contract == Contract("backward")


def test_a_pass_needs_a_name_and_a_contract_that_is_one():
    class Nameless(fxpasses.Pass):
        def apply(self, gm):
            return False

    with pytest.raises(ContractError, match="Nameless has no name"):
        PassManager([Nameless()])
    with pytest.raises(ContractError, match=r"not a fxpasses\.Contract"):

        class Wrong(fxpasses.Pass):
            contract = "joint"

            def apply(self, gm):
                return False


# --- order


def test_passes_keep_the_order_given_where_contracts_say_nothing():
    assert order(nothing("c"), nothing("a"), nothing("b")) == ["c", "a", "b"]
    assert [p.name for p in PassManager(default_passes()).order("joint")] == [
        p.name for p in default_passes()
    ]


def test_what_is_required_comes_first():
    assert order(nothing("late", requires="fact"), nothing("x"), nothing("early", provides="fact")) == [
        "x",
        "early",
        "late",
    ]


def test_a_requirement_may_hold_from_the_start_or_from_the_joint_graph():
    late = nothing("late", requires="decomposed")
    assert order(late, holds=["decomposed"]) == ["late"]
    after = nothing("after", requires="early", graphs="backward")
    assert order(nothing("early", graphs="joint"), after, kind="backward") == ["after"]


def test_an_unmet_requirement_is_named():
    with pytest.raises(ContractError, match="'late' requires 'fact' on joint graphs") as caught:
        PassManager([nothing("late", requires="fact", graphs="joint")])
    assert caught.value.passes == ("late",)


def test_a_provider_for_other_graphs_does_not_count():
    with pytest.raises(ContractError, match="on backward graphs"):
        PassManager(
            [nothing("early", graphs="forward"), nothing("late", requires="early", graphs="backward")]
        )


def test_what_invalidates_comes_after_those_who_require():
    passes = [
        nothing("early", provides="fact"),
        nothing("spoils", invalidates="fact"),
        nothing("late", requires="fact"),
    ]
    assert order(*passes) == ["early", "late", "spoils"]
    assert order(passes[1], passes[0], passes[2]) == ["spoils", "early", "late"]


def test_a_pass_that_requires_two_things_of_one_provider():
    passes = [
        nothing("spoils", invalidates="a"),
        nothing("early", provides=["a", "b"]),
        nothing("spoils_too", invalidates="b"),
        nothing("late", requires=["a", "b"]),
    ]
    assert order(*passes) == ["spoils", "early", "late", "spoils_too"]


def test_what_has_to_spoil_in_between_is_an_error():
    with pytest.raises(ContractError, match="'spoils' invalidates 'fact'") as caught:
        PassManager(
            [
                nothing("early", provides="fact"),
                nothing("spoils", requires="early", provides="done", invalidates="fact"),
                nothing("late", requires=["fact", "done"]),
            ]
        )
    assert caught.value.passes == ("spoils", "late")


def test_cycles_name_every_pass():
    with pytest.raises(ContractError, match="'b' requires 'a', which 'a' provides") as caught:
        PassManager([nothing("a", requires="b"), nothing("b", requires="a")])
    assert set(caught.value.passes) == {"a", "b"}


@pytest.mark.parametrize("conflicts", ["other", "layout"])
def test_conflicts_name_both_passes(conflicts):
    ran = []
    mine = graph_pass(lambda gm: bool(ran.append(1)), name="mine", conflicts=[conflicts])
    with pytest.raises(ContractError, match="'mine' conflicts with pass 'other'") as caught:
        PassManager([mine, nothing("other", provides="layout")])
    assert caught.value.passes == ("mine", "other")
    assert not ran


def test_passes_for_different_graphs_do_not_conflict():
    PassManager([nothing("mine", conflicts="other", graphs="forward"), nothing("other", graphs="backward")])


def test_two_passes_of_one_name():
    with pytest.raises(ContractError, match=r"two passes are called 'same'.*test_manager.*test_manager"):
        PassManager([graph_pass(lambda gm: False, name="same"), graph_pass(lambda gm: True, name="same")])
    PassManager([EliminateDeadCode(), RemoveNoOps(), EliminateDeadCode()])


def test_the_backend_refuses_before_anything_runs():
    ran = []
    counts = graph_pass(lambda gm: bool(ran.append(1)), name="counts", conflicts=["other"])
    compiled = torch.compile(
        lambda x: x.sin(), backend="fxpasses", options={"passes": [counts, nothing("other")]}
    )
    with pytest.raises(Exception, match="conflicts with"):
        compiled(X)
    assert not ran


# --- fixpoint groups


def steps(count):
    @graph_pass(name="steps", graphs="any")
    def peel(gm):
        "Remove one of a chain of additions."
        adds = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
        if len(adds) <= count or not claim(adds[-1]):
            return False
        adds[-1].replace_all_uses_with(adds[-1].args[0])
        gm.graph.erase_node(adds[-1])
        return True

    return peel


def chain(x):
    for _ in range(5):
        x = x + 1
    return x


def test_a_group_runs_until_nothing_changes():
    gm = traced(chain, X)
    group = fixpoint(steps(1), EliminateDeadCode())
    assert isinstance(group, Fixpoint)
    runs = PassManager([group]).run(gm, "inference")
    assert len(gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)) == 1
    assert [run.round for run in runs if run.name == "steps"] == [1, 2, 3, 4, 5]
    assert not any(run.changed for run in runs[-2:])


def test_a_group_stops_at_its_limit_and_says_so():
    gm = traced(chain, X)
    with pytest.warns(FixpointWarning, match="limit of 2 rounds; 'steps' still changed"):
        runs = PassManager([fixpoint(steps(0), limit=2)]).run(gm, "inference")
    assert len(runs) == 2


def test_a_group_stands_in_the_order_as_one_pass():
    group = fixpoint(nothing("b", requires="a"), nothing("c"), name="group")
    assert order(group, nothing("a")) == ["a", "group"]
    with pytest.raises(ContractError, match="limit 0"):
        fixpoint(nothing("a"), limit=0)


# --- records


def test_a_run_tells_what_was_done():
    gm = traced(lambda x: (x.sin() + x.sin()).clone() * 2, X)
    (run,) = PassManager([EliminateCommonSubexpressions()]).run(gm, "inference")
    assert (run.removed, run.added, run.modified) == (("sin_1",), (), ("add",))
    assert run.matches == 1
    assert "sin_1: f32[2, 3] = aten.sin.default(x_1)" in run.before
    assert "sin_1" not in run.after
    assert "-add: f32[2, 3] = aten.add.Tensor(sin, sin_1)" in run.diff
    assert "+add: f32[2, 3] = aten.add.Tensor(sin, sin)" in run.diff
    assert "+0 -1 ~1 at 1 of 1 sites" in str(run)


def test_texts_are_those_of_the_time_of_the_run():
    gm = traced(lambda x: (x.sin() + x.sin()).clone() * 2, X)
    first, second = PassManager([EliminateCommonSubexpressions(), RemoveNoOps()]).run(gm, "inference")
    assert first.after == second.before
    assert "clone" in first.after
    assert "clone" not in second.after


def test_a_run_as_json():
    gm = traced(lambda x: x.sin() + x.sin(), X)
    (run,) = PassManager([EliminateCommonSubexpressions()]).run(gm, "inference")
    data = json.loads(run.to_json())
    assert data["name"] == "eliminate_common_subexpressions"
    assert data["diff"] == run.diff
    assert data["sites"][0]["node"] == "sin_1"
    assert data["seconds"] >= 0
    assert "before" not in json.loads(run.to_json(texts=False))


def test_a_changed_argument_is_a_change_too():
    @graph_pass(graphs="any")
    def sneaks(gm):
        (node,) = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
        node.args = (node.args[1], node.args[0])
        return False

    with pytest.raises(fxpasses.PassError, match="returned False but changed"):
        PassManager([sneaks]).run(traced(lambda x: x + x.sin(), X), "inference")


# --- metadata


def test_metadata_follows_the_graph():
    @graph_pass(graphs="any", metadata="outputs")
    def in_double(gm):
        (sine,) = gm.graph.find_nodes(op="call_function", target=aten.sin.default)
        (cosine,) = gm.graph.find_nodes(op="call_function", target=aten.cos.default)
        with gm.graph.inserting_before(sine):
            sine.args = (gm.graph.call_function(aten._to_copy.default, sine.args, {"dtype": torch.float64}),)
        with gm.graph.inserting_after(cosine):
            back = gm.graph.call_function(aten._to_copy.default, (cosine,), {"dtype": torch.float32})
        cosine.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
        return True

    gm = traced(lambda x: (x.sin().view(6).cos() + 1).exp(), X)
    untouched = gm.graph.find_nodes(op="call_function", target=aten.exp.default)[0].meta["val"]
    PassManager([in_double]).run(gm, "inference")
    types = {
        str(node.target): node.meta["val"].dtype for node in gm.graph.nodes if node.op == "call_function"
    }
    assert (
        types["aten.sin.default"] is types["aten.view.default"] is types["aten.cos.default"] is torch.float64
    )
    assert types["aten.add.Tensor"] is torch.float32
    assert gm.graph.find_nodes(op="call_function", target=aten.exp.default)[0].meta["val"] is untouched


def test_a_view_follows_its_base():
    @graph_pass(graphs="any")
    def copies_first(gm):
        (view,) = gm.graph.find_nodes(op="call_function", target=aten.view.default)
        with gm.graph.inserting_before(view):
            view.args = (insert_call(gm.graph, aten.clone.default, (view.args[0],), like=view), [6])
        return True

    gm = traced(lambda x: x.view(6).sin(), X)
    PassManager([copies_first]).run(gm, "inference")
    view = gm.graph.find_nodes(op="call_function", target=aten.view.default)[0]
    storages = [node.meta["val"].untyped_storage()._cdata for node in (view, view.args[0])]
    assert storages[0] == storages[1]


def test_symbolic_metadata_adds_no_guard():
    @graph_pass(graphs="any")
    def rewrites(gm):
        for node in gm.graph.find_nodes(op="call_function", target=aten.sin.default):
            with gm.graph.inserting_before(node):
                sizes = [
                    insert_call(gm.graph, aten.sym_size.int, (node.args[0], i), like=node) for i in (0, 1)
                ]
                flat = insert_call(gm.graph, aten.view.default, (node.args[0], [-1]), like=node)
                sine = gm.graph.call_function(aten.sin.default, (flat,))
                new = gm.graph.call_function(aten.view.default, (sine, sizes))
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
        return True

    gm = traced(lambda x: (x.sin() @ x.t()).sum(), X, dynamic=True)
    environment = gm.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0].node.shape_env
    guards = len(environment.guards)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PassManager([rewrites]).run(gm, "inference")
    assert len(environment.guards) == guards
    values = [node.meta["val"] for node in gm.graph.nodes if node.op == "call_function"]
    assert all(isinstance(value, (torch.Tensor, torch.SymInt)) for value in values)


def test_graphs_traced_on_real_tensors():
    from torch.fx.experimental.proxy_tensor import make_fx

    @graph_pass(graphs="any")
    def rewrites(gm):
        (node,) = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
        with gm.graph.inserting_before(node):
            new = insert_call(gm.graph, aten.sub.Tensor, node.args, like=node)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        return True

    gm = make_fx(lambda x: x.sin() + x.cos())(X)
    (run,) = PassManager([rewrites]).run(gm, "inference")
    assert run.changed
    torch.testing.assert_close(gm(X), X.sin() - X.cos())
