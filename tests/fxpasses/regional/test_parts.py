"""The parts on their own: repeats of a sequence, the decision, the report, failures."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import fxpasses
from fxpasses.regional import CostModel, RegionContractError, RegionGraphError
from fxpasses.regional.aliases import separate_aliases
from fxpasses.regional.compiled_region import table
from fxpasses.regional.suffix_array import Repeat, not_overlapping, repeated_substrings, suffix_array
from tests.fxpasses.regional.support import Block, Stack, check, compiled, copies, reasons, taken
from tests.fxpasses.support import traced

pytestmark = pytest.mark.usefixtures("old_objects_aside", "fresh_dynamo")

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@given(st.lists(st.integers(-2, 2), max_size=40))
@settings(max_examples=200, deadline=None)
def test_suffix_array_sorts_suffixes(sequence):
    wanted = sorted(range(len(sequence)), key=lambda i: sequence[i:])
    assert suffix_array(sequence).tolist() == wanted


@given(st.lists(st.integers(0, 2), max_size=30))
@settings(max_examples=200, deadline=None)
def test_repeats_are_all_occurrences_and_cannot_be_extended(sequence):
    found = repeated_substrings(sequence, shortest=1, fewest=2, most=1000)
    for repeat in found:
        stretch = sequence[repeat.starts[0] : repeat.starts[0] + repeat.length]
        places = [
            i for i in range(len(sequence) - len(stretch) + 1) if sequence[i : i + len(stretch)] == stretch
        ]
        assert list(repeat.starts) == places
    longest = max((len(s) for s in _twice(sequence)), default=0)
    if longest and 2 * longest <= len(sequence):
        assert any(repeat.length >= longest for repeat in found)


def _twice(sequence):
    """Stretches that occur twice without overlap."""
    n = len(sequence)
    for length in range(1, n // 2 + 1):
        for i in range(n - 2 * length + 1):
            if any(
                sequence[i : i + length] == sequence[j : j + length]
                for j in range(i + length, n - length + 1)
            ):
                yield sequence[i : i + length]


def test_occurrences_that_overlap_are_left_out():
    assert not_overlapping([0, 1, 2, 3, 6], 3) == [0, 3, 6]
    assert repeated_substrings([1, 1, 1, 1], 1, 4) == [Repeat(1, (0, 1, 2, 3))]


def test_outputs_in_the_same_memory_are_returned_once():
    gm = traced(lambda x: (y := x.sin(), y.t(), x.view(-1), y.view(-1)[1:3], x.cos()), torch.ones(2, 3))
    (output,) = gm.graph.find_nodes(op="output")
    returned, sources = separate_aliases(gm, output.args[0])
    assert [node.name for node in returned] == ["sin", "cos"]
    assert [(s.is_input, s.index) for s in sources] == [
        (False, 0),
        (False, 0),
        (True, 0),
        (False, 0),
        (False, 1),
    ]
    x = torch.randn(2, 3)
    made = [s.get([x], [x.sin(), x.cos()], {}) for s in sources]
    for mine, wanted in zip(made, gm(x), strict=True):
        assert torch.equal(mine, wanted)


def test_the_cost_model_decides():
    layers = [Block() for _ in range(6)]
    graph = fxpasses.capture(Stack(layers), X).forward
    generous = CostModel(least_saved=0.0, call_microseconds=0.0, seconds_per_call=0.0)
    found = fxpasses.regions(graph, cost=generous)
    assert found.taken[0].copies >= 5
    assert found.covered > found.calls / 2
    assert found.saved_seconds > 0
    slow = CostModel(call_microseconds=1e6)
    (left, *_) = fxpasses.regions(graph, cost=CostModel(least_saved=0.0, call_microseconds=1e6)).left
    assert "in 1000 steps" in left.reason
    assert not fxpasses.regions(graph, cost=slow).taken
    assert "one region" in str(found)


def test_the_report_is_in_the_stats_and_in_the_files(tmp_path):
    model = Stack([Block() for _ in range(4)])
    compiled(model, report=str(tmp_path))(X).sum().backward()
    (report,) = fxpasses.stats().region_reports
    assert (fxpasses.stats().regions, fxpasses.stats().region_calls) == (1, 4)
    assert report.taken[0].modules == tuple(f"layers.{i}" for i in range(4))
    assert report.taken[0].key
    assert "layers.*: 4 copies" in (tmp_path / "graph_0" / "regions.txt").read_text()
    assert (tmp_path / "graph_0" / "regions" / "graph_0" / "backward.py").exists()
    assert "region_forward" in (tmp_path / "graph_0" / "forward.py").read_text()


def test_a_pass_runs_once_for_each_region():
    seen = []

    @fxpasses.graph_pass
    def count(gm):
        seen.append(sum(node.target is torch.ops.aten.erf.default for node in gm.graph.nodes))
        return False

    model = Stack([Block() for _ in range(5)])
    compiled(model, passes=[count])(X)
    region, around = seen
    assert region > 0
    assert around == 0


@pytest.mark.parametrize("on_failure", ["raise", "eager"])
def test_a_pass_that_fails_on_a_region(on_failure):
    @fxpasses.graph_pass
    def fails(gm):
        raise ValueError("no")

    model = Stack([Block() for _ in range(4)])
    call = compiled(model, passes=[fails], on_failure=on_failure)
    if on_failure == "raise":
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="stage 'pass' pass 'fails' failed"):
            call(X)
        return
    torch.testing.assert_close(call(X), model(X))
    assert fxpasses.stats().fallbacks[0].reason.startswith("in a region")


def test_a_region_that_cannot_be_captured_stays_in_the_graph(monkeypatch):
    from fxpasses.pipeline import compile_graph

    def fail(*_):
        raise fxpasses.CaptureError("not today")

    monkeypatch.setattr(compile_graph, "_compile_region", fail)
    assert check(Stack([Block() for _ in range(4)]), [X]) == []
    assert "not today" in reasons()
    assert copies() == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["forward", "training", "cudagraphs"])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_regions_live_as_long_as_the_code_that_calls_them(compiler, mode):
    model = Stack([Block() for _ in range(4)])
    # Under "cudagraphs" Inductor gets the graph around as a whole, and calls regions by name.
    options = {"inductor": {"triton.cudagraphs": True}} if mode == "cudagraphs" else {}
    call = compiled(model, compiler=compiler, **options)
    output = call(X).sum()
    output.backward(retain_graph=True)
    key = taken()[0].key
    region = weakref.ref(table[key])
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    if mode == "forward":
        output.detach_()
    torch._dynamo.reset()
    gc.collect()
    if mode != "forward":  # the forward graph is gone; what it left for the backward pass is not
        model.zero_grad()
        output.backward()
        torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, wanted)
    del output, call
    gc.collect()
    assert region() is None
    with pytest.raises(RegionContractError):
        table[key]


@pytest.mark.slow
def test_a_graph_that_calls_regions_by_name_is_compiled_with_them():
    """One from AOTAutograd's cache would call regions that nobody holds."""
    for _ in range(2):
        torch._dynamo.reset()
        gc.collect()
        model = Stack([Block() for _ in range(4)])
        call = compiled(model, compiler="inductor", inductor={"triton.cudagraphs": True})
        for _ in range(2):
            gc.collect()
            output = call(X).sum()
            gc.collect()
            output.backward()
    assert fxpasses.stats().cache_hits == 0


def test_equal_layers_in_two_checkpoints_are_compiled_once():
    calls = []

    @fxpasses.graph_pass(graphs=["joint"])
    def count(gm):
        calls.append(sum(n.target is torch.ops.aten.erf.default for n in gm.graph.nodes))
        return False

    layers = nn.ModuleList(nn.Sequential(*(Block() for _ in range(n))) for n in (3, 4))

    def run(x):
        for part in layers:
            x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)
        return x

    compiled(run, passes=[count])(X.clone().requires_grad_()).sum().backward()
    assert calls == [2, 0]  # a layer, forward and in its gradient; the graph around
    assert len({item.key for item in taken()}) == 1


def test_a_region_of_another_process_is_a_clear_error():
    with pytest.raises(RegionContractError, match="not compiled in this process"):
        torch.ops.fxpasses.region_forward("0" * 32, [torch.ones(1)], [])


@pytest.fixture(scope="module")
def graph():  # of ATen operators
    return fxpasses.capture(Stack([Block() for _ in range(3)]), X).forward


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("sometimes", "into a list: ['sometimes']"),
        ("alway", "did you mean 'always'"),
        ("AUTO", "did you mean 'auto'"),
        ("layers.*", "into a list: ['layers.*']"),
        *(
            (value, "'always', or a list of module path patterns")
            for value in (3, [], [1], [""], None, False, b"auto")
        ),
    ],
)
def test_wrong_options(value, hint, graph):
    """The option and the argument of ``fxpasses.regions`` are one thing."""
    for ask in (lambda: fxpasses.Options.parse({"regions": value}), lambda: fxpasses.regions(graph, value)):
        with pytest.raises(fxpasses.OptionsError, match="regions") as raised:
            ask()
        assert hint in str(raised.value)


def test_patterns_are_taken_in_any_sequence(graph):
    assert [item.name for item in fxpasses.regions(graph, ["layers.*"]).taken] == ["layers.*"]
    assert fxpasses.regions(graph, "off").taken == ()


def test_a_pattern_that_no_module_matches_is_reported(graph):
    assert str(fxpasses.regions(graph, ["layer.*"])).endswith(
        "no module's path matches 'layer.*'; paths here: layers.2, layers.1, layers.0, first, layers.0.norm, layers.0.up, ..."
    )
    found = fxpasses.regions(graph, ["blocks.?", "layers.0"])
    assert [item.name for item in found.taken] == ["layers.0"]
    assert str(found).splitlines()[-1].startswith("no module's path matches 'blocks.?'; paths here: ")
    assert "layers.0: 1 copy of" in str(found)


@pytest.mark.parametrize("what", [nn.Linear(2, 2), None, torch.fx.symbolic_trace(nn.Linear(2, 2))])
def test_what_cannot_be_searched_is_a_clear_error(what):
    with pytest.raises(RegionGraphError, match=r"fxpasses\.capture") as raised:
        fxpasses.regions(what)
    assert raised.value.given is what


def test_dynamo_graphs_are_searched_without_compiling():
    found = []

    def look(gm, inputs):
        found.append(fxpasses.regions(gm, "always"))
        return gm

    torch.compile(Stack([Block() for _ in range(4)]), backend=look)(X)
    assert found[0].taken[0].name == "layers.*"
    assert fxpasses.stats().regions == 0


def test_the_report_says_what_was_found_and_why():
    reports = {}

    def look(gm, inputs):
        reports["always"] = fxpasses.regions(gm, "always")
        reports["auto"] = fxpasses.regions(gm, "auto", cost=CostModel(fewest=7))
        return gm

    torch.compile(Stack([Block() for _ in range(6)]), backend=look)(X)
    taken, left = str(reports["always"]), str(reports["auto"])
    assert taken.startswith("42 of 44 calls are in 1 region, called 6 times; saves about")
    assert "layers.*: 6 copies of 7 calls: one region, saves about" in taken
    assert left.startswith("none of 44 calls is in a region")
    assert "layers.*: 6 copies of 7 calls: left, 6 copies: worth it from 7" in left
    # A part of a repeat that is left is no news.
    assert [item.calls for item in reports["auto"].left if item.copies == 6] == [7]
    torch._dynamo.reset()
    torch.compile(nn.Linear(8, 8), backend=lambda gm, _: print(fxpasses.regions(gm)) or gm)(X)


class Normed(nn.Module):
    """Another layer each time, with the same norm in front, written as models of transformers do."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8 + n) for n in range(layers))

    def forward(self, x):
        for layer in self.layers:
            scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            x = layer(scaled * 2 + 1)[..., :8]
        return x


def _searched(model, **cost):
    found = []
    backend = lambda gm, _: found.append(fxpasses.regions(gm, cost=CostModel(**cost))) or gm  # noqa: E731
    torch.compile(model, backend=backend)(X)
    return found[0]


def test_pointwise_work_alone_is_left_to_fusion():
    found = _searched(Normed(9))
    assert not found.taken
    assert "without a matmul or the like: worth it from 64" in str(found)
    torch._dynamo.reset()
    assert _searched(Normed(9), fewest_fused=4, least_saved=0.1).taken


class Pointwise(nn.Module):
    """The same few operations many times: each on the result of the one before, or each on a parameter of its own."""

    def __init__(self, chained):
        super().__init__()
        self.weights, self.chained = nn.ParameterList(torch.ones(8) for _ in range(70)), chained

    def forward(self, x):
        found, value = [], x
        for weight in self.weights:
            before = value if self.chained else weight
            value = (
                (before * 0.9 + weight.square() * 0.1).sqrt() + 1e-8
            ).reciprocal() * weight.sin() - weight
            found.append(value)
        return found if not self.chained else value


@pytest.mark.parametrize("chained", [True, False])
def test_updates_of_many_parameters_are_one_kernel(chained):
    found = _searched(Pointwise(chained))
    assert bool(found.taken) is chained
    assert ("beside each other: one kernel computes them" in str(found)) is not chained


def test_regions_that_save_little_of_a_graph_are_left():
    model = Stack([Block() for _ in range(6)])
    assert _searched(model).taken
    torch._dynamo.reset()
    found = _searched(model, least_share=0.9)
    assert not found.taken
    assert "s of compile time: worth it from 90%" in str(found)


def test_a_model_without_repeats():
    assert check(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), [X]) == []
