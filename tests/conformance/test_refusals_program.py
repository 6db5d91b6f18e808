"""The program that looks for what only eager refuses."""

import os
import time

import pytest
import torch

from benchmarks.conformance import Options, Verdict
from benchmarks.conformance.command import main
from benchmarks.conformance.isolate import isolated
from benchmarks.conformance.refusals import copied, perturbations, sweep_refusals


def options(*patterns: str, engine: str = "fake") -> Options:
    return Options(engine=engine, patterns=patterns, databases=("op",), samples=1)


def test_one_argument_is_made_wrong():
    x, y = torch.ones(2, 3), torch.ones(3)
    changed = dict(perturbations((x, (y, 2, 0.5), {"how": "sum"})))
    assert changed["leaf 0: dtype int64"][0].dtype is torch.int64
    assert changed["leaf 1: dim 0 larger"][1][0].shape == (4,)
    assert changed["leaf 2: + 100"][1][1] == 102
    assert changed["leaf 3: negative"][1][2] == -1.5
    assert changed["leaf 4: nonsense"][2] == {"how": "sum?"}
    for what, (first, (second, *_), _) in changed.items():
        assert (first is x) != what.startswith("leaf 0"), what
        assert (second is y) != what.startswith("leaf 1"), what


def test_copies_keep_an_expanded_layout():
    x = torch.ones(1).expand(3)
    ((copy,), _, _) = copied(((x,), (), {}))
    assert copy.stride() == (0,)
    assert copy.data_ptr() != x.data_ptr()


def test_torchs_engine_accepts_what_ours_refuses():
    theirs = sweep_refusals(options("mm", engine="torch"))
    assert theirs.count(Verdict.ACCEPTED) > 0
    ours = sweep_refusals(options("mm"))
    assert ours.count(Verdict.ERROR, Verdict.MISMATCH) == 0
    assert ours.count(Verdict.ACCEPTED) < theirs.count(Verdict.ACCEPTED)


def test_what_values_decide_is_told_apart():
    """An index out of range: other indices would do."""
    tally = sweep_refusals(options("gather"))
    assert {case.outcome.verdict for case in tally.notable} <= {Verdict.DATA_DEPENDENT}


def test_the_command(capsys):
    assert main(["--refusals", "square", "--databases", "op", "--samples", "1"]) == 0
    assert "accepted" in capsys.readouterr().out


@pytest.mark.parametrize("what", [lambda: os._exit(1), lambda: time.sleep(60), lambda: os.abort()])
def test_a_child_that_does_not_answer(what):
    assert isolated(what, seconds=0.5) is None


def test_more_than_a_pipe_holds():
    assert isolated(lambda: "x" * 1_000_000, seconds=60) == "x" * 1_000_000
