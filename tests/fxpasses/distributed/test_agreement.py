"""Ranks that compile other collectives than the others are named before they run."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import fx

from fxpasses.distributed import answering, decision, gate
from fxpasses.distributed.watching import EXIT_CODE
from fxpasses.errors import OptionsError, RankMismatchError
from fxpasses.ranks import here
from tests.fxpasses.distributed.processes import ended, job


@pytest.fixture(scope="module")
def outcomes():
    return job("job.py")


def _error(outcomes, case):
    for rank in outcomes:
        assert "error" in rank[case], rank[case]
        assert sorted(rank[case]["ranks"]) == [0, 1]
    return outcomes[0][case]["error"]


@pytest.mark.slow
def test_equal_graphs_run(outcomes):
    for rank in outcomes:
        assert rank["same"]["result"] == [[7.0, 7.0], [7.0, 7.0]]


@pytest.mark.slow
def test_the_script_of_the_tutorial(outcomes):
    for rank in outcomes:
        same, verdicts = rank["script_of_the_tutorial"]["result"]
        assert same
        assert verdicts
        assert all(verdict == "the same values" for verdict in verdicts)


@pytest.mark.slow
def test_ranks_schedule_alike(outcomes):
    assert [rank["scheduled"].get("result", rank) for rank in outcomes] == [[[5.0, 5.0]] * 2] * 2


@pytest.mark.slow
def test_other_passes_are_named(outcomes):
    text = _error(outcomes, "other_passes")
    assert "bucket_collectives" in outcomes[0]["other_passes"]["factor"]
    assert "all_reduce(float32[8], 'sum')" in text
    assert "all_reduce(float32[4], 'sum')" in text


@pytest.mark.slow
def test_two_equal_sums_that_swap_are_told_apart(outcomes):
    text = _error(outcomes, "swapped")
    assert "number 0 is all_reduce(float32[4], 'sum') of " in text


@pytest.mark.slow
def test_equal_sums_that_swap_are_told_apart_where_one_result_depends_on_both(outcomes):
    text = _error(outcomes, "swapped_where_one_result_has_both")
    assert "of x -> output 0, output 1 on rank" in text
    assert "of x -> output 1 on rank" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("swapped_of_one_input", "= sin(x) of x -> output 0 on rank"),
        ("swapped_in_place", "= sin(x) -> a in place of x on rank"),
        ("swapped_in_inner_regions", "all_reduce(float32[2, 4], 'sum') of "),
    ],
)
def test_sums_that_swap_are_told_apart_by_what_they_are_computed_from(outcomes, case, told):
    assert told in _error(outcomes, case)


@pytest.mark.slow
def test_a_swap_inside_of_the_compiler_is_found(outcomes):
    text = _error(outcomes, "swapped_by_inductor")
    assert "after the compiler's own passes" in text


@pytest.mark.slow
def test_other_sizes_are_refused(outcomes):
    text = _error(outcomes, "other_sizes")
    assert "float32[4]" in text
    assert "float32[5]" in text
    assert outcomes[0]["other_sizes"]["factor"] == "shape of input value"


@pytest.mark.slow
def test_a_rank_that_captures_its_backward_pass_is_named(outcomes):
    _error(outcomes, "captured_on_one_rank")
    assert outcomes[0]["captured_on_one_rank"]["factor"] == "what is compiled"


@pytest.mark.slow
def test_two_functions_that_send_the_same_are_told_apart(outcomes):
    text = _error(outcomes, "called_in_another_order")
    assert "in another order" in text
    assert outcomes[0]["called_in_another_order"]["factor"] == "order of calls"
    values = outcomes[0]["called_in_another_order"]["values"]
    assert ["doubled" in value for value in values].count(True) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "values"),
    [
        (
            "branches_in_another_order",
            ["all_reduce(float32[4], 'sum') of a", "all_reduce(float32[4], 'sum') of b"],
        ),
        (
            "branches_in_another_order_after_one_was_late",
            ["all_reduce(float32[4], 'sum') of a", "all_reduce(float32[4], 'sum') of b"],
        ),
        ("reductions_in_another_order", ["all_reduce(float32[4], 'max')", "all_reduce(float32[4], 'sum')"]),
        (
            "known_sizes_in_another_order",
            ["all_reduce(float32[4], 'sum') of value", "all_reduce(float32[6], 'sum') of value"],
        ),
    ],
)
def test_two_graphs_of_one_function_are_told_apart(outcomes, case, values):
    _error(outcomes, case)
    for rank in outcomes:
        assert sorted(value.partition(" ->")[0] for value in rank[case]["values"]) == values


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_in_other_groups_are_named(outcomes):
    assert [outcomes[rank]["crossed_groups"]["factor"] for rank in (0, 1)] == ["process group"] * 2
    assert sorted(outcomes[0]["crossed_groups"]["ranks"]) == [0, 1]


@pytest.mark.slow
def test_ranks_that_wait_for_one_another_in_a_circle_are_named():
    for outcome in job("circle.py", processes=3):
        assert sorted(outcome["ranks"]) == [0, 1, 2]
        assert len(set(outcome["groups"])) == 3


@pytest.mark.slow
def test_the_order_of_groups_in_one_graph_is_compared(outcomes):
    """Each rank would wait in another group."""
    text = _error(outcomes, "groups_in_another_order")
    assert "after 1 of group" in text


@pytest.mark.slow
def test_ranks_that_shard_other_parameters_are_told_before_anything_is_sent(outcomes):
    for rank in outcomes:
        layers, plan = rank["sharded_otherwise"]["result"]
        assert "number 4 is" in layers
        assert "scatter(float32[4, 4], dimension 0) of 2.weight" in layers
        assert "scatter(float32[4, 4], dimension 1) of 0.weight" in plan


@pytest.mark.slow
def test_one_rank_decides_what_is_saved(outcomes):
    assert "RankMismatch" not in _error(outcomes, "other_budgets")  # only compared: the gathers differ
    assert [rank["other_budgets_agreed"].get("result", rank) for rank in outcomes] == [True, True]


@pytest.mark.slow
def test_decisions_about_another_graph_mean_nothing(outcomes):
    text = _error(outcomes, "other_graphs_agreed")
    assert text == outcomes[1]["other_graphs_agreed"]["error"]
    assert "traced different graphs of frame" in text
    assert "aten.cos" in text
    assert "aten.sin" in text


@pytest.mark.slow
def test_a_rank_that_waits_for_a_decision_nobody_makes_is_told(outcomes):
    for rank in outcomes:
        error = rank["agreed_on_one_rank"]["error"]
        assert "rank 0 has compiled it without deciding" in error
        assert "on all ranks, or on none" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("break_on_one_rank", [[8.0, 8.0]] * 2),
        ("recompiled_on_one_rank", [[6.0, 7.0, 8.0]] * 2),
        ("compiled_for_each_size_on_one_rank", [[4.0, 6.0, 5.0, 4.0]] * 2),
        ("uneven_splits", [[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0]]),
        ("other_groups", [2.0, 5.437]),
        ("nothing_to_add", [[[6.0] * 4, [0.0] * 4, [6.0] * 4, [2.0] * 4]] * 2),
        ("more_results_now_and_then", [[4.0, 4.0]] * 2),
        ("uneven_shards_agreed", [True] * 2),
        ("captured_backward_pass", [[[3.0], [5.0], [7.0], 0]] * 2),
        ("late", [4.0, 4.0]),
        ("unchecked", [5.0, 5.0]),
    ],
)
def test_harmless_differences_pass(outcomes, case, expected):
    assert [rank[case].get("result", rank[case]) for rank in outcomes] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("size_of_one_call", ["6", "7"]),
        ("size_of_the_first_call", ["4", "5"]),
        ("size_seen_before", ["4", "6"]),
    ],
)
def test_a_symbolic_size_that_differs_in_one_call_is_named(outcomes, case, sizes):
    text = _error(outcomes, case)
    assert f"all_reduce(float32[{sizes[0]}], 'sum')" in text
    for rank in outcomes:
        assert rank[case]["factor"] == "dimension 0 of x"
        assert sorted(rank[case]["values"]) == sizes


@pytest.mark.slow
def test_a_rank_that_runs_the_graph_that_it_has_is_named(outcomes):
    """Rank 0 is inside of it; the other one would wait for it for ever."""
    stayed, alone = (rank["alone"] for rank in outcomes)
    assert stayed["notes"] == ["Rank 1 has ended."]  # gloo's error knows no ranks
    assert alone["ranks"] == [0, 1]
    assert "1 in the inference graph of frame 0 on rank 0, 2 in the inference graph" in alone["error"]


def test_ranks_in_eager_collectives_are_stuck_only_if_all_missing_ones_are(monkeypatch):
    now = 0.0
    monkeypatch.setattr(gate, "time", SimpleNamespace(monotonic=lambda: now))
    eager = gate.EagerCollectives(known=True)
    assert [eager.of_all([1, 2], rank, "all_reduce") for rank in (1, 2)] == ["", ""]
    now = gate.STUCK_AFTER + 1
    assert eager.of_all([1, 2], 2, "") == ""  # it went on
    assert eager.of_all([1, 2], 1, "all_reduce") == ""
    assert eager.of_all([1], 1, "all_reduce") == "all_reduce"
    assert eager.of_all([1], 1, "all_gather") == ""
    assert gate.EagerCollectives(known=False).of_all([1], 1, "all_reduce") == ""


def test_a_rank_that_is_late_and_comes_is_waited_for(monkeypatch):
    """Its call has begun before it is at the gate: whoever went on then would not compare the next call, and another graph there gave wrong sums."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(gate, "job_store", lambda: store)
    monkeypatch.setattr(gate, "ASK_AFTER", 0.01)
    monkeypatch.setattr(gate.HERE, "compared", {})
    monkeypatch.setattr(gate.Answering, "end_of", lambda rank: "")
    call = gate.CollectiveCall("all_reduce", "'sum'", ("float32[4]",), "a")
    offers = [gate.Offer(rank, "graph", "forward step", "", (call,), None, {}) for rank in (0, 1)]
    gates = []
    for rank in (0, 1):
        monkeypatch.setattr(gate.dist, "get_rank", lambda rank=rank: rank)
        gates.append(gate.Gate("world", (0, 1), 3))
    asked = []

    def ask(rank, key, number):
        asked.append(rank)
        if len(asked) == 3:
            assert gates[1].all_send(offers[1], exchangeable=True)
        return {"sent": offers[1].to_json(), "comes": True, "waits": None, "eager": ""}

    monkeypatch.setattr(gate.Answering, "ask", ask)
    monkeypatch.setattr(gate.dist, "get_world_size", lambda: 2)
    assert not gates[0].all_send(offers[0], exchangeable=True)
    assert gates[0].come(offers[0], None, False) == gate.Opened(False, False, as_before=True)
    assert len(asked) == 3


@pytest.mark.parametrize("how", ["opened", "closed"])
def test_a_gate_that_another_rank_was_faster_to_open_is_not_as_before(monkeypatch, how):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(gate, "job_store", lambda: store)
    monkeypatch.setattr(gate.HERE, "compared", {})
    monkeypatch.setattr(gate.dist, "get_rank", lambda: 1)
    call = gate.CollectiveCall("all_reduce", "'sum'", ("float32[4]",), "a")
    offer = gate.Offer(1, "graph", "forward step", "", (call,), None, {})
    own = gate.Gate("world", (1,), 3)
    own._open() if how == "opened" else own.refuse(RankMismatchError("rank 0 gave up", (0,)))
    assert not own.all_send(offer, exchangeable=False)


def test_a_rank_answers_before_it_compiles(monkeypatch):
    """One that stands in eager's collectives could not be told from a slow one."""
    introduced = []
    monkeypatch.setattr(here, "ensure_answering", lambda: introduced.append(1))
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    before = set(threading.enumerate())
    for world in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("RANK", "0")
        here.answer_once_initialized()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert introduced == [1]


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_compiles_is_named_at_once():
    """It does not say that it ends: the operating system does, long before ``SILENT_AFTER``."""
    (outcome,) = job("killed.py", killed=(1,))
    assert outcome["ranks"] == [1]
    assert outcome["error"].endswith("rank 1 does not come: it was killed, or crashed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "backward",
            [
                "in the backward graph of frame 0 on rank 0",
                "in the forward graph of frame 0 on rank 1",
                "leaves out",
            ],
        ),
        (
            "more",
            [
                "rank 1 is inside of the forward graph",
                "rank 0 is inside of barrier, called in",
                "makes once more",
            ],
        ),
    ],
)
def test_ranks_that_leave_out_a_call_end_with_the_reason(what, told):
    """Both know both halves; the next forward pass of one meets the backward pass of the other, or nothing."""
    done = ended("stuck.py", what)
    assert EXIT_CODE in [rank.returncode for rank in done], [rank.stderr[-2000:] for rank in done]
    error = next(rank.stderr for rank in done if rank.returncode == EXIT_CODE)
    assert all(part in error for part in told), error[-2000:]


def test_a_rank_that_decides_for_others_and_was_killed_is_named(monkeypatch):
    monkeypatch.setattr(decision, "_published", lambda rank: None)
    monkeypatch.setattr(decision, "wait_for_key", lambda *args: False)
    monkeypatch.setattr(decision.Answering, "end_of", lambda rank: "was killed")
    monkeypatch.setattr(decision.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(decision.dist, "get_world_size", lambda: 2)
    leader = decision._Leader(0, "frame 0", 1, [])
    leader._store = SimpleNamespace(check=lambda keys: False)
    with pytest.raises(
        RankMismatchError, match=r"waits for what rank 0 decides.*rank 0 was killed"
    ) as caught:
        leader.decision("a graph")
    assert caught.value.ranks == (0,)


@pytest.mark.parametrize("saved", ["shard", "cut"])
def test_ranks_agree_where_only_one_of_them_pads_its_shard(monkeypatch, saved):
    """A call that does nothing to a rank's sizes is not in its graph, and the next one of its kind has another name there."""

    def joint(missing):
        graph = fx.Graph()
        pad = torch.ops.aten.constant_pad_nd.default
        own = shard = graph.placeholder("shard")
        if missing:
            shard = graph.call_function(pad, (shard, [0, 0, 0, missing]))
        whole = graph.call_function(torch.ops.aten.repeat.default, (shard, [2, 1]))
        cut = graph.call_function(pad, (whole, [0, 0, 0, -missing]))
        graph.output(graph.call_function(torch.ops.aten.sin.default, (cut,)))
        return graph, {"shard": own, "cut": cut}[saved].name

    store = torch.distributed.HashStore()
    monkeypatch.setattr(decision, "job_store", lambda: store)
    monkeypatch.setattr(decision.Answering, "ensure", lambda: None)
    monkeypatch.setattr(decision, "ranks_of", lambda group: [0, 1])
    found = []
    for rank, missing in enumerate((0, 1)):
        monkeypatch.setattr(decision.HERE, "decided", {})
        monkeypatch.setattr(decision.HERE, "rounds", {})
        monkeypatch.setattr(decision.dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(decision.dist, "get_world_size", lambda: 2)
        graph, name = joint(missing)
        found.append((decision.decide("frame 0", graph, ["0"], [name] if rank == 0 else []), name))
    assert [names for names, _ in found] == [[name] for _, name in found]


def test_what_is_decided_holds_for_the_same_graph_alone(monkeypatch):
    """Calls of the same names in the same order may be given other values."""

    def joint(second):
        graph = fx.Graph()
        given = graph.placeholder("x")
        nodes = [given, graph.call_function(torch.ops.aten.sin.default, (given,))]
        graph.output(graph.call_function(torch.ops.aten.cos.default, (nodes[second],)))
        return graph

    store = torch.distributed.HashStore()
    monkeypatch.setattr(decision, "job_store", lambda: store)
    monkeypatch.setattr(decision.Answering, "ensure", lambda: None)
    monkeypatch.setattr(decision, "ranks_of", lambda group: [0])
    monkeypatch.setattr(decision.HERE, "decided", {})
    monkeypatch.setattr(decision.dist, "get_rank", lambda: 0)
    names = [
        decision.decide("frame 0", joint(i), ["0"], [name]) for i, name in enumerate(("x", "sin_default"))
    ]
    assert names == [["x"], ["sin_default"]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_decides_for_others_and_is_elsewhere_is_named(monkeypatch, ranks):
    """With ``ranks="off"`` it decides nothing. Of three ranks, it may wait for the third one."""
    state = {"waits": None, "running": "", "seconds": 0.0, "eager": "all_reduce, called in train.py:3, step"}
    now = iter(range(0, 10_000, 10))
    monkeypatch.setattr(gate, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(decision, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(decision, "job_store", lambda: SimpleNamespace(timeout=timedelta(seconds=300)))
    monkeypatch.setattr(decision, "_published", lambda rank: None)
    monkeypatch.setattr(decision, "wait_for_key", lambda *args: False)
    monkeypatch.setattr(decision.Answering, "end_of", lambda rank: "")
    monkeypatch.setattr(decision.Answering, "ask", lambda rank: state)
    monkeypatch.setattr(decision.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(decision.dist, "get_world_size", lambda: ranks)
    leader = decision._Leader(0, "frame 0", 1, [])
    leader._store = SimpleNamespace(check=lambda keys: False)
    told = "is inside of all_reduce, called in train.py:3.*'off'" if ranks == 2 else "was waited for during"
    with pytest.raises(RankMismatchError, match=told):
        leader.decision("a graph")


@pytest.mark.parametrize("given", ["soon", "-1", "nan", "inf", "0"])
def test_seconds_of_the_environment_are_checked(monkeypatch, given):
    monkeypatch.setenv("FXPASSES_SILENT_AFTER", given)
    with pytest.raises(OptionsError, match=f"FXPASSES_SILENT_AFTER.*seconds above 0.*{given}"):
        answering._seconds("FXPASSES_SILENT_AFTER", 60.0)
