import math

import pytest
import torch

import fxpasses
from fxpasses.commands.main import main
from fxpasses.demo import training
from fxpasses.demo.close_results import judge
from fxpasses.demo.data import batches, standard_library_bytes
from fxpasses.demo.training import DemoSettings, Run, train
from fxpasses.passes import FuseScatterAdd

SMALL = ["--steps", "3", "--layers", "1", "--width", "16", "--heads", "2", "--context", "16"]


@pytest.mark.slow
def test_the_command_ends_with_the_table_and_succeeds(capsys, tmp_path):
    torch._dynamo.reset()
    assert main(["demo", *SMALL, "--report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for word in (
        "Loss per step",
        "compile seconds",
        "graphs",
        "recompiles",
        "milliseconds per step",
        "tolerance",
    ):
        assert word in printed
    assert "agrees with eager" in printed
    assert (tmp_path / "graph_0" / "backward.py").exists()


def test_a_step_that_compiles_is_no_measure_of_a_step(monkeypatch):
    model = torch.nn.Linear(2, 1)
    calls = []

    def call(tokens, targets):
        calls.append(tokens)
        return model(tokens).sum()

    monkeypatch.setattr(training, "_graph_count", lambda: min(len(calls), 1))
    made = Run("x", model, call)
    made.step(torch.ones(3, 2), torch.ones(3))
    assert made.compiled == [True]
    made.time_again(torch.ones(3, 2), torch.ones(3))
    assert made.step_seconds == made.repeated
    assert made.compile_seconds == max(0.0, made.seconds[0] - made.repeated)
    made.step(torch.ones(3, 2), torch.ones(3))
    assert made.compiled == [True, False]
    assert made.step_seconds == made.seconds[1]
    made.time_again(torch.ones(3, 2), torch.ones(3))
    assert len(calls) == 3
    mixed = Run("x", torch.nn.Identity(), lambda *_: torch.zeros(()))
    mixed.seconds, mixed.compiled = [40.0, 1.0, 20.0, 3.0], [True, False, True, False]
    assert (mixed.step_seconds, mixed.compile_seconds) == (3.0, 37.0 + 17.0)


def run(losses, gradient):
    made = Run("x", torch.nn.Identity(), lambda *_: torch.zeros(()))
    made.losses, made.gradients = losses, [{"w": torch.tensor(gradient, dtype=torch.float64)} for _ in losses]
    return made


@pytest.mark.parametrize(
    ("losses", "gradient", "agrees"),
    [
        ([1.0, 0.5], [1.0, 2.0], True),
        ([1.0, 0.5 + 1e-4], [1.0, 2.0], False),
        ([1.0, 0.5], [1.0, 2.001], False),
        ([1.0, math.nan], [1.0, 2.0], False),
        ([1.0, 0.5], [1.0, math.nan], False),
    ],
)
def test_verdict(losses, gradient, agrees):
    reference, eager = run([1.0, 0.5], [1.0, 2.0]), run([1.0, 0.5 + 1e-6], [1.0, 2.00001])
    assert judge(run(losses, gradient), eager, reference).agrees is agrees


@pytest.mark.slow
def test_a_wrong_gradient_is_noticed(monkeypatch):
    """A pass that scales every product in the backward graph must not pass for rounding."""

    def wrong(self, gm):
        changed = False
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
            with gm.graph.inserting_after(node):
                scaled = fxpasses.insert_call(gm.graph, torch.ops.aten.mul.Tensor, (node, 1.001), like=node)
            node.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)
            changed = True
        return changed

    monkeypatch.setattr(FuseScatterAdd, "apply", wrong)
    monkeypatch.setattr(FuseScatterAdd, "graphs", frozenset({"backward"}))
    torch._dynamo.reset()
    settings = DemoSettings(steps=1, layers=1, width=16, heads=2, context=16)
    (runs,) = train(settings)
    reference, eager, ours, inductor = runs
    assert not judge(ours, eager, reference).agrees
    assert judge(inductor, eager, reference).agrees


def test_the_text_is_real_and_the_batches_change():
    text = standard_library_bytes(200_000)
    assert len(text) == 200_000
    assert b"import " in bytes(text.tolist())
    shapes = {tuple(tokens.shape) for tokens, _ in batches(text, 20, 32, seed=0)}
    assert len({b for b, _ in shapes}) > 3
    assert len({t for _, t in shapes}) > 5


def test_a_width_that_the_heads_do_not_divide(capsys):
    assert main(["demo", "--width", "10", "--heads", "4"]) == 2
    assert "--width 10 must be a multiple of --heads 4" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--steps", "0"], ["--stepz", "3"]])
def test_wrong_arguments(wrong):
    with pytest.raises(SystemExit) as caught:
        main(["demo", *wrong])
    assert caught.value.code == 2
