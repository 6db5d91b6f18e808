"""The whole-model check: a table of stages, and an exit status."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import fxpasses
from fxpasses.checking.stages import captured
from fxpasses.checking.stages.model_steps import Steps
from fxpasses.commands.main import main
from fxpasses.exact import equivalent
from fxpasses.regional import with_regions
from tests import children
from tests.fxpasses.checking import plants


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # repro files go to the current directory
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


EAGER = {"compiler": "eager"}


def test_a_right_model_passes():
    subject = model()
    weights = [p.clone() for p in subject.parameters()]
    result = fxpasses.check(subject, torch.randn(3, 4), options=EAGER, show=False)
    assert result
    assert [s.stage for s in result.stages][:2] == ["eager", "capture"]
    assert {"partition", "passes and partition"} <= {s.stage for s in result.stages}
    assert all(0 < s.max_error < 1e-5 for s in result.stages)
    assert all(s.times < 5 for s in result.stages)
    assert all(torch.equal(a, b) for a, b in zip(weights, subject.parameters(), strict=True))
    assert all(p.grad is None for p in subject.parameters())


def test_a_model_with_lazy_parameters_is_refused_by_name():
    subject = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))
    with pytest.raises(fxpasses.OptionsError, match=r"1\.weight.*call the model once"):
        fxpasses.check(subject, torch.randn(4, 3), options=EAGER, show=False)
    subject(torch.randn(4, 3))
    assert fxpasses.check(subject, torch.randn(4, 3), options=EAGER, show=False)


class _Doubles(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


def test_function_modes_of_the_user_change_a_call_once():
    """Dynamo's graph holds what they make of the calls; run under them, it would be another function than the model."""

    def model(x):
        return torch.sin(x).cos()

    with _Doubles():
        outer = torch._C._get_function_stack_at(0)
        result = fxpasses.check(model, torch.randn(3, requires_grad=True), options=EAGER, show=False)
        assert torch._C._get_function_stack_at(0) is outer
    assert result, result


def test_tensors_that_a_model_makes_are_wide_in_float64():
    def made(x):
        state = torch.zeros(2) + torch.full((2,), 0.1)
        return torch.stack([x, state]) * torch.arange(2)

    wide, why = Steps(made, (torch.ones(2),), {}, backward=False).reference_runs()
    assert why == ""
    assert wide[0]["output 0"].dtype is torch.float64
    assert wide[0]["output 0"][1].tolist() == [0.0, 0.1], "not the tenth of float32"
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.slow
def test_a_wrong_pass_is_named_with_the_module(capsys):
    options = {**EAGER, "passes": ["default", plants.wrong_gradient]}
    result = fxpasses.check(model(), torch.randn(3, 4), options=options)
    assert not result.ok
    wrong = {s.stage: s for s in result.stages if not s.ok}
    assert set(wrong) == {"pass wrong_gradient (joint)", "passes and partition"}
    assert wrong["pass wrong_gradient (joint)"].module in (
        "0",
        "1",
    )  # Dynamo counts the tanh to the layer before
    assert wrong["passes and partition"].module == "0"  # the first parameter whose gradient is wrong
    assert "WRONG" in str(result)
    printed = capsys.readouterr()
    assert "WRONG" in printed.out
    assert "passes and partition" in printed.err  # what it is at
    (file,) = re.findall(
        r"python (\S+)` shows what pass wrong_gradient \(joint\) does", "\n".join(result.notes)
    )
    assert runs_and_exits_with(file) == 1


def runs_and_exits_with(file):
    return children.run(file).returncode


class Broken(nn.Module):
    """Three graphs of different inputs, with a graph break after each."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x):
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        y = nn.functional.gelu(self.second(x)) + x.sum()
        torch._dynamo.graph_break()
        return self.last(y.tanh())


@pytest.mark.slow
def test_each_graph_of_a_broken_model_is_checked_by_itself(monkeypatch):
    subject = Broken()
    options = {**EAGER, "passes": ["default", plants.wrong_gradient]}
    assert fxpasses.check(subject, torch.randn(3, 4), options=EAGER, show=False).ok
    # More often than Dynamo compiles one function: it would go on in eager, where nothing is wrong.
    for _ in range(2):
        result = fxpasses.check(subject, torch.randn(3, 4), options=options, show=False, seconds=0)
        assert {s.stage for s in result.stages if not s.ok} == {
            "pass wrong_gradient (joint)",
            "passes and partition",
        }
        assert result.graphs == 3
    assert not torch._dynamo.eval_frame._debug_get_cache_entry_list(Broken.forward.__code__)


def test_a_check_that_checks_nothing_is_not_green():
    result = fxpasses.check(torch._dynamo.disable(lambda x: x * 2), torch.ones(3), options=EAGER, show=False)
    assert not result.ok
    assert not result.graphs
    assert "nothing was compiled" in str(result)


def test_ways_to_pass_inputs():
    x, y = torch.randn(3), torch.randn(3)

    def both(x, y):
        return (x * y).sin()

    assert fxpasses.check(both, x, y, options=EAGER, show=False).ok
    assert fxpasses.check(both, [x, y], options=EAGER, show=False).ok
    assert fxpasses.check(both, x, kwargs={"y": y}, options=EAGER, show=False).ok
    assert fxpasses.check(lambda pair, z: pair[0] * z, (x, y), y, options=EAGER, show=False).ok
    with pytest.raises(fxpasses.errors.OptionsError, match="seconds"):
        fxpasses.check(both, x, y, seconds=-1)


def test_without_time_made_up_inputs_are_left_out_and_a_note_says_so():
    result = fxpasses.check(model(), torch.randn(3, 4), options=EAGER, show=False, seconds=0)
    assert result.ok
    assert any("made-up inputs were left out" in note for note in result.notes)


def test_arguments_that_the_model_fills_are_fresh_in_each_step():
    class Cache:
        def __init__(self):
            self.values = []

    def remember(x, cache):
        cache.values.append(x * 2)
        return torch.stack(cache.values).sum(0)

    cache = Cache()
    assert fxpasses.check(remember, torch.randn(3), cache, options=EAGER, show=False).ok
    assert not cache.values


def test_results_that_change_from_run_to_run_are_not_called_random_numbers():
    count = iter(range(100))
    result = fxpasses.check(lambda x: x * next(count), torch.randn(3), options=EAGER, show=False)
    assert any("other results each time" in note for note in result.notes)


def test_a_function_and_keywords():
    result = fxpasses.check(
        lambda x, *, y: (x * y).sin(), (torch.randn(3),), {"y": 2.0}, options=EAGER, show=False
    )
    assert result.ok


def test_random_models_are_compared_graph_by_graph():
    result = fxpasses.check(
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(8, 4), options=EAGER, show=False
    )
    assert result.ok
    assert any("random" in note for note in result.notes)


@pytest.mark.slow
def test_inductor_is_the_last_stage():
    result = fxpasses.check(model(), torch.randn(3, 4), show=False)
    assert result.ok, str(result)
    assert result.stages[-1].stage == "inductor"


MODULE = """
import torch
from torch import nn

def right():
    return nn.Linear(4, 2), (torch.ones(3, 4),)
"""


def test_exit_status(tmp_path, capsys):
    path = tmp_path / "subject.py"
    path.write_text(MODULE)
    assert main(["check", f"{path}:right", "--compiler", "eager"]) == 0
    assert "capture" in capsys.readouterr().out
    assert main(["check", f"{path}:wrong"]) == 2
    assert main(["check", f"{path}:right", "--option", "region=off"]) == 2
    assert "did you mean" in capsys.readouterr().err.lower()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.layer(self.norm(x)).tanh()


def blocks():
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(8, 2))


@pytest.mark.slow
def test_regions_are_a_stage_of_their_own():
    result = fxpasses.check(blocks(), torch.randn(3, 8), options={**EAGER, "regions": "always"}, show=False)
    assert result.ok, str(result)
    assert [s.stage for s in result.stages][-2:] == ["passes and partition", "regions"]
    without = fxpasses.check(
        blocks(), torch.randn(3, 8), options={**EAGER, "regions": "off"}, show=False, seconds=0
    )
    assert "regions" not in [s.stage for s in without.stages]


def hands_over_the_weights_of_another_layer(*given, **more):
    found, kept = with_regions(*given, **more)
    if not kept:
        return found, kept
    first, *_, last = [n for n in found.graph.nodes if "fxpasses" in str(n.target)]
    position = next(i for i, n in enumerate(last.args[1]) if "layer_parameters_weight" in n.name)
    given = list(last.args[1])
    given[position] = first.args[1][position]
    last.update_arg(1, given)
    found.recompile()
    return found, kept


@pytest.mark.slow
def test_a_fault_of_the_region_machinery_is_named(monkeypatch, capsys):
    monkeypatch.setattr(
        "fxpasses.pipeline.compile_graph.with_regions", hands_over_the_weights_of_another_layer
    )
    result = fxpasses.check(blocks(), torch.randn(3, 8), options={**EAGER, "regions": "always"})
    assert not result.ok
    (wrong,) = [s for s in result.stages if not s.ok]
    assert wrong.stage == "regions"
    assert wrong.module in ("3", "4")  # the last layer, or the node behind it
    assert "regions" in capsys.readouterr().out


REGION_MODULE = """
import torch
from torch import nn
from torch._inductor.lowering import make_pointwise, register_lowering
from torch._inductor.virtualized import V, ops

tanh = torch.ops.aten.tanh.default


def wrong_alone(x):
    # A region has one, the whole model has three.
    alone = len(V.graph.graph.find_nodes(op="call_function", target=tanh)) == 1
    return make_pointwise(lambda v: ops.tanh(v) * ops.constant(1.01 if alone else 1.0, torch.float32))(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.layer(self.norm(x)).tanh()


def blocks():
    register_lowering(tanh, type_promotion_kind=None)(wrong_alone)
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(8, 2)), (torch.randn(3, 8),)
"""


@pytest.mark.slow
def test_a_fault_inside_a_region_is_seen_and_fails_in_ci(tmp_path):
    path = tmp_path / "subject.py"
    path.write_text(REGION_MODULE)
    options = "--option", "regions=always", "--no-backward"
    done = children.run("-m", "fxpasses", "check", f"{path}:blocks", *options, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    rows = [line for line in done.stdout.splitlines() if "│" in line]
    assert [row.split("│")[1].strip() for row in rows if "WRONG" in row] == ["inductor with regions"], (
        done.stdout
    )
    shown = re.search(
        r"python (\S+repro\.py)` shows what Inductor does on (\d+) call", " ".join(done.stdout.split())
    )
    assert shown, done.stdout
    assert int(shown[2]) <= 2
    repro = children.run(shown[1], cwd=tmp_path)
    assert repro.returncode == 1, repro.stderr
    assert "Inductor is wrong" in repro.stdout


def test_what_eager_writes_in_place_is_judged_exactly(monkeypatch):
    found = []

    def judged(before, after, values, **how):
        found.append(equivalent(before, after, values, **how))
        *_, mean, variance = after.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        variance.args = (variance.args[0], mean.args[1])
        found.append(equivalent(before, after, values, **how))
        return found[0]

    monkeypatch.setattr(captured, "equivalent", judged)
    subject = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True))
    options = {**EAGER, "passes": []}
    assert fxpasses.check(subject, torch.randn(5, 4), options=options, show=False)
    right, wrong = map(str, found)
    assert right.startswith("EQUAL")
    assert re.match("DIFFERENT: input .* after the run", wrong)


def test_jagged_tensors_are_compared_by_what_they_hold():
    rows = [torch.randn(n, 3) for n in (2, 4)]
    given = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    assert fxpasses.check(lambda x: x.sin() * 2, given, options={"compiler": "eager"}, show=False).ok


def test_sparse_tensors_are_compared_by_what_they_hold():
    given = torch.eye(4).to_sparse()  # of which Dynamo makes no graph
    found = fxpasses.check(torch.sparse.mm, given, torch.randn(4, 2), show=False)
    assert [stage.problems for stage in found.stages] == [(), ()]


def test_wrong_rows_of_a_jagged_tensor_are_found():
    class Wrong(torch.nn.Module):
        def forward(self, x):
            return x * (3 if torch.compiler.is_compiling() else 2)

    given = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    found = fxpasses.check(Wrong(), given, options={"compiler": "eager"}, show=False)
    assert not found.ok
