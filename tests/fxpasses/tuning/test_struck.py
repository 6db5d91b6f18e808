"""A tuned program that fails after it was kept: later calls and processes run without it."""

import json
import time

import pytest
import torch

import fxpasses
from fxpasses.plans.running import loaded
from fxpasses.tuning import search
from fxpasses.tuning.choice import Step
from fxpasses.tuning.tuning_session import Session

pytestmark = pytest.mark.usefixtures("old_objects_aside")

_fails: list[str] = []


@torch.library.custom_op("test_struck::passed_on", mutates_args=())
def passed_on(x: torch.Tensor, where: str) -> torch.Tensor:
    """A copy, unless it is to fail."""
    if where in _fails:
        raise RuntimeError(f"fails in {where}")
    return x.clone()


@passed_on.register_fake
def _(x, where):
    return torch.empty_like(x)


def _passes_on(gm, where):
    (output,) = gm.graph.find_nodes(op="output")
    for node in [n for n in output.all_input_nodes if n.op == "call_function" and n.meta["val"].dim()]:
        with gm.graph.inserting_before(output):
            there = gm.graph.call_function(torch.ops.test_struck.passed_on.default, (node, where))
        there.meta.update(node.meta)
        output.replace_input_with(node, there)
    return True


@fxpasses.graph_pass(graphs=["backward"], numerics="bitwise")
def passes_gradients_on(gm):
    "Hands gradients on by an operator that may fail."
    return _passes_on(gm, "backward")


@fxpasses.graph_pass(graphs=["forward", "inference"], numerics="bitwise")
def passes_results_on(gm):
    "Hands results on by an operator that may fail."
    return _passes_on(gm, "forward")


class Views(torch.nn.Module):
    """Returns a view of what it computes, and may change a buffer."""

    def __init__(self, counts):
        super().__init__()
        self.linear, self.counts = torch.nn.Linear(6, 6), counts
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.counts:
            self.calls += 1
        return self.linear(x).relu().view(-1)


@pytest.fixture
def kept(tmp_path):
    """Has a step kept for a model, as if it had gained; returns how the model is tuned then, and where that is kept."""
    torch.manual_seed(0)
    _fails.clear()

    def keep(step, compiler="eager", counts=True):
        model, x = Views(counts), torch.randn(4, 6)
        passes = [] if step.item is None else [step.item]
        options = {"compiler": compiler}
        how = {"clock": time.process_time, "show": False, "cache": tmp_path, "options": options}
        tune = lambda: fxpasses.tune(model, x, passes=passes, seconds=60, **how)  # noqa: E731
        tune()
        (path,) = tmp_path.glob("tuned/*/*.json")
        data = json.loads(path.read_text())
        entries = [{**e, "outcome": "kept" if e["step"] == step.name else "no gain"} for e in data["entries"]]
        path.write_text(json.dumps({**data, "steps": [step.to_data()], "entries": entries}))
        torch._dynamo.reset()
        fxpasses.reset_stats()
        return model, x, tune, path

    yield keep
    _fails.clear()


def _gradient(model, tuned, x):
    model.zero_grad()
    tuned(x).sum().backward()
    return model.linear.weight.grad.clone()


def _is_struck(path, step, why):
    data = json.loads(path.read_text())
    outcomes = {e["step"]: e["outcome"] for e in data["entries"]}
    return (data["steps"], data["struck"], outcomes[step.name]) == ([], why, "struck")


@pytest.mark.slow
def test_an_error_of_the_backward_pass_strikes_the_program(kept):
    step = Step.of_pass(passes_gradients_on)
    model, x, tune, path = kept(step)
    tuned = tune()
    assert tuned.steps == ("passes_gradients_on",)
    expected = _gradient(model, model, x)
    assert _gradient(model, tuned, x).equal(expected)
    out = tuned(x).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()
    assert fxpasses.stats().fallbacks == (), "that is no fault of the program"
    _fails.append("backward")
    with pytest.raises(RuntimeError, match="fails in backward") as raised:
        _gradient(model, tuned, x)
    (told,) = raised.value.__notes__
    assert f"graph {path.stem[:8]} ran a tuned program (passes_gradients_on)" in told
    why = "in the backward pass: RuntimeError: fails in backward"
    assert [(f.stage, f.reason, f.location) for f in fxpasses.stats().fallbacks] == [
        ("tuning", why, path.stem)
    ]
    assert _is_struck(path, step, why)
    calls = model.calls.item()
    assert _gradient(model, tuned, x).equal(expected), "the default runs"
    assert model.calls == calls + 1
    torch._dynamo.reset()
    again = tune()
    assert (again.reused, again.steps) == (1, ())
    assert _gradient(model, again, x).equal(expected)


def test_an_error_in_a_later_forward_pass_leaves_a_compiled_default(kept):
    step = Step.of_pass(passes_results_on)
    model, x, tune, path = kept(step, counts=False)
    tuned = tune()
    expected = _gradient(model, tuned, x)
    _fails.append("forward")
    assert _gradient(model, tuned, x).equal(expected)
    assert _is_struck(path, step, "RuntimeError: fails in forward")
    graphs = fxpasses.stats().joint
    for _ in range(2):
        assert _gradient(model, tuned, x).equal(expected)
    assert fxpasses.stats().joint == graphs + 1, "without the step it is compiled, once"


def test_what_a_program_that_fails_has_changed_is_not_changed_twice(kept):
    step = Step.of_pass(passes_results_on)
    with torch.no_grad():
        model, x, tune, path = kept(step)
        tuned = tune()
        tuned(x)
        _fails.append("forward")
        with pytest.raises(RuntimeError, match="fails in forward") as raised:
            tuned(x)
        assert "which raised this; it is struck" in raised.value.__notes__[0]
        assert _is_struck(path, step, "RuntimeError: fails in forward")
        assert model.calls <= 2
        calls = model.calls.clone()
        assert tuned(x).equal(model(x))
        assert model.calls == calls + 2


@pytest.mark.slow
def test_a_program_that_fails_in_the_process_that_found_it_is_struck(kept, monkeypatch, tmp_path):
    step = Step.of_pass(passes_results_on)
    model, x, _, path = kept(step, counts=False)
    path.unlink()
    monkeypatch.setattr(search, "_outcome", lambda *measured: "kept")
    monkeypatch.setattr(search, "_is_confirmed", lambda *measured: True)
    one = Session(passes=(passes_results_on,), cache=str(tmp_path))
    tuned = torch.compile(
        model, backend="fxpasses", options={"passes": one, "compiler": "eager", "cache": str(tmp_path)}
    )
    expected = _gradient(model, tuned, x)
    assert step.name in [found["name"] for found in one.results[0].steps]
    _fails.append("forward")
    graphs = fxpasses.stats().joint
    for _ in range(2):
        assert _gradient(model, tuned, x).equal(expected)
    assert _is_struck(path, step, "RuntimeError: fails in forward")
    assert fxpasses.stats().joint == graphs, "the default was compiled before"


@pytest.mark.slow
def test_a_backward_pass_in_a_compiled_function_is_watched_as_well(kept, monkeypatch, tmp_path):
    step = Step.of_pass(passes_gradients_on)
    model, x, *_ = kept(step)
    monkeypatch.setattr(search, "_outcome", lambda *measured: "kept")
    monkeypatch.setattr(search, "_is_confirmed", lambda *measured: True)

    def whole_step(x):
        model.zero_grad()
        model(x).sum().backward()
        return model.linear.weight.grad

    expected = whole_step(x).clone()
    one = Session(passes=(passes_gradients_on,), cache=str(tmp_path / "step"))
    options = {"passes": one, "compiler": "eager", "cache": "off"}
    tuned = torch.compile(whole_step, backend="fxpasses", options=options)
    for _ in range(2):
        torch.testing.assert_close(tuned(x), expected)
    assert step.name in [kept["name"] for result in one.results for kept in result.steps]
    assert fxpasses.stats().fallbacks == (), "Dynamo traces nothing of ours behind the graph break"
    _fails.append("backward")
    with pytest.raises(RuntimeError, match="fails in backward") as raised:
        tuned(x)
    assert step.name in raised.value.__notes__[0]
    torch.testing.assert_close(tuned(x), expected)


@pytest.fixture
def failing_plans(monkeypatch):
    """Has the plans that are loaded fail where ``_fails`` says so."""
    load = loaded.load_code

    def failing(*args):
        names = load(*args)

        def failing_graph(where):
            def run(given):
                if f"{where} of a plan" in _fails:
                    raise RuntimeError(f"fails in {where} of a plan")
                return names[where](given)

            return run

        return {
            **names,
            **{where: failing_graph(where) for where in ("forward", "backward") if where in names},
        }

    monkeypatch.setattr(loaded, "load_code", failing)


@pytest.mark.slow
@pytest.mark.usefixtures("failing_plans")
def test_an_error_of_a_plan_s_backward_pass_strikes_the_program(kept):
    step = Step.setting("memory_budget", 0.8)
    model, x, tune, path = kept(step, "inductor")
    tuned = tune()
    expected = _gradient(model, tuned, x)
    assert _gradient(model, tuned, x).equal(expected)
    assert fxpasses.stats().plans_used == 1
    _fails.append("backward of a plan")
    with pytest.raises(RuntimeError, match="fails in backward of a plan") as raised:
        _gradient(model, tuned, x)
    assert "memory_budget=0.8" in raised.value.__notes__[0]
    assert _is_struck(path, step, "in the backward pass: RuntimeError: fails in backward of a plan")
    _fails.clear()
    assert _gradient(model, tuned, x).equal(expected)
    stats = fxpasses.stats()
    assert (stats.plans_written, len(stats.fallbacks)) == (2, 1), "that of the default, too"


@pytest.mark.slow
@pytest.mark.usefixtures("failing_plans")
@pytest.mark.parametrize("counts", [False, True])
def test_a_plan_that_fails_does_not_run_again_where_it_changes_something(kept, counts):
    step = Step.setting("memory_budget", 0.8)
    model, x, tune, path = kept(step, "inductor", counts)
    tuned = tune()
    expected = _gradient(model, tuned, x)
    assert _gradient(model, tuned, x).equal(expected)
    _fails.append("forward of a plan")
    calls = model.calls.clone()
    if counts:
        with pytest.raises(RuntimeError, match="fails in forward of a plan"):
            tuned(x)
        assert model.calls - calls <= 1
        calls = model.calls.clone()
    assert _gradient(model, tuned, x).equal(expected), "it is compiled"
    assert model.calls == calls + counts
    assert json.loads(path.read_text())["steps"], "the choice is not at fault"
