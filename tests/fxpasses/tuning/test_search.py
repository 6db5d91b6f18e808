"""The search and its statistics, with made-up times: no graph is compiled, and no clock is read."""

import json
import math
import random

import pytest
import torch

from fxpasses.compiling.options import Options
from fxpasses.exact.time_limit import OutOfTime
from fxpasses.passes import library
from fxpasses.tuning.choice import PLAIN, Choice, Step
from fxpasses.tuning.intervals import RISK, Interval, median_interval
from fxpasses.tuning.measuring import Program, duel
from fxpasses.tuning.search import search
from fxpasses.tuning.tuning_ledger import Entry, changes
from fxpasses.tuning.tuning_session import Session


class Machine:
    """A machine on which programs take made-up times: a clock that they move, slow moments included."""

    def __init__(self, noise=0.05, seed=0):
        self.now, self.noise, self.random = 0.0, noise, random.Random(seed)

    def clock(self):
        return self.now

    def program(self, seconds):
        def run():
            slow = 3.0 if self.random.random() < self.noise else 1.0
            self.now += seconds * slow * self.random.uniform(1 - self.noise, 1 + self.noise)

        return run


class Bench:
    """A workbench whose steps multiply time and memory by made-up factors."""

    def __init__(self, steps, wrong=(), fails=(), seconds=1e9, needs=(), interrupt_at=None):
        self.steps, self.wrong, self.fails, self.needs = steps, wrong, fails, dict(needs)
        self.machine, self.seconds, self.interrupt_at = Machine(), seconds, interrupt_at
        self.compiled_choices, self.told = [], []
        self.default = Choice()

    def _factor(self, choice, which):
        product = 1.0
        for step in choice.steps:
            product *= self.steps[step.name][which]
        return product

    def proposals(self, choice):
        taken = {step.name for step in choice.steps}
        open_steps = [n for n in self.steps if n not in taken and self.needs.get(n, n) in {n, *taken}]
        growth = lambda name: 9.0 if name == "large" else 1.0  # noqa: E731
        return [(Step(name, predicted=0.9, growth=growth(name)), 3) for name in open_steps]

    def compiled(self, choice):
        name = choice.steps[-1].name
        if name == self.interrupt_at:
            raise KeyboardInterrupt
        if name in self.fails:
            raise RuntimeError("the compiler fails\nin many lines")
        self.machine.now += 1.0
        self.compiled_choices.append(str(choice))
        return choice

    def duel(self, old, new, is_conclusive, min_pairs=8):
        return duel(
            self.machine.program(0.01 * self._factor(old, 0)),
            self.machine.program(0.01 * self._factor(new, 0)),
            clock=self.machine.clock,
            is_conclusive=is_conclusive,
            has_time=lambda: self.seconds_left() > 0,
            min_pairs=min_pairs,
        )

    def peak_bytes(self, program):
        return round(1e6 * self._factor(program, 1))

    def refusal(self, choice, program):
        name = choice.steps[-1].name
        return ("not what eager gives", "") if name in self.wrong else ("", "EQUAL")

    def seconds_left(self):
        return self.seconds - self.machine.now

    def expected_seconds(self, step):
        return 2.0 * step.growth

    def report_progress(self, what):
        self.told.append(what)


def outcomes(found):
    return {entry.step: entry.outcome for entry in found.entries}


def test_what_gains_is_kept_and_what_does_not_is_struck():
    steps = {
        "good": (0.9, 1.0),
        "slow": (1.1, 1.0),
        "idle": (1.0, 1.0),
        "wrong": (0.5, 1.0),
        "broken": (0.5, 1.0),
    }
    bench = Bench(steps, wrong={"wrong"}, fails={"broken"}, needs={"late": "good"})
    bench.steps["late"] = (0.8, 1.0)  # changes something only after "good"
    found = search(bench, "g", "time", bench.default)
    assert outcomes(found) == {
        "good": "kept", "slow": "loses", "idle": "no gain", "wrong": "wrong", "broken": "failed", "late": "kept"
    }  # fmt: skip
    assert str(found.choice) == "good, late" == str(found.program)
    assert found.ratio.low < 0.72 < found.ratio.high < 1
    by_name = {entry.step: entry for entry in found.entries}
    assert by_name["broken"].verdict == "RuntimeError: the compiler fails"
    assert by_name["wrong"].verdict == "not what eager gives"
    assert by_name["good"].low < 0.9 < by_name["good"].high


@pytest.mark.parametrize(("goal", "kept"), [("time", "fast"), ("memory", "small"), ("both", "lean")])
def test_goals(goal, kept):
    bench = Bench(
        {"fast": (0.8, 1.2), "small": (1.3, 0.7), "lean": (0.9, 0.95) if goal == "both" else (1.0, 1.0)}
    )
    found = search(bench, "g", goal, bench.default)
    assert str(found.choice) == kept
    assert (found.memory is None) == (goal == "time")


def test_a_step_that_would_compile_for_too_long_leaves_the_time_to_others():
    steps = {"large": (0.5, 1.0), "small": (0.9, 1.0)}
    found = search(Bench(steps, seconds=10.0), "g", "time", Choice())
    assert str(found.choice) == "small"
    assert found.left == ("large",)


def test_it_stops_in_time_and_at_once_with_the_best_so_far():
    steps = {"first": (0.9, 1.0), "second": (0.9, 1.0), "third": (0.9, 1.0)}
    bench = Bench(steps, seconds=3.0)
    found = search(bench, "g", "time", bench.default)
    assert (str(found.choice), found.left) == ("first", ("second", "third"))
    assert search(Bench(steps, seconds=0), "g", "time", Choice()).left == tuple(steps)
    found = search(Bench(steps, interrupt_at="second"), "g", "time", Choice())
    assert (str(found.choice), found.interrupted) == ("first", True)


def test_what_there_is_no_time_to_check_is_left_for_a_longer_tuning():
    bench = Bench({"large": (0.5, 1.0), "small": (0.9, 1.0)})
    check = bench.refusal

    def refusal(choice, program):
        if choice.steps[-1].name == "large":
            raise OutOfTime
        return check(choice, program)

    bench.refusal = refusal
    found = search(bench, "g", "time", bench.default)
    assert outcomes(found) == {"large": "unproved", "small": "kept"}
    assert (str(found.choice), found.left) == ("small", ("large",))


def test_ctrl_c_in_the_last_measurement_keeps_what_was_measured():
    bench = Bench({"good": (0.9, 1.0)})
    duel = bench.duel

    def interrupted(old, new, is_conclusive, **how):
        if how:
            raise KeyboardInterrupt
        return duel(old, new, is_conclusive)

    bench.duel = interrupted
    found = search(bench, "g", "time", bench.default)
    assert (found.interrupted, str(found.choice), found.left) == (True, "default", ("good",))
    assert [entry.verdict for entry in found.entries] == ["against the default in the end: interrupted"]


def test_no_steps_are_looked_for_once_the_time_is_up():
    bench = Bench({"first": (0.9, 1.0), "second": (0.9, 1.0)}, seconds=3.0)
    proposals, asked = bench.proposals, []

    def counted(choice):
        asked.append(str(choice))
        return proposals(choice)

    def slow_checks(choice, program):
        bench.machine.now += 2.0
        return "", "EQUAL"

    bench.proposals, bench.refusal = counted, slow_checks
    found = search(bench, "g", "time", bench.default)
    assert (asked, found.left) == (["default"], ("second",))


def test_no_gain_is_reported_where_there_is_none():
    # Forty programs of equal speed: at 5% each, the chance that more than six are taken is below 1 in 100; none may win in the end.
    for seed in range(3):
        bench = Bench({f"same {i}": (1.0, 1.0) for i in range(40)})
        bench.machine.random.seed(seed)
        found = search(bench, "g", "time", bench.default)
        assert sum(outcome == "kept" for outcome in outcomes(found).values()) <= 6
        assert found.ratio is None or found.ratio.high < 1.01


def test_the_interval_of_the_median_holds_its_promise():
    rng = random.Random(1)
    for count in (8, 16, 32, 64):
        missed = 0
        for _ in range(2000):
            found = median_interval([rng.lognormvariate(0, 0.5) for _ in range(count)])
            missed += not found.low <= 1.0 <= found.high
        assert missed <= 2000 * RISK * 1.5
    assert median_interval([0.5]) == Interval(0.0, 0.5, float("inf"))


def test_slow_moments_do_not_decide():
    machine = Machine(noise=0.15)
    found = duel(
        machine.program(0.01), machine.program(0.008), clock=machine.clock, is_conclusive=lambda _: False
    )
    assert found.low < 0.8 < found.high < 0.95


@pytest.mark.parametrize("min_pairs", [8, 32])
def test_a_comparison_is_not_cut_too_short(min_pairs):
    machine, calls = Machine(), []
    program = machine.program(0.01)
    counted = lambda: calls.append(program())  # noqa: E731
    how = {"clock": machine.clock, "is_conclusive": lambda _: False}
    found = duel(program, counted, has_time=lambda: False, min_pairs=min_pairs, **how)
    assert len(calls) == 2 + min_pairs  # two to warm up
    assert found.low < 1 < found.high


def test_what_is_clearly_slower_is_not_measured_on_when_the_time_is_up():
    machine = Machine(noise=0.01)
    how = {"clock": machine.clock, "is_conclusive": lambda _: False, "has_time": lambda: False}
    found = duel(machine.program(0.01), machine.program(0.1), **how)
    assert (found.low, found.high) == (0.0, float("inf")), "too few pairs for an interval"
    assert found.middle > 5


def test_two_ledgers_are_compared():
    def entry(step, low, high, outcome="no gain"):
        return Entry("g", step, outcome, ratio=(low + high) / 2, low=low, high=high)

    before = [entry("a", 0.8, 0.9), entry("b", 0.8, 0.9), entry("c", 0.8, 0.9), entry("d", 0.8, 0.9)]
    after = [entry("a", 0.6, 0.7), entry("b", 1.0, 1.1), entry("c", 0.85, 1.0), entry("e", 0.6, 0.7, "wrong")]
    words = {(c.after or c.before).step: c.word for c in changes(before, after)}
    assert words == {"a": "wins", "b": "loses", "c": "as before", "d": "gone", "e": "new"}
    assert Entry.from_data({**after[0].to_data(), "of a later version": 1}) == after[0]


def test_a_step_that_does_not_run_any_more_loses_and_situations_are_not_mixed():
    def entry(outcome, situation):
        return Entry("g", "a", outcome, ratio=0.9, low=0.8, high=1.0, situation=situation)

    before = [entry("kept", "training"), entry("failed", "inference"), entry("kept", "both")]
    after = [entry("failed", "training"), entry("no gain", "inference"), entry("loses", "other")]
    words = {(c.after or c.before).situation: c.word for c in changes(before, after)}
    assert words == {"training": "loses", "inference": "wins", "both": "gone", "other": "new"}


def test_a_step_that_was_added_to_other_steps_has_to_lose_to_be_called_worse():
    def entry(outcome, low, high, on):
        return Entry("g", "a", outcome, ratio=(low + high) / 2, low=low, high=high, on=on)

    def word(before, after):
        return changes([before], [after])[0].word

    loses = entry("loses", 1.1, 1.2, "default")
    assert word(entry("no gain", 0.96, 1.01, "b"), loses) == "as before"
    assert word(entry("no gain", 0.96, 1.01, "default"), loses) == "loses"
    assert word(entry("kept", 0.6, 0.7, "b"), loses) == "loses"
    assert word(loses, entry("kept", 0.6, 0.7, "b")) == "wins"


def test_what_is_clearly_lost_has_no_interval():
    bench = Bench({"slow": (3.0, 1.0)})
    bench.duel = lambda *programs, **how: Interval(0.0, 3.0, math.inf)
    (entry,) = search(bench, "g", "time", bench.default).entries
    assert (entry.measured, entry.on) == ("3.00", "default")
    assert json.loads(json.dumps(entry.to_data(), allow_nan=False))["high"] is None


def test_plain_is_kept_where_the_default_loses():
    bench = Bench({"plain": (0.93, 1.0), "good": (0.9, 1.0), "slow": (1.1, 1.0)})
    found = search(bench, "g", "time", bench.default)
    assert str(found.choice) == "plain, good"
    assert found.ratio.high < 0.93


def test_the_time_of_a_session_counts_once():
    session = Session(seconds=60.0)
    with session.count_time():
        began = session.started_at
        with session.count_time():  # a graph's search, within fxpasses.tune
            assert session.started_at == began
        assert session.started_at == began
        assert session.spent_seconds == 0.0
    assert session.started_at is None
    assert session.spent_seconds > 0.0


def test_plain_is_what_inductor_alone_compiles():
    mine, extra = library()["reassociate_matmuls"](), Step.of_pass(library()["concat_matmuls"]())
    base = Options.parse({"passes": ["default", mine]})
    assert Choice((PLAIN,)).options(base).passes == (mine,), "the user's own passes stay"
    later = Choice((PLAIN, extra)).options(base)
    assert later.passes == (mine, extra.item)
    assert later.regions == "off"
    assert Step.from_data(PLAIN.to_data(), lambda text: pytest.fail(text)) == PLAIN


def test_the_peak_is_that_of_a_later_step():
    calls = []

    def run(x):
        calls.append(x)
        return (torch.ones(1 << 20 if len(calls) == 1 else 1 << 10),)

    assert 4096 <= Program(run, [torch.ones(2)]).peak_bytes() < 1 << 20
