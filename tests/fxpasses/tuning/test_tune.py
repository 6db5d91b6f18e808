"""Tuning real graphs: small ones, without Inductor, timed by process time; and what is kept of it."""

import dataclasses
import json
import math
import time

import pytest
import torch
from torch import fx

import fxpasses
from fxpasses import OptionsError
from fxpasses.compiling.options import Options
from fxpasses.tuning.choice import Choice, Step
from fxpasses.tuning.content import family_of, graph_digest
from fxpasses.tuning.kept import ResultLocation, TuningResult
from fxpasses.tuning.tuned_graph import tuned_graph, valid_choice
from fxpasses.tuning.tuning_ledger import Entry
from fxpasses.tuning.tuning_session import Session
from fxpasses.tuning.verdicts import Verdicts

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "old_objects_aside")

aten = torch.ops.aten


class LowRank(torch.nn.Module):
    """A chain of matmuls that is cheap in another order."""

    def __init__(self):
        super().__init__()
        self.down = torch.nn.Parameter(torch.randn(512, 64) / 16)
        self.up = torch.nn.Parameter(torch.randn(64, 512) / 16)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return (x @ (self.down @ self.up)).relu().sum(1)


@fxpasses.graph_pass(graphs=["joint"], numerics="bitwise")
def slower_on_purpose(gm):
    "Clamps at zero a hundred times."
    for node in gm.graph.find_nodes(op="call_function", target=aten.relu.default):
        last, users = node, list(node.users)
        for _ in range(100):
            with gm.graph.inserting_after(last):
                last = gm.graph.call_function(aten.relu.default, (last,))
        for user in users:
            user.replace_input_with(node, last)
    return True


@fxpasses.graph_pass(graphs=["inference"], numerics="bitwise")
def negated_twice(gm):
    "Negates what is returned, and negates it again."
    (output,) = gm.graph.find_nodes(op="output")
    for node in output.all_input_nodes:
        with gm.graph.inserting_before(output):
            there = gm.graph.call_function(aten.neg.default, (node,))
            output.replace_input_with(node, gm.graph.call_function(aten.neg.default, (there,)))
    return True


@fxpasses.graph_pass(graphs=["joint"], numerics="tolerance")
def wrong_but_fast(gm):
    "Takes zeros for the result of every matmul."
    for node in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
        with gm.graph.inserting_before(node):
            zeros = gm.graph.call_function(aten.full.default, (list(node.meta["val"].shape), 0.0))
        node.replace_all_uses_with(zeros)
        gm.graph.erase_node(node)
    return True


@pytest.mark.slow
def test_a_model_is_tuned_once_and_what_loses_or_is_wrong_is_left_out(tmp_path, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setenv("FXPASSES_CACHE_DIR", str(tmp_path))
    model, x = LowRank(), torch.randn(64, 512)
    how = {"options": {"compiler": "eager"}, "clock": time.process_time, "show": False}
    candidates = [wrong_but_fast, slower_on_purpose, "reassociate_matmuls"]
    fxpasses.reset_stats()
    tuned = fxpasses.tune(model, x, passes=candidates, seconds=600, **how)
    assert model.calls == 0, "a copy runs"
    outcome = {entry.step: entry.outcome for entry in tuned.ledger}
    assert (outcome["slower_on_purpose"], outcome["wrong_but_fast"]) == ("loses", "wrong")
    assert tuned.steps[0] == "reassociate_matmuls"
    assert tuned.graphs[0].ratio[0] < 1
    assert "EQUAL" in next(e.verdict for e in tuned.ledger if e.step == "reassociate_matmuls")
    assert "slower_on_purpose" in str(tuned)
    out = tuned(x)
    torch.testing.assert_close(out, model(x))
    out.sum().backward()
    assert (fxpasses.stats().tuned, fxpasses.stats().tuned_reused) == (1, 1)

    # The next time nothing is measured: also not by options, with another session, or for another size.
    again = fxpasses.tune(model, x, passes=candidates, **how)
    assert (again.reused, again.steps) == (1, tuned.steps)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="fxpasses", options={"compiler": "eager", "passes": "tuned"})
    for rows in (48, 80):  # static, then symbolic
        given = torch.randn(rows, 512)
        torch.testing.assert_close(compiled(given), model(given))
    stats = fxpasses.stats()
    assert (stats.tuned, stats.tuned_reused, stats.fallbacks) == (1, 4, ())
    assert stats.pass_changes["reassociate_matmuls"] > 0


@fxpasses.graph_pass(graphs=["joint", "inference"], numerics="bitwise")
def raises(gm):
    "Fails."
    raise ValueError("it fails")


@pytest.mark.parametrize("on_failure", ["eager", "isolate"])
def test_eager_is_no_program_of_a_pass_that_fails(tmp_path, on_failure):
    options = {"compiler": "eager", "on_failure": on_failure}
    how = {"cache": tmp_path, "clock": time.process_time, "show": False, "options": options}
    fxpasses.reset_stats()
    with torch.no_grad():
        tuned = fxpasses.tune(torch.nn.Linear(4, 4), torch.ones(2, 4), passes=[raises], **how)
    entries = {entry.step: entry for entry in tuned.ledger}
    assert (entries["raises"].outcome, tuned.steps) == ("failed", ())
    assert "it fails" in entries["raises"].verdict
    assert fxpasses.stats().fallbacks == ()


@pytest.mark.slow
def test_with_more_time_it_goes_on(tmp_path):
    how = {"cache": tmp_path, "clock": time.process_time, "show": False, "options": {"compiler": "eager"}}
    how |= {"passes": [raises]}
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    with torch.no_grad():
        for reused in (0, 1):
            tuned = fxpasses.tune(model, x, seconds=0, **how)
            assert (tuned.reused, list(tuned.ledger)) == (reused, [])
        tuned = fxpasses.tune(model, x, seconds=math.inf, **how)
        assert (tuned.reused, [entry.step for entry in tuned.ledger]) == (0, ["raises"])
        json.loads(json.dumps(tuned.graphs[0].to_data(), allow_nan=False))
        for seconds in (0, 600, math.inf):  # nothing is left
            assert fxpasses.tune(model, x, seconds=seconds, **how).reused == 1


def test_what_was_chosen_from_less_does_not_answer(tmp_path):
    gm, inputs = a_graph()
    options = Options.parse({"compiler": "eager"})
    place = kept_for(gm, inputs, tmp_path, options)
    kept, _ = place.read()
    narrow = dataclasses.replace(kept, candidates={"chunk_logits": "its digest"})
    assert valid_choice(narrow, Session()) is None, "there is more to choose from"
    assert valid_choice(narrow, Session(accepts_any_candidates=True)) is not None, (
        "options={'passes': 'tuned'}"
    )
    assert valid_choice(narrow, Session(passes=())) is not None


def test_a_pass_that_this_process_does_not_know_is_named_and_what_is_kept_stays(tmp_path, caplog):
    gm, inputs = a_graph()
    options = Options.parse({"compiler": "eager", "cache": str(tmp_path)})
    place = kept_for(gm, inputs, tmp_path, options)
    kept, _ = place.read()
    step = {"name": "mine", "settings": {}, "digest": "of mine", "allowed": False, "places": None}
    place.write(dataclasses.replace(kept, steps=(step,)))
    run = tuned_graph(gm, inputs, options, None, lambda *_: gm.forward)
    assert run(*inputs)[0].tolist() == [2, 2, 2]
    assert "this process does not know mine" in caplog.text
    assert place.read()[0].steps == (step,)


def doubled(x):
    return (x * 2,)


def a_graph():
    gm = fx.symbolic_trace(doubled)
    for node in gm.graph.nodes:
        node.meta["example_value"] = torch.ones(3)
    return gm, [torch.ones(3)]


def kept_for(gm, inputs, cache, options):
    """Have a choice kept for a graph, as tuning it would; returns where."""
    tuned_graph(gm, inputs, options, Session(cache=str(cache)), lambda *_: gm.forward)(*inputs)
    (path,) = cache.glob("tuned/*/*.json")
    kept = TuningResult.from_data(json.loads(path.read_text()))
    assert (kept.steps, kept.entries) == ((), ()), "there is nothing to try"
    place = ResultLocation(cache / "tuned", path.stem, family_of(gm, inputs), kept.surroundings)
    steps = ({"name": "memory_budget=0.8", "settings": {"memory_budget": 0.8}, "digest": None},)
    entries = (Entry(place.graph, "memory_budget=0.8", "kept"),)
    place.write(TuningResult(place.graph, steps, entries, kept.surroundings, candidates=kept.candidates))
    assert [*cache.glob("tuned/*/*.json")] == [path]
    return place


def test_a_tuned_program_that_fails_is_struck(tmp_path):
    gm, inputs = a_graph()
    options = Options.parse({"compiler": "eager"})
    place = kept_for(gm, inputs, tmp_path, options)
    budgets = []

    def compile(gm, inputs, options):
        budgets.append(options.memory_budget)

        def run(x):
            if options.memory_budget and x.sum() > 5:
                raise RuntimeError("it fails")
            return gm.forward(x)

        return run

    fxpasses.reset_stats()
    run = tuned_graph(gm, inputs, options, Session(cache=str(tmp_path)), compile)
    assert run(torch.ones(3))[0].tolist() == [2, 2, 2]
    assert run(torch.full((3,), 9.0))[0].tolist() == [18, 18, 18]
    (fallback,) = fxpasses.stats().fallbacks
    assert (fallback.stage, fallback.reason) == ("tuning", "RuntimeError: it fails")
    kept, _ = place.read()
    assert (kept.steps, kept.entries[0].outcome, kept.struck) == ((), "struck", "RuntimeError: it fails")
    named = dataclasses.replace(
        options, cache=str(tmp_path)
    )  # where a result is kept does not decide what it is for
    tuned_graph(gm, inputs, named, Session(cache=str(tmp_path)), compile)
    assert budgets == [0.8, None]


def test_another_size_is_compared_with_eager_once(tmp_path):
    gm, inputs = a_graph()
    options = Options.parse({"compiler": "eager"})
    kept_for(gm, inputs, tmp_path, options)

    def compile(gm, inputs, options):
        return lambda x: (x * 3,) if options.memory_budget else gm.forward(x)

    larger = [torch.ones(5)]
    fxpasses.reset_stats()
    run = tuned_graph(gm, larger, options, Session(cache=str(tmp_path)), compile)
    assert run(*larger)[0].tolist() == [2] * 5
    assert "not what eager gives" in fxpasses.stats().fallbacks[0].reason
    run = tuned_graph(gm, larger, options, Session(cache=str(tmp_path)), compile)
    assert run(*larger)[0].tolist() == [2] * 5
    assert len(fxpasses.stats().fallbacks) == 1, "it is struck for that size"


def test_a_comparison_for_another_size_holds_for_later_processes(tmp_path):
    gm, inputs = a_graph()
    options = Options.parse({"compiler": "eager"})
    place = kept_for(gm, inputs, tmp_path, options)
    calls = []

    def compile(gm, inputs, options):
        return lambda x: calls.append(options.memory_budget) or gm.forward(x)

    larger = [torch.ones(5)]
    for expected in (2, 1):  # compared, and run
        calls.clear()
        tuned_graph(gm, larger, options, Session(cache=str(tmp_path)), compile)(*larger)
        assert calls == [0.8] * expected
    own = dataclasses.replace(place, graph=graph_digest(gm, larger)).read()
    assert (own[0].steps, own[0].entries, own[1]) == (place.read()[0].steps, (), True)


def test_what_tuning_meets_does_not_reach_the_program(tmp_path):
    gm, _ = a_graph()
    given = torch.ones(3, 1).expand(3, 4)
    calls = []

    def compile(gm, inputs, options):
        def run(x):
            calls.append(x)
            x.add_(1) if x.is_contiguous() else None  # measuring writes to copies
            return (x * 2,)

        return run

    one = Session(cache=str(tmp_path), passes=(), goal="memory")
    run = tuned_graph(gm, [given], Options.parse({"compiler": "eager"}), one, compile)
    assert run(given)[0].shape == (3, 4)
    assert [x.stride() for x in calls] == [(1, 0)] * len(calls)
    assert len(calls) > 1
    fxpasses.reset_stats()
    sparse = torch.eye(3).to_sparse()
    run = tuned_graph(gm, [sparse], Options.parse({"compiler": "eager"}), one, lambda *_: gm.forward)
    assert run(sparse)[0].to_dense().equal(2 * torch.eye(3))
    assert "layout torch.sparse_coo" in fxpasses.stats().fallbacks[0].reason
    written = torch.zeros(3)
    tuned_graph(gm, [written], Options.parse({"compiler": "eager"}), one, compile)(written)
    assert written.tolist() == [1, 1, 1]


@pytest.mark.parametrize("took", [27.0, 40.0])
def test_where_there_is_no_time_for_a_step_none_is_looked_for(tmp_path, monkeypatch, took):
    monkeypatch.setattr(
        "fxpasses.tuning.tuned_graph.Proposals", lambda *_: pytest.fail("it captures the graph")
    )
    gm, inputs = a_graph()
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def compile(gm, inputs, options):
        now[0] += took
        return gm.forward

    one = Session(cache=str(tmp_path), seconds=60.0)
    with torch.no_grad(), one.count_time():
        run = tuned_graph(gm, inputs, Options.parse({"compiler": "eager"}), one, compile)
        assert run(*inputs)[0].tolist() == [2, 2, 2]
    assert (now, one.results[0].left) == ([took], ("any step",)), (
        "what is left is for finding steps, or too short"
    )
    kept, _ = one.locations[0].read()
    assert valid_choice(kept, Session(seconds=60.0)) == Choice()
    assert valid_choice(kept, Session(seconds=61.0)) is None, "a later process with more time looks"


def test_ctrl_c_at_any_time_leaves_the_default(tmp_path):
    gm, inputs = a_graph()
    compiled = []

    def compile(gm, inputs, options):
        compiled.append(options)
        if len(compiled) > 1:
            raise KeyboardInterrupt
        return gm.forward

    one = Session(cache=str(tmp_path), passes=(negated_twice,))
    with torch.no_grad():
        run = tuned_graph(gm, inputs, Options.parse({"compiler": "eager"}), one, compile)
        assert run(*inputs)[0].tolist() == [2, 2, 2]
    assert (len(compiled), one.interrupted, [*tmp_path.iterdir()]) == (2, True, [])


def test_what_is_allowed_is_not_compared(tmp_path):
    gm, inputs = a_graph()
    compiled = []

    def compile(options):
        compiled.append([item.name for item in options.passes])
        return gm.forward

    wrong = lambda x: (x * 3,)  # noqa: E731
    verdicts = Verdicts(gm, inputs, Options.parse({"compiler": "eager"}), compile)
    step = Step(str(wrong_but_fast), wrong_but_fast, allowed=True)
    assert verdicts.refusal(Choice((step,)), wrong, 0) == ("", "allowed: not compared; eager's bits")
    assert "wrong_but_fast" not in compiled[0]
    refused, _ = verdicts.refusal(Choice((Step.setting("memory_budget", 0.8),)), wrong, 0)
    assert refused.startswith("not what eager gives: output 0")
    again = Step.from_data(step.to_data(), lambda text: wrong_but_fast)
    assert (again, again.allowed) == (step, True)
    other = dataclasses.replace(slower_on_purpose)
    with pytest.raises(OptionsError, match="is not the one that was measured"):
        Step.from_data(step.to_data(), lambda text: other)


def test_what_is_no_farther_from_eager_than_the_default_is_right():
    gm, inputs = a_graph()
    off = {None: 1e-4, 0.8: 1e-4, 0.4: 1e-2}  # of the default, and of programs of two settings

    def compile(options):
        return lambda x: (x * 2 + off[options.memory_budget],)

    def refusal(budget):
        choice = Choice((Step.setting("memory_budget", budget),))
        return verdicts.refusal(choice, lambda x: (x * 2 + off[budget],), 0)

    verdicts = Verdicts(gm, inputs, Options.parse({"compiler": "eager"}), compile)
    refused, told = refusal(0.8)
    assert (refused, told.partition(",")[0]) == ("", "the default's results")
    assert refusal(0.4)[0].startswith("not what eager gives: output 0")


def test_the_content_of_a_graph_has_no_names_in_it():
    def graph(function, *inputs):
        seen = []
        torch._dynamo.reset()
        torch.compile(
            function, backend=lambda gm, given: seen.append((gm, given)) or gm.forward, dynamic=False
        )(*inputs)
        return seen[0]

    def one(x, w):
        return (x @ w).reshape(4, -1)

    def two(a, b):
        return (a @ b).reshape(8, -1)

    def other(a, b):
        return (a @ b).reshape(4, -1).sin()

    x, w = torch.ones(8, 8), torch.ones(8, 8)
    first, second, third = graph(one, x, w), graph(two, x, w), graph(other, x, w)
    assert graph_digest(*first) == graph_digest(*graph(one, x + 1, w)) != graph_digest(*second)
    assert family_of(*first) == family_of(*second) == family_of(*graph(one, torch.ones(4, 8), w))
    assert family_of(*first) != family_of(*graph(one, x.double(), w.double()))
    assert family_of(*third) != family_of(*first)

    def layers(count, activation=torch.relu):
        def model(x, *weights):
            for weight in weights:
                x = x + activation(torch.nn.functional.layer_norm(x, (8,)) @ weight)
            return x.sum()

        return family_of(*graph(model, x, *[w] * count))

    assert layers(2) == layers(5) != layers(5, torch.sin)


def test_a_pass_that_is_new_or_was_changed_is_measured(tmp_path):
    gm, inputs = a_graph()
    options = Options.parse({"compiler": "eager", "report": str(tmp_path / "report")})

    def tuned(*passes):
        one = Session(cache=str(tmp_path), passes=passes)
        tuned_graph(gm, inputs, options, one, lambda *_: gm.forward)(*inputs)
        return one.reused

    changed = dataclasses.replace(slower_on_purpose, function=wrong_but_fast.function)
    assert [tuned(slower_on_purpose), tuned(slower_on_purpose), tuned()] == [0, 1, 1]
    assert [tuned(slower_on_purpose, wrong_but_fast), tuned(wrong_but_fast)] == [0, 1]
    assert [tuned(changed), tuned(changed)] == [0, 1]
    (path,) = tmp_path.glob("tuned/*/*.json")
    data = json.loads(path.read_text())
    step = {**Step(str(changed), changed).to_data(), "digest": "another"}
    path.write_text(json.dumps({**data, "steps": [step]}))
    assert [tuned(changed), tuned(changed)] == [0, 1], "a choice of a pass that is another one by now"
    (told,) = json.loads((tmp_path / "report" / "ledger.json").read_text())
    assert [*told["candidates"]] == ["slower_on_purpose"]


def test_a_trace_of_which_no_plan_is_made_guards_on_no_hooks(tmp_path, monkeypatch):
    from torch._dynamo.guards import GuardBuilder

    asked, length = [], GuardBuilder.SEQUENCE_LENGTH

    def counted(self, guard):
        if "hooks" in guard.name:
            asked.append(guard.name)
        return length(self, guard)

    monkeypatch.setattr(GuardBuilder, "SEQUENCE_LENGTH", counted)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.randn(2, 4)
    options = {"compiler": "eager"}
    torch.compile(model, backend="fxpasses", options={**options, "cache": "off"})(x)
    assert not asked
    fxpasses.compile(model, **options, cache=tmp_path)(x)
    assert asked, "a plan is for models without hooks"


FACTOR = 2.0


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * FACTOR if self.training else self.linear(x)


@pytest.mark.slow
def test_a_call_that_was_tuned_is_not_traced_again(tmp_path, monkeypatch):
    model, x = Scaled(), torch.randn(2, 4)
    how = {"options": {"compiler": "eager"}, "cache": tmp_path, "clock": time.process_time, "show": False}
    tune = lambda *args, **more: fxpasses.tune(*args, **{"seconds": 60, **how, **more})  # noqa: E731

    def graphs():
        stats = fxpasses.stats()
        return stats.joint + stats.inference

    first = tune(model, x)
    fxpasses.reset_stats()
    start = time.process_time()
    again = tune(model, x)
    assert time.process_time() - start < 0.5
    assert (graphs(), again.reused, again.graphs) == (0, 1, first.graphs)
    torch.testing.assert_close(again(x), model(x))
    # What is another call, or asks for something else, or has no result any more, is traced.
    for given, training, more in ((x[:1], True, {}), (x, False, {}), (x, True, {"goal": "both"})):
        fxpasses.reset_stats()
        tune(model.train(training), given, **more)
        assert graphs() > 0
    for path in tmp_path.glob("tuned/*/*.json"):
        path.unlink()
    fxpasses.reset_stats()
    assert tune(model, x).reused == 0
    assert graphs() > 0


@pytest.mark.slow
def test_a_graph_that_nobody_expected_is_tuned_when_it_runs(tmp_path, monkeypatch):
    model, x = Scaled(), torch.randn(2, 4)
    how = {"options": {"compiler": "eager"}, "cache": tmp_path, "clock": time.process_time, "show": False}
    fxpasses.tune(model, x, **how)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)  # which the key of the call does not know
    fxpasses.reset_stats()
    tuned = fxpasses.tune(model, x, **how)
    torch.testing.assert_close(tuned(x), model(x))
    assert (fxpasses.stats().tuned, fxpasses.stats().fallbacks) == (1, ())
