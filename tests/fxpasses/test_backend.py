"""The backend as torch.compile sees it: found by name, counted, cached, reported."""

import logging

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses.compiling.graph_compilers import cache_identity
from fxpasses.compiling.options import Options
from fxpasses.passes import EliminateDeadCode, FoldConstants
from tests import children

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


EAGER = {"compiler": "eager"}


@pytest.mark.slow
def test_found_by_name_without_an_import(tmp_path):
    program = (
        "import sys, torch\n"
        "assert 'fxpasses' in torch._dynamo.list_backends()\n"
        "assert not any(name.startswith('fxpasses') for name in sys.modules)\n"
        "f = torch.compile(lambda x: x.sin() + 1, backend='fxpasses', options={'compiler': 'eager'})\n"
        "print(torch.equal(f(torch.ones(3)), torch.ones(3).sin() + 1))\n"
    )
    done = children.run("-c", program, cwd=tmp_path)
    assert done.stdout.strip() == "True", done.stderr


def test_stats_count_graphs_recompiles_and_passes():
    f = torch.compile(lambda x: (x.exp() * x.exp()).sum(), backend="fxpasses", options=EAGER, dynamic=False)
    f(torch.ones(3, requires_grad=True)).backward()
    f(torch.ones(4))
    counted = fxpasses.stats()
    assert (counted.graphs, counted.recompiles, counted.joint, counted.backward, counted.inference) == (
        2,
        1,
        1,
        1,
        1,
    )
    assert counted.pass_changes["eliminate_common_subexpressions"] == 2
    assert counted.seconds["total"] > 0
    assert counted.seconds["total"] == pytest.approx(
        sum(seconds for stage, seconds in counted.seconds.items() if stage != "total")
    )
    assert counted.fallbacks == ()


def test_what_a_step_does_not_need_is_not_computed_twice_over_graphs():
    """Two graphs around a graph break are compiled apart."""

    def f(x):
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    x = torch.ones(3)
    assert torch.equal(torch.compile(f, backend="fxpasses", options=EAGER)(x), f(x))
    assert fxpasses.stats().graphs == 2


def test_report_says_why_sizes_are_guarded(tmp_path):
    def halves(x):
        return x.view(2, -1).sum(0)

    options = {**EAGER, "report": str(tmp_path)}
    torch.compile(halves, backend="fxpasses", options=options, dynamic=True)(torch.ones(8))
    text = (tmp_path / "graph_0" / "guards.txt").read_text()
    assert "% 2 == 0" in text
    assert "x.view(2, -1)" in text


def test_report_writes_readable_files(tmp_path):
    model = nn.Linear(3, 3)
    options = {**EAGER, "report": str(tmp_path)}
    torch.compile(model, backend="fxpasses", options=options)(torch.ones(2, 3)).sum().backward()
    folder = tmp_path / "graph_0"
    assert {p.name for p in folder.iterdir()} == {
        "traced.py",
        "joint.py",
        "forward.py",
        "backward.py",
        "passes.txt",
        "partition.txt",
        "graph.json",
    }
    text = (folder / "backward.py").read_text()
    assert "gradient of" in text
    assert "float32[3, 3]" in text
    assert "eliminate_dead_code on joint" in (folder / "passes.txt").read_text()


def test_logging_under_its_own_name(caplog):
    with caplog.at_level(logging.INFO, "fxpasses"):
        torch.compile(lambda x: x + 1, backend="fxpasses", options=EAGER)(torch.ones(3))
    assert any(r.name.startswith("fxpasses.") for r in caplog.records)


def test_parameters_that_a_step_changes_are_never_folded():
    model = nn.Linear(3, 1)
    compiled = torch.compile(model, backend="fxpasses", options=EAGER)
    x = torch.ones(2, 3)
    with torch.no_grad():
        first = compiled(x)
        model.weight.add_(1)
        assert torch.allclose(compiled(x), first + 3)


def test_identity_covers_passes_and_options():
    base = cache_identity(Options.parse())
    assert base == cache_identity(Options.parse())
    others = [
        Options.parse({"passes": []}),
        Options.parse({"passes": [EliminateDeadCode()]}),
        Options.parse({"passes": [FoldConstants(max_bytes=1)]}),
        Options.parse({"passes": [FoldConstants(max_bytes=2)]}),
        Options.parse({"memory_budget": 0.5}),
    ]
    identities = [cache_identity(o) for o in others]
    assert len({base, *identities}) == len(others) + 1


def test_a_pass_that_writes_to_what_it_closes_over_has_no_identity():
    seen = []

    @fxpasses.graph_pass
    def closes(gm):
        seen.append(gm)
        return False

    @fxpasses.graph_pass
    def plain(gm):
        return False

    assert closes.identity() is None
    assert cache_identity(Options.parse({"passes": [closes]})) is None
    assert cache_identity(Options.parse({"passes": [plain]})) is not None


def test_a_pass_without_identity_is_compiled_without_caches():
    seen = []

    @fxpasses.graph_pass
    def closes(gm):
        seen.append(len(gm.graph.nodes))
        return False

    model = nn.Linear(3, 3)
    x = torch.ones(2, 3)
    for expected in (1, 2):
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(model, backend="fxpasses", options={"passes": [closes]})
            torch.testing.assert_close(compiled(x), model(x))
        assert len(seen) == expected
    assert fxpasses.stats().cache_hits == 0


CACHED = """
import sys, torch, fxpasses
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
options = {"passes": ["eliminate_dead_code"]} if sys.argv[1] == "other" else {}
compiled = torch.compile(model, backend="fxpasses", options=options)
x = torch.ones(2, 4, requires_grad=True)
compiled(x).sum().backward()
torch.testing.assert_close(x.grad, model.weight.sum(0).expand(2, 4))
print(fxpasses.stats().cache_hits)
"""


@pytest.mark.slow
def test_autograd_cache_hits_for_the_same_passes_and_only_those(tmp_path, monkeypatch):
    script = tmp_path / "cached.py"
    script.write_text(CACHED)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))

    def hits(which, run=children.run):
        done = run(script, which)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert [hits("default"), hits("default", children.run_fresh), hits("other")] == [0, 1, 0]


@pytest.mark.gpu
def test_reduce_overhead_uses_cuda_graphs():
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).cuda()
    compiled = torch.compile(model, backend="fxpasses", mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(8, 16, device="cuda", requires_grad=True)
        wanted = torch.autograd.grad(model(x).sum(), x)[0]
        torch.compiler.cudagraph_mark_step_begin()
        (got,) = torch.autograd.grad(compiled(x).sum(), x)
        torch.testing.assert_close(got, wanted)
    counters = torch._dynamo.utils.counters["inductor"]
    assert counters["cudagraph_skips"] == 0


def test_reduce_overhead_reaches_inductor(monkeypatch):
    """The logic of the mode, without a GPU: forward and backward are compiled with CUDA graphs asked for."""
    from fxpasses import _torch

    asked = []
    inner = _torch.compile_fx_inner

    def spy(gm, inputs, **how):
        asked.append(_torch.inductor_config.triton.cudagraphs)
        return inner(gm, inputs, **how)

    monkeypatch.setattr(_torch, "compile_fx_inner", spy)
    x = torch.ones(2, 3, requires_grad=True)
    torch.compile(nn.Linear(3, 3), backend="fxpasses", mode="reduce-overhead")(x).sum().backward()
    assert asked == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("setting", [{"freezing": True}, {"cpp_wrapper": True}], ids=lambda s: next(iter(s)))
def test_settings_that_inductor_reads_before_its_inner_compiler(setting):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    compiled = torch.compile(model, backend="fxpasses", options={"inductor": setting})
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert fxpasses.stats().inference == 1


def test_settings_of_the_process_reach_inductor_too():
    model = nn.Linear(3, 3).eval()
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        x = torch.randn(2, 3)
        torch.testing.assert_close(torch.compile(model, backend="fxpasses")(x), model(x))


def test_threads_that_use_the_backend_first_may_all_register_it():
    registry = torch._dynamo.backends.registry
    backend = registry.lookup_backend("fxpasses")
    assert registry.register_backend(compiler_fn=backend, name="fxpasses") is backend
    with pytest.raises(AssertionError, match="duplicate name: fxpasses"):
        registry.register_backend(compiler_fn=lambda gm, inputs: gm, name="fxpasses")
    with pytest.raises(AssertionError, match="duplicate name: eager"):
        registry.register_backend(compiler_fn=registry.lookup_backend("eager"), name="eager")
