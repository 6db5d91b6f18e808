"""Which stage, pass, match site or lowering makes a script fail: found by running it again and again.

The script is run in processes of its own (forks of a warm one, :mod:`fxpasses.checking.warm`), each with a compilation that
ends somewhere else (:mod:`fxpasses.pass_manager.limits`): Dynamo's graph alone, AOTAutograd's, the partition, one pass after the
other, Inductor. Of two neighbours one works and one fails. What costs least is asked first: whether the script works without
Inductor. Is it a pass, then the search goes on with its match sites. Is it Inductor, then one run compares each graph with
what Inductor made of it, and two more confirm the operator that was found; only where nothing was found, the operators
that Inductor lowers are searched. Each answer is written to a state file, so that a search that was killed goes on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fxpasses.checking.warm import Runner
from fxpasses.errors import BisectError
from fxpasses.pass_manager.limits import VARIABLE, Limits

__all__ = ["Verdict", "bisect_script"]


@dataclass(frozen=True)
class Verdict:
    """What a search found.

    Attributes:
        stage: the stage at which the script starts to fail; "" when it does not fail.
        pass_name: the guilty pass, or "".
        site: its match site, or for Inductor the operator whose lowering is to blame, or "".
        position: the position of that site or operator in the process, from 0; -1 when there is none.
        repro: a file that shows the fault, or "".
        runs: how many processes were needed, those of an earlier search with the same state included.
        text: all that in one paragraph.
    """

    stage: str
    pass_name: str
    site: str
    position: int
    repro: str
    runs: int
    text: str


@dataclass(frozen=True)
class _Answer:
    """One run of the script."""

    failed: bool
    record: dict[str, Any]
    output: str


class _Search:
    """The runs of one script, remembered in a file."""

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
        key = hashlib.sha256(script.read_bytes() + repr(list(args)).encode()).hexdigest()
        self._answers: dict[str, dict[str, Any]] = {}
        if state.exists():
            known = json.loads(state.read_text())
            if known.get("script") == key:  # otherwise the answers are another script's
                self._answers = known["answers"]
        self._key = key

    @property
    def runs(self) -> int:
        return len(self._answers)

    def answer(self, limits: Limits) -> _Answer:
        """Run the script so, or remember that it was."""
        key = limits.to_json()
        if key not in self._answers:
            self._answers[key] = self._run(limits)
            self._save()
        self._tick()
        return _Answer(**self._answers[key])

    def _run(self, limits: Limits) -> dict[str, Any]:
        self._output.mkdir(parents=True, exist_ok=True)
        record = self._output.resolve() / "record.json"
        record.unlink(missing_ok=True)
        environment = {VARIABLE: replace(limits, record=str(record)).to_json()}
        status, text = self._runner.run(environment, self._output / "output.txt", self._timeout)
        if status is None:
            text = f"no end after {self._timeout} seconds"
        found = json.loads(record.read_text()) if record.exists() else {}
        return {"failed": status != 0, "record": found, "output": text[-2000:]}

    def _save(self) -> None:
        self._state.parent.mkdir(parents=True, exist_ok=True)
        partial = self._state.with_suffix(".part")
        partial.write_text(json.dumps({"script": self._key, "answers": self._answers}, indent=1))
        partial.replace(self._state)

    def first_failing(self, works: int, fails: int, limits: Callable[[int], Limits]) -> int:
        """The smallest number that fails, between one that works and one that fails."""
        while fails - works > 1:
            middle = (works + fails) // 2
            if self.answer(limits(middle)).failed:
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
    console: Console | None = None,
) -> Verdict:
    """Find out which part of the compilation makes a script fail.

    The script fails when it exits with another status than 0: because of an exception, a failed assertion, or
    ``sys.exit(1)``. It has to compile with ``backend="fxpasses"`` and to compare its results itself.

    Args:
        script: the file.
        args: its arguments.
        state: where answers are kept; ``OUTPUT/state.json`` by default. A search with the same script, arguments and
            state goes on where the last one ended.
        output: a directory for the state and the repro file.
        timeout: after how many seconds a run counts as failed.
        console: where the progress bar is drawn; standard error by default.

    Raises:
        BisectError: when the script does not exist, or fails without being compiled by fxpasses.
    """
    script, output = Path(script), Path(output)
    if not script.is_file():
        raise BisectError(f"there is no script {str(script)!r}")
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console or Console(stderr=True),
    )
    # What comes from a cache ran through no pass.
    with bar, Runner([str(script), *args], {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}) as runner:
        task = bar.add_task("running the script as it is", total=8)
        search = _Search(
            script,
            args,
            Path(state) if state else output / "state.json",
            output,
            timeout,
            lambda: bar.advance(task),
            runner,
        )

        def say(text: str, more: int) -> None:
            bar.update(task, description=text, total=int(bar.tasks[0].completed) + more)

        verdict = _find(search, say)
        bar.update(task, description="done", total=bar.tasks[0].completed)
        if verdict.stage and (words := last_words(search.answer(Limits()).output)):
            verdict = replace(verdict, text=f"{verdict.text} As it is, the script ends with: {words}")
    (output / "verdict.txt").write_text(verdict.text + "\n")
    return verdict


def last_words(output: str) -> str:
    """The first line of the last exception that a script printed, in at most 200 characters; "" when it printed none.

    >>> last_words("Traceback (most recent call last):\\n  ...\\nValueError: no such row\\nmore about it\\n")
    'ValueError: no such row'
    """
    found = re.findall(r"^[A-Za-z_][\w.]*(?:Error|Exception|Exit)\b.*$", output, re.MULTILINE)
    return str(found[-1])[:200] if found else ""


def _find(search: _Search, say: Callable[[str, int], None]) -> Verdict:
    full = search.answer(Limits())
    if not full.failed:
        return Verdict("", "", "", -1, "", search.runs, "The script does not fail: there is nothing to find.")
    if "passes" not in full.record:
        raise BisectError(
            "the script fails before anything is compiled with backend='fxpasses'; its last words:\n"
            + full.output
        )
    say("without compiling", 6)
    if search.answer(Limits(stage="eager")).failed:
        text = "The script fails even when the graphs run in eager as Dynamo captured them: no stage of fxpasses is to blame."
        return Verdict("eager", "", "", -1, "", search.runs, text)
    names: list[str] = full.record["passes"]
    say("without Inductor", 5)
    if not search.answer(Limits(stage="passes", passes=len(names))).failed:
        return _inductor(search, say)
    steps = [
        Limits(stage="eager"),
        Limits(stage="capture"),
        Limits(stage="partition"),
        *(Limits(stage="passes", passes=count + 1) for count in range(len(names))),
    ]
    say("which stage", len(steps).bit_length() + 4)
    first = search.first_failing(0, len(steps) - 1, steps.__getitem__)
    guilty = steps[first]
    if guilty.stage == "passes":
        return _pass(search, guilty, names[(guilty.passes or 1) - 1], say)
    what = {
        "capture": "AOTAutograd's capture of the joint graph (its decompositions and functionalization)",
        "partition": "the partition into a forward and a backward graph",
    }[guilty.stage]
    say(f"writing a repro file for the {guilty.stage} stage", 1)
    repro = search.answer(replace(guilty, check=True)).record.get("repro", "")
    return _whole_stage(search, guilty.stage, what, repro)


def _whole_stage(search: _Search, stage: str, what: str, repro: str) -> Verdict:
    shown = f" `python {repro}` shows it on a small graph." if repro else ""
    text = f"The script works up to the stage before and fails with {what}.{shown} {search.runs} runs."
    return Verdict(stage, "", "", -1, repro, search.runs, text)


def _pass(search: _Search, limits: Limits, name: str, say: Callable[[str, int], None]) -> Verdict:
    sites: list[str] = search.answer(limits).record.get("sites", [])
    say(f"which match site of {name}", len(sites).bit_length() + 1)
    place, position = "", -1
    if sites:
        position = search.first_failing(0, len(sites), lambda count: replace(limits, sites=count)) - 1
        place = sites[position]
    say(f"writing a repro file for {name}", 1)
    repro = search.answer(replace(limits, check=True)).record.get("repro", "")
    where = f" at match site {position + 1} of {len(sites)}, {place}" if sites else ""
    shown = (
        f" `python {repro}` shows it on a small graph." if repro else " The value check finds no difference."
    )
    text = (
        f"The script fails because of pass {name!r}{where}: it works with the passes before it and fails as soon as "
        f"this pass runs, with the graphs run operator by operator.{shown} {search.runs} runs."
    )
    return Verdict("pass", name, place, position, repro, search.runs, text)


def _inductor(search: _Search, say: Callable[[str, int], None]) -> Verdict:
    """Without Inductor the script works."""
    say("comparing what Inductor made of each graph", 4)
    compared = search.answer(Limits(check=True)).record
    suspects: list[str] = compared.get("suspects", [])
    nodes: list[str] = search.answer(Limits()).record.get("lowerings", [])
    for position in [i for i, node in enumerate(nodes) if suspects == [node]]:
        # The operator that the comparison names, confirmed: with those before it the script works, with it it fails.
        say(f"confirming {nodes[position]}", 2)
        before, after = (Limits(lowerings=count) for count in (position, position + 1))
        if not search.answer(before).failed and search.answer(after).failed:
            return _lowering(search, nodes, position, compared.get("repro", ""))
    say("without any lowering", len(nodes).bit_length() + 2)
    if search.answer(Limits(lowerings=0)).failed:
        what = (
            "Inductor, even when it lowers no operator itself: its own passes, its scheduler or its wrapper"
        )
        return _whole_stage(search, "inductor", what, compared.get("repro", ""))
    if not nodes:
        text = f"The script fails only with Inductor, on graphs without an operator to lower. {search.runs} runs."
        return Verdict("inductor", "", "", -1, "", search.runs, text)
    say("which of Inductor's lowerings", len(nodes).bit_length() + 1)
    position = search.first_failing(0, len(nodes), lambda count: Limits(lowerings=count)) - 1
    repro = compared.get("repro", "")
    if suspects != [nodes[position]]:
        say(f"writing a repro file for {nodes[position]}", 1)
        own = search.answer(Limits(check=True, suspect=nodes[position])).record
        repro = own.get("repro", "") or repro
    return _lowering(search, nodes, position, repro)


def _lowering(search: _Search, nodes: Sequence[str], position: int, repro: str) -> Verdict:
    shown = f" `python {repro}` shows it on a small graph." if repro else ""
    limits = Limits(lowerings=position + 1)
    text = (
        f"The script fails because of Inductor: it works with the first {position} of {len(nodes)} operators lowered and "
        f"the others called as they are, and fails as soon as operator {position + 1}, {nodes[position]}, is lowered, too. "
        f"{VARIABLE}='{limits.to_json()}' makes the script fail so.{shown} {search.runs} runs."
    )
    return Verdict("inductor", "", nodes[position], position, repro, search.runs, text)
