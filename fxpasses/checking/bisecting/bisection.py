"""Bisection: find the stage, pass, match site or lowering that makes a script fail, by running it repeatedly.

The script runs in separate processes (forks of a warm one, :mod:`fxpasses.checking.bisecting.warm_process`), each with
a compilation that ends at a different point (:mod:`fxpasses.pass_manager.limits`): Dynamo's graph alone,
AOTAutograd's, the partition, one pass after the other, Inductor. Of two neighbors one works and one fails.
The cheapest question comes first: does the script work without Inductor? If a pass is guilty, the search
continues with its match sites. If Inductor is, one run compares each graph with what Inductor made of it, and
two more confirm the operator found; only if none is found, the operators that Inductor lowers are searched.
Each answer is written to a state file, so that an interrupted search can resume.

A script may fail only sometimes. So a verdict is accepted only if more runs, just before the guilty part and
with it, do not refute it. If they do, the failure rates with the full compilation and without it are
estimated, and each question is asked as often as these rates require (:mod:`fxpasses.checking.bisecting.failure_rate`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fake.error_text import describe_error
from fake.wrong_arguments import are_words, check_type, is_path
from fxpasses.checking.bisecting.failure_rate import Answer, Odds, fisher_p_value
from fxpasses.checking.bisecting.progress import ProgressLine
from fxpasses.checking.bisecting.warm_process import Runner, last_exception
from fxpasses.errors import BisectError
from fxpasses.pass_manager.limits import VARIABLE, Limits

_FORMAT = 2
"""Version of the state file."""
_ATTEMPTS = 4
"""Number of searches before a script is considered too flaky."""
_MIN_ESTIMATE_RUNS, _MAX_ESTIMATE_RUNS = 10, 40
"""Bounds on the runs of a flaky script with all of the compilation, and without: more until counts differ."""
_NO_FAILURE_FACTOR = 3
"""How many times as many runs confirm that nothing fails: whoever asks has seen the script fail."""
_SIGNIFICANCE = 0.002
"""Failure counts differ if chance explains them with less than this probability. Tested often: so small."""
_NO_EVIDENCE, _MIN_EAGER_FAILURES = 0.3, 3
"""If eager failed this often, and chance explains the rest with this probability, more runs are a waste."""


@dataclass(frozen=True)
class Verdict:
    """The result of a search.

    Attributes:
        stage: the stage at which the script starts to fail; "" if it does not fail.
        pass_name: the guilty pass, or "".
        site: its match site, or for Inductor the operator whose lowering is to blame, or "".
        position: the position of that site or operator in the process, from 0; -1 if there is none.
        repro: a file that shows the fault, or "".
        runs: how many processes were needed, including those of an earlier search with the same state.
        text: all that in one paragraph.
        flaky: whether the script fails only sometimes.
    """

    stage: str
    pass_name: str
    site: str
    position: int
    repro: str
    runs: int
    text: str
    flaky: bool = False


@dataclass(frozen=True)
class _TentativeVerdict:
    """A verdict that runs could still refute.

    Attributes:
        verdict: the verdict.
        works: the compilation just before, with which the script works; ``None`` if there is none.
        fails: the one with which it fails; ``None`` if it does not.
    """

    verdict: Verdict
    works: Limits | None
    fails: Limits | None


class _Refuted(Exception):
    """A compilation that worked fails, or the reverse: the script is flaky, or more so than assumed."""


class _Search:
    """The runs of one script, cached in a file."""

    def __init__(
        self,
        script: Path,
        args: Sequence[str],
        state: Path,
        output: Path,
        timeout: float | None,
        tick: Callable[[], None],
        runner: Runner,
    ) -> None:
        self._runner = runner
        self._state, self._output, self._timeout, self._tick = state, output, timeout, tick
        self.odds = Odds()
        key = hashlib.sha256(script.read_bytes() + repr(list(args)).encode()).hexdigest()
        self._answers: dict[str, Answer] = {}
        if state.exists():
            try:
                known = json.loads(state.read_text())
                if (known["script"], known["format"]) == (key, _FORMAT):
                    self._answers = {name: Answer(**answer) for name, answer in known["answers"].items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problem = f"{str(state)!r} is no state of a search; name another file, or remove it"
                raise BisectError(f"{problem} ({describe_error(error)})") from error
        self._key = key

    @property
    def runs(self) -> int:
        return sum(answer.runs for answer in self._answers.values())

    @property
    def is_flaky(self) -> bool:
        """Whether some compilation both worked and failed."""
        return any(answer.is_mixed for answer in self._answers.values())

    def answer_for(self, limits: Limits) -> Answer:
        """Return the runs so far."""
        return self._answers.get(limits.to_json(), Answer())

    def fails(self, limits: Limits, confidence: float = 1.0) -> bool:
        """Run the script this way until it is clear whether it fails, or return the cached answer.

        Args:
            limits: where the compilation ends.
            confidence: the required confidence: a multiple of that of one run of a script that is not flaky.

        Raises:
            _Refuted: this contradicts what is assumed about the script.
        """
        verdict = self.odds.verdict(self.answer_for(limits), confidence)
        while verdict is None:
            self.run(limits)
            if self.answer_for(limits).is_mixed and not self.odds.flaky:
                raise _Refuted
            verdict = self.odds.verdict(self.answer_for(limits), confidence)
        self._tick()
        return verdict

    def record(self, limits: Limits) -> dict[str, Any]:
        """Return the stages, passes and sites that a run of the script reached."""
        if not self.answer_for(limits).runs:
            self.run(limits)
        return self.answer_for(limits).record

    def run(self, limits: Limits) -> None:
        """Run the script once."""
        self._answers[limits.to_json()] = self.answer_for(limits).plus(self._run(limits))
        self._save()
        self._tick()

    def _run(self, limits: Limits) -> Answer:
        self._output.mkdir(parents=True, exist_ok=True)
        record = self._output.resolve() / "record.json"
        record.unlink(missing_ok=True)
        environment = {VARIABLE: replace(limits, record=str(record)).to_json()}
        status, text = self._runner.run(environment, self._output / "output.txt", self._timeout)
        if status is None:
            text = f"no end after {self._timeout} seconds"
        found = json.loads(record.read_text()) if record.exists() else {}
        return Answer(1, int(status != 0), found, text[-2000:])

    def why_not_reproduced(self, repro: str) -> str:
        """Why a repro file shows no fault in a process without the script's registrations; "" if it does."""
        status, text = self._runner.run({}, self._output / "repro.txt", self._timeout, [repro])
        return "" if status == 1 and "is wrong: " in text else last_exception(text) or text.strip()[-200:]

    def _save(self) -> None:
        self._state.parent.mkdir(parents=True, exist_ok=True)
        partial = self._state.with_suffix(".part")
        answers = {name: asdict(answer) for name, answer in self._answers.items()}
        partial.write_text(json.dumps({"format": _FORMAT, "script": self._key, "answers": answers}, indent=1))
        partial.replace(self._state)

    def first_failing(self, works: int, fails: int, limits: Callable[[int], Limits]) -> int:
        """Find the smallest number that fails, by bisection.

        Args:
            works: a number that works.
            fails: a larger one that fails.
            limits: the limits of a compilation for a number.
        """
        while fails - works > 1:
            middle = (works + fails) // 2
            if self.fails(limits(middle)):
                fails = middle
            else:
                works = middle
        return fails


def bisect_script(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    state: str | Path | None = None,
    output: str | Path = "fxpasses_bisect",
    timeout: float | None = None,
    confirm: int = 3,
    console: Console | None = None,
) -> Verdict:
    """Find the part of the compilation that makes a script fail.

    The script fails if it exits with a status other than 0: because of an exception, a failed assertion, or
    ``sys.exit(1)``. It must compile with ``backend="fxpasses"`` and compare its results itself.

    Args:
        script: the file.
        args: its arguments.
        state: where to cache answers; ``OUTPUT/state.json`` by default. A search with the same script,
            arguments and state resumes where the last one ended.
        output: a directory for the state and the repro file.
        timeout: after how many seconds a run counts as failed.
        confirm: how often to run the script with the part found guilty, and how often without, before
            accepting the verdict; a flaky script runs until that is as clear as two runs of another one make
            it.
        console: where to draw the progress bar, or print one line per stage if it is not a terminal; standard
            error by default.

    Raises:
        BisectError: the script does not exist, or fails without being compiled by fxpasses; ``confirm`` is
            below one, or ``timeout`` is not positive.
    """
    check_type("bisect_script", "script", script, is_path, "the path of a script")
    check_type("bisect_script", "args", args, are_words, "a list of words, as in sys.argv")
    check_type("bisect_script", "output", output, is_path, "a directory")
    check_type("bisect_script", "state", state, lambda v: v is None or is_path(v), "a file")
    check_type("bisect_script", "console", console, (Console, type(None)), "a rich.console.Console")
    if not isinstance(confirm, int) or confirm < 1:
        raise BisectError(f"confirm: expected a number of runs of at least 1, got {confirm!r}")
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise BisectError(f"timeout: expected a positive number of seconds, or None, got {timeout!r}")
    script, output = Path(script), Path(output)
    if not script.is_file():
        raise BisectError(f"there is no script {str(script)!r}")
    console = console or Console(stderr=True)
    line = ProgressLine(not console.is_terminal, console, "fxpasses bisect")
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    # Graphs from a cache do not run through the passes.
    with bar, Runner([str(script), *args], {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}) as runner:
        task = bar.add_task("running the script as it is", total=8)

        def tick() -> None:
            done = bar.tasks[0].completed + 1
            bar.update(task, completed=done, total=max(bar.tasks[0].total or 0, done))

        search = _Search(
            script, args, Path(state) if state else output / "state.json", output, timeout, tick, runner
        )

        def report_progress(text: str, more: int) -> None:
            line(text)
            bar.update(task, description=text, total=int(bar.tasks[0].completed) + more)

        verdict = _search_until_confirmed(search, report_progress, confirm)
        bar.update(task, description="done", total=bar.tasks[0].completed)
    (output / "verdict.txt").write_text(verdict.text + "\n")
    return verdict


def _search_until_confirmed(
    search: _Search, report_progress: Callable[[str, int], None], confirm: int
) -> Verdict:
    """Return the verdict once runs that could have refuted it did not."""
    for _ in range(_ATTEMPTS):
        try:
            found = _find(search, report_progress)
            for limits, failing in ((found.works, False), (found.fails, True)):
                if limits is not None:
                    report_progress("trying to refute the verdict", 2 * confirm)
                    confidence = min(confirm, 2) if search.odds.flaky else confirm
                    confidence *= _NO_FAILURE_FACTOR if found.fails is None else 1
                    if search.fails(limits, confidence) != failing:
                        raise _Refuted
            return _with_evidence(search, found)
        except _Refuted:
            report_progress("the script is flaky: how often does it fail?", _MAX_ESTIMATE_RUNS)
            if (verdict := _estimate_failure_rates(search)) is not None:
                return verdict
    return replace(
        _EMPTY_VERDICT,
        runs=search.runs,
        flaky=True,
        text=f"The script is flaky: {_describe_failures(search, Limits())}. Each of {_ATTEMPTS} searches was refuted by runs that came after it, so that "
        f"nothing can be said about what is to blame. {search.runs} runs.",
    )


def _estimate_failure_rates(search: _Search) -> Verdict | None:
    """Estimate the failure rates with the full compilation and without; a verdict if they hardly differ."""
    full, eager = Limits(), Limits(stage="eager")
    for count in range(_MAX_ESTIMATE_RUNS):
        for limits in (full, eager):
            if search.answer_for(limits).runs <= count:
                search.run(limits)
        if count + 1 >= _MIN_ESTIMATE_RUNS:
            chance = fisher_p_value(search.answer_for(full), search.answer_for(eager))
            no_evidence = chance > _NO_EVIDENCE and search.answer_for(eager).failed >= _MIN_EAGER_FAILURES
            if chance < _SIGNIFICANCE or no_evidence:
                break
    with_it, without = search.answer_for(full), search.answer_for(eager)
    search.odds = Odds.of(with_it, without)
    if with_it.failed and "passes" not in with_it.record:
        raise _nothing_compiled_error(with_it)
    if fisher_p_value(with_it, without) < _SIGNIFICANCE:
        return None
    stage = "eager" if without.failed else ""
    text = (
        f"The script is flaky, whether it is compiled or not: {_describe_failures(search, full)}, and with the graphs run in eager as Dynamo captured "
        f"them {without}. That is no clear difference: no stage of fxpasses is to blame. {search.runs} runs."
    )
    return replace(
        _EMPTY_VERDICT, stage=stage, runs=search.runs, text=_with_last_exception(text, with_it), flaky=True
    )


def _with_evidence(search: _Search, found: _TentativeVerdict) -> Verdict:
    """Return the verdict with the evidence of the runs and its repro file."""
    text, repro = found.verdict.text, found.verdict.repro
    if repro and (why := search.why_not_reproduced(repro)):
        text += f" {repro} shows it only where what this script registers with torch is there (else: {why})."
        repro = ""
    elif repro:
        text += f" `python {repro}` shows it on a small graph."
    if found.fails is None:
        text += f" It failed in {search.answer_for(Limits())}."
    elif found.works is not None:
        text += f" Just before, it fails in {search.answer_for(found.works)}, from there on in {search.answer_for(found.fails)}."
    else:
        text += f" It fails in {search.answer_for(found.fails)}."
    if search.is_flaky:
        text = f"The script is flaky: {_describe_failures(search, Limits())}. {text}"
    text += f" {search.runs} runs."
    if found.verdict.stage:
        text = _with_last_exception(text, search.answer_for(Limits()))
    return replace(found.verdict, text=text, repro=repro, runs=search.runs, flaky=search.is_flaky)


def _describe_failures(search: _Search, limits: Limits) -> str:
    return f"as it is, it fails in {search.answer_for(limits)}"


def _with_last_exception(text: str, answer: Answer) -> str:
    words = last_exception(answer.output)
    return f"{text} As it is, the script ends with: {words}" if words else text


_EMPTY_VERDICT = Verdict("", "", "", -1, "", 0, "")


def _nothing_compiled_error(answer: Answer) -> BisectError:
    words = f"; its last words:\n{answer.output}" if answer.output.strip() else ", without a word"
    return BisectError(f"the script fails before anything is compiled with backend='fxpasses'{words}")


def _find(search: _Search, report_progress: Callable[[str, int], None]) -> _TentativeVerdict:
    if not search.fails(Limits()):
        return _TentativeVerdict(
            replace(_EMPTY_VERDICT, text="The script did not fail: there is nothing to find."), Limits(), None
        )
    full = search.answer_for(Limits())
    if "passes" not in full.record:
        raise _nothing_compiled_error(full)
    report_progress("without compiling", 6)
    eager = Limits(stage="eager")
    if search.fails(eager):
        text = "The script fails even when the graphs run in eager as Dynamo captured them: no stage of fxpasses is to blame."
        return _TentativeVerdict(replace(_EMPTY_VERDICT, stage="eager", text=text), None, eager)
    names: list[str] = full.record["passes"]
    report_progress("without Inductor", 5)
    if not search.fails(Limits(stage="passes", passes=len(names))):
        return _search_inductor(search, report_progress, len(names))
    steps = [
        Limits(stage="eager"),
        Limits(stage="capture"),
        Limits(stage="partition"),
        *(Limits(stage="passes", passes=count + 1) for count in range(len(names))),
    ]
    report_progress("which stage", len(steps).bit_length() + 4)
    first = search.first_failing(0, len(steps) - 1, steps.__getitem__)
    before, guilty = steps[first - 1], steps[first]
    if guilty.stage == "passes":
        return _search_sites(search, before, guilty, names[(guilty.passes or 1) - 1], report_progress)
    what = {
        "capture": "AOTAutograd's capture of the joint graph (its decompositions and functionalization)",
        "partition": "the partition into a forward and a backward graph",
    }[guilty.stage]
    report_progress(f"writing a repro file for the {guilty.stage} stage", 1)
    repro = search.record(replace(guilty, check=True)).get("repro", "")
    return _TentativeVerdict(_stage_verdict(guilty.stage, what, repro), before, guilty)


def _stage_verdict(stage: str, what: str, repro: str) -> Verdict:
    text = f"The script works up to the stage before and fails with {what}."
    return replace(_EMPTY_VERDICT, stage=stage, repro=repro, text=text)


def _search_sites(
    search: _Search, before: Limits, limits: Limits, name: str, report_progress: Callable[[str, int], None]
) -> _TentativeVerdict:
    sites: list[str] = search.record(limits).get("sites", [])
    report_progress(f"which match site of {name}", len(sites).bit_length() + 1)
    site, position = "", -1
    if sites:
        position = search.first_failing(0, len(sites), lambda count: replace(limits, sites=count)) - 1
        site = sites[position]
        before, limits = (replace(limits, sites=count) for count in (position, position + 1))
    report_progress(f"writing a repro file for {name}", 1)
    repro = search.record(replace(limits, sites=None, check=True)).get("repro", "")
    where = f" at match site {position + 1} of {len(sites)}, {site}" if sites else ""
    unseen = "" if repro else " The value check finds no difference."
    text = (
        f"The script fails because of pass {name!r}{where}: it works with the passes before it and fails as soon as "
        f"this pass runs, with the graphs run operator by operator.{unseen}"
    )
    return _TentativeVerdict(Verdict("pass", name, site, position, repro, 0, text), before, limits)


def _search_inductor(
    search: _Search, report_progress: Callable[[str, int], None], passes: int
) -> _TentativeVerdict:
    """Search Inductor, since the script works without it."""
    without = Limits(stage="passes", passes=passes)
    report_progress("comparing what Inductor made of each graph", 4)
    compared = search.record(Limits(check=True))
    suspects: list[str] = compared.get("suspects", [])
    nodes: list[str] = search.record(Limits()).get("lowerings", [])
    for position in [i for i, node in enumerate(nodes) if suspects == [node]]:
        # Confirm the operator that the comparison names: the script works with those before it, and fails
        # with it.
        report_progress(f"confirming {nodes[position]}", 2)
        before, after = (Limits(lowerings=count) for count in (position, position + 1))
        if not search.fails(before) and search.fails(after):
            return _lowering_verdict(nodes, position, compared.get("repro", ""))
    report_progress("without any lowering", len(nodes).bit_length() + 2)
    none = Limits(lowerings=0)
    if search.fails(none):
        what = (
            "Inductor, even when it lowers no operator itself: its own passes, its scheduler or its wrapper"
        )
        return _TentativeVerdict(_stage_verdict("inductor", what, compared.get("repro", "")), without, none)
    if not nodes:
        text = "The script fails only with Inductor, on graphs without an operator to lower."
        return _TentativeVerdict(replace(_EMPTY_VERDICT, stage="inductor", text=text), without, Limits())
    report_progress("which of Inductor's lowerings", len(nodes).bit_length() + 1)
    position = search.first_failing(0, len(nodes), lambda count: Limits(lowerings=count)) - 1
    repro = compared.get("repro", "")
    if suspects != [nodes[position]]:
        report_progress(f"writing a repro file for {nodes[position]}", 1)
        own = search.record(Limits(check=True, suspect=nodes[position]))
        repro = own.get("repro", "") or repro
    return _lowering_verdict(nodes, position, repro)


def _lowering_verdict(nodes: Sequence[str], position: int, repro: str) -> _TentativeVerdict:
    limits = Limits(lowerings=position + 1)
    text = (
        f"The script fails because of Inductor: it works with the first {position} of {len(nodes)} operators lowered and "
        f"the others called as they are, and fails as soon as operator {position + 1}, {nodes[position]}, is lowered, too. "
        f"{VARIABLE}='{limits.to_json()}' makes the script fail so."
    )
    verdict = Verdict("inductor", "", nodes[position], position, repro, 0, text)
    return _TentativeVerdict(verdict, Limits(lowerings=position), limits)
