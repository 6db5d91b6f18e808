import math

import pytest
import torch

import fxpasses
from fxpasses.cli import main
from fxpasses.demo import DemoSettings, Run, judge, train
from fxpasses.demo.data import batches, standard_library_bytes
from fxpasses.passes import FuseScatterAdd

SMALL = ["--steps", "3", "--layers", "1", "--width", "16", "--heads", "2", "--context", "16"]


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


@pytest.mark.parametrize("wrong", [["--steps", "0"], ["--width", "10", "--heads", "4"], ["--stepz", "3"]])
def test_wrong_arguments(wrong):
    with pytest.raises(SystemExit) as caught:
        main(["demo", *wrong])
    assert caught.value.code == 2
