"""A sweep that would compare nothing is an error."""

from __future__ import annotations

import pytest
import torch

from benchmarks.conformance.command import main
from benchmarks.conformance.errors import ConformanceOptionsError
from benchmarks.conformance.sweep import Options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_operator"], "matches no entry"),
        (["sinn"], "did you mean"),
        (["sin", "sinn"], "'sinn'"),
        (["--tables", "bogus", "sin"], "'bogus'"),
        (["--tables", "foward", "sin"], "did you mean 'forward'"),
        (["--tables", "", "sin"], "at least one"),
        (["--shard", "9/4", "sin"], "9/4"),
        (["--shard", "4/4", "sin"], "4/4"),
        (["--shard", "1", "sin"], "INDEX/COUNT"),
        (["--shard", "1/2", "sin"], "holds none"),
        (["--layouts", "columns", "sin"], "'columns'"),
        (["--dtypes", "float33", "sin"], "torch.float33"),
        (["--dtypes", "nn", "sin"], "torch.nn"),
        (["--databases", "ops", "sin"], "'ops'"),
        (["--samples", "-1", "sin"], "samples"),
        (["--repeat", "0", "sin"], "repeat"),
        (["--tables", "in-place", "linalg.svd"], "nothing was compared"),
        (["--merge", "no_such_file.json"], "no_such_file"),
    ],
)
def test_commands_that_would_compare_nothing(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_options():
    with pytest.raises(ConformanceOptionsError, match="shard"):
        Options(shard=(3, 2))
    with pytest.raises(ConformanceOptionsError, match="dtypes"):
        Options(dtypes=("float32",))
    assert Options(patterns=("sin",), dtypes=(torch.float32,)).entries()
