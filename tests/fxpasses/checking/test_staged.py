"""A partition or a capture that is wrong: a small program of the user's calls shows it."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import fxpasses
from fxpasses import ValueMismatchError
from fxpasses.checking.stages.staged import stage_differences
from fxpasses.compiling import graph_compilers
from fxpasses.graphs import decompositions
from fxpasses.graphs.rewriting import same_metadata
from tests.fxpasses.checking.repros import in_a_new_process

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(self.norm(x)).tanh()
        return x


@pytest.fixture
def wrong_partition(monkeypatch):
    """The first two saved values that look alike are handed over in the wrong order."""
    real = graph_compilers.partition

    def wrong(*args, **kwargs):
        forward, backward = real(*args, **kwargs)
        (output,) = forward.graph.find_nodes(op="output")
        values = list(output.args[0])
        made = [i for i, n in enumerate(values) if i and isinstance(n, fx.Node) and n.op == "call_function"]
        pairs = itertools.combinations(made, 2)
        alike = ((a, b) for a, b in pairs if same_metadata(values[a].meta["val"], values[b].meta["val"]))
        for a, b in itertools.islice(alike, 1):
            values[a], values[b] = values[b], values[a]
            output.args = (tuple(values),)
            forward.recompile()
        return forward, backward

    monkeypatch.setattr(graph_compilers, "partition", wrong)


@pytest.fixture
def wrong_capture(monkeypatch):
    """A decomposition of tanh's gradient that forgets the square."""
    real = decompositions.select_decomp_table

    def wrong_table():
        return {**real(), torch.ops.aten.tanh_backward.default: lambda gradient, y: gradient * (1 - y)}

    monkeypatch.setattr(decompositions, "select_decomp_table", wrong_table)


def exit_status(file):
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(file), run_name="__main__")
    return end.value.code


@pytest.mark.slow
def test_the_value_check_shows_a_wrong_partition_on_a_small_program(wrong_partition, tmp_path):
    options = {"check": "values", "compiler": "eager", "report": str(tmp_path)}
    compiled = torch.compile(Model(), backend="fxpasses", options=options)
    with pytest.raises(ValueMismatchError, match="shows it on a graph of") as caught:
        compiled(torch.randn(4, 6)).sum().backward()
    assert caught.value.pass_name == "partition"
    assert 1 <= caught.value.repro_calls <= 3
    assert exit_status(caught.value.repro) == 1


@pytest.mark.slow
def test_the_file_ends_well_once_the_partition_is_right(wrong_partition, monkeypatch, tmp_path, capsys):
    options = {"check": "values", "compiler": "eager", "report": str(tmp_path)}
    with pytest.raises(ValueMismatchError) as caught:
        torch.compile(Model(), backend="fxpasses", options=options)(torch.randn(4, 6))
    monkeypatch.undo()
    assert exit_status(caught.value.repro) == 0
    assert "the partition is right on these inputs" in capsys.readouterr().out


@pytest.mark.slow
def test_check_shows_a_wrong_capture_on_one_call(wrong_capture, tmp_path):
    options = {"compiler": "eager", "report": str(tmp_path)}
    result = fxpasses.check(Model(), torch.randn(4, 6), options=options, show=False)
    assert not result.ok
    assert (
        f"`python {tmp_path / 'fxpasses_repros'}/capture/repro.py` shows what the capture does on 1 call"
        in str(result)
    )
    assert any("DIFFERENT: output" in p for s in result.stages if s.stage == "capture" for p in s.problems)
    file = tmp_path / "fxpasses_repros" / "capture" / "repro.py"
    assert "tanh" in file.read_text()
    assert exit_status(file) == 1


@pytest.mark.slow
def test_the_file_registers_decompositions_that_are_not_torchs(monkeypatch, tmp_path):
    """Without them the capture is right in the process that runs the file."""

    def halves(x, approximate="none"):
        return x * 0.5

    monkeypatch.setitem(decompositions.select_decomp_table(), torch.ops.aten.gelu.default, halves)
    options = {"compiler": "eager", "report": str(tmp_path)}
    result = fxpasses.check(lambda x: F.gelu(x.sin()), torch.randn(9), options=options, show=False)
    assert not result.ok
    status, output, errors = in_a_new_process(tmp_path / "fxpasses_repros" / "capture" / "repro.py")
    assert (status, output.startswith("the capture is wrong")) == (1, True), errors


def dropout_free(x, weight, running):
    y = F.batch_norm(x @ weight, running, torch.ones(3), training=True)
    return y.relu(), y.sum(0)


@pytest.mark.parametrize("stage", ["capture", "partition"])
def test_what_is_right_is_right(stage):
    inputs = [torch.randn(5, 4), torch.randn(4, 3, requires_grad=True), torch.zeros(3)]
    assert stage_differences(dropout_free, inputs, stage) == ""
    assert torch.equal(inputs[2], torch.zeros(3))


def test_a_stage_that_raises_is_wrong(monkeypatch):
    with mock.patch.object(graph_compilers, "partition", side_effect=ValueError("no way")):
        found = stage_differences(lambda x: x.sin(), [torch.ones(2, requires_grad=True)], "partition")
    assert "no way" in found


@pytest.mark.slow
def test_what_is_drawn_at_random_becomes_an_input(wrong_partition, tmp_path):
    model = nn.Sequential(nn.Dropout(0.5), Model(), nn.Dropout(0.5))
    options = {"check": "values", "compiler": "eager", "report": str(tmp_path)}
    with pytest.raises(ValueMismatchError) as caught:
        torch.compile(model, backend="fxpasses", options=options)(torch.randn(4, 6))
    assert "dropout" not in Path(caught.value.repro).read_text()
    assert exit_status(caught.value.repro) == 1
