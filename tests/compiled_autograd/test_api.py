"""enable, disable, reset, stats, explain, the log, saved graphs, CUDA-graph plans."""

import logging
import operator
import weakref

import pytest
import torch

import compiled_autograd
from compiled_autograd import _torch, api
from compiled_autograd.errors import (
    GraphReloadError,
    InvalidCompilerError,
    RefusedError,
    UnboundOperatorError,
)
from compiled_autograd.program import cudagraphs
from compiled_autograd.session import fallback
from tests.compiled_autograd.support import fresh, keep


def loss(size=3):
    x = torch.arange(1.0, size + 1, requires_grad=True)
    return x, (x.exp() * x).sum()


@pytest.mark.parametrize("compiler", [3, None, lambda a, b, c: a])
def test_bad_compilers_are_refused_before_anything_is_enabled(compiler):
    with pytest.raises(InvalidCompilerError), compiled_autograd.enable(compiler):
        raise AssertionError("must not be reached")


def test_unknown_backend_is_torchs_error():
    with pytest.raises(torch._dynamo.exc.InvalidBackend), compiled_autograd.enable("no such backend"):
        pass


def test_a_compiler_that_returns_nothing_callable():
    _, out = loss()
    with fresh(lambda graph: 3), pytest.raises(InvalidCompilerError, match="not callable"):
        out.backward()


def test_no_choice_of_dynamic_sizes_is_none():
    """As in torch's own ``_enable``."""
    x = torch.ones(2, requires_grad=True)
    with compiled_autograd.enable("eager", dynamic=None):
        (x * 3).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_blocks_nest_and_disable_counts():
    graphs = []

    def record(graph):
        graphs.append(graph)
        return graph

    with fresh(record):
        loss()[1].backward()
        with compiled_autograd.disable():
            loss()[1].sin().backward()
            with compiled_autograd.enable(keep):
                loss()[1].cos().backward()
        loss()[1].tan().backward()
    loss()[1].backward()
    assert len(graphs) == 2
    assert compiled_autograd.stats().captures == 3


def test_each_compiler_gets_the_graph_once():
    first, second = [], []
    for _ in range(3):
        with compiled_autograd.enable(lambda graph: first.append(graph) or graph):
            loss()[1].backward()
        with compiled_autograd.enable(lambda graph: second.append(graph) or graph):
            loss()[1].backward()
    assert (len(first), len(second)) == (1, 1)
    stats = compiled_autograd.stats()
    assert (stats.captures, stats.hits, stats.compiles) == (1, 5, 2)


def test_stats_read_by_name_and_reset():
    with fresh():
        loss()[1].backward()
    stats = compiled_autograd.stats()
    assert stats["captures"] == stats.captures == 1
    assert stats.seconds["capture"] > 0
    assert dict(stats)["hits"] == 0
    with pytest.raises(KeyError):
        stats["no such count"]
    compiled_autograd.reset()
    assert compiled_autograd.stats().captures == 0


def test_reset_inside_a_pass_is_refused():
    x, out = loss()
    x.register_hook(lambda grad: compiled_autograd.reset())
    with fresh(), pytest.raises(RuntimeError, match="inside a backward pass"):
        out.backward()


def test_config_patch():
    with pytest.raises(AttributeError, match="no setting 'loud'"), compiled_autograd.config.patch(loud=True):
        pass
    with compiled_autograd.config.patch(fallback=False):
        out = loss()[1]
        with (
            fresh(),
            torch.autograd.detect_anomaly(check_nan=False),
            pytest.raises(RefusedError, match="anomaly"),
        ):
            out.backward()
    assert compiled_autograd.config.fallback


def test_the_graph_is_readable():
    graphs = []
    with fresh(lambda graph: graphs.append(graph) or graph):
        out = loss()[1]
        node = out.grad_fn
        out.backward()
    (graph,) = graphs
    names = [n.name for n in graph.graph.nodes]
    assert "mul_backward0" in names
    assert "exp_backward0" in names
    assert "accumulate_grad" in names
    by_name = {n.name: n for n in graph.graph.nodes}
    assert by_name["sum_backward0"].meta["autograd_node"] == "SumBackward0"
    assert by_name["sum_backward0"].meta["seq_nr"] == node._sequence_nr()
    assert "def forward(self, inputs, sizes, scalars, hooks, packed)" in graph.code


def test_sizes_and_scalars_stay_symbolic():
    graphs = []
    with fresh(lambda graph: graphs.append(graph) or graph):
        for size in (3, 7, 2):
            x, out = loss(size)
            out.backward()
            torch.testing.assert_close(x.grad, (x.exp() * (1 + x)).detach())
    assert len(graphs) == 1


def test_static_sizes_become_symbolic_when_they_change():
    reasons = []
    with fresh(dynamic=False):
        for size in (3, 3, 7, 2, 9):
            loss(size)[1].backward()
    stats = compiled_autograd.stats()
    assert stats.captures == 2
    reasons = [record.reason for record in api.sessions.records.captures]
    assert reasons[0] == "the first capture"
    assert "size 3 changed and became symbolic" in reasons[1]


def test_explain():
    def function():
        x, out = loss()
        out.backward()
        _, out = loss()
        out.backward()
        x, out = loss()
        y = x.exp()
        y.register_hook(lambda grad: None)
        y.sum().backward()
        x = torch.ones(3, requires_grad=True)
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            x.sum().backward()
        return "done"

    report = compiled_autograd.explain(function)
    assert [record.outcome for record in report.passes] == ["capture", "hit", "capture", "fallback"]
    assert report.result == "done"
    assert len(report.graphs) == 2
    assert report.reasons[0] == "the first capture"
    assert report.captures[1].node == "ExpBackward0"
    assert [record.reason for record in report.fallbacks] == ["anomaly mode"]
    assert "4 backward passes, 2 captures, 1 in eager" in str(report)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda y: y.register_hook(lambda g: g), "its hooks are 1 tensor_pre_hook, were none"),
        (lambda y: y.register_hook(lambda g: g) and y.register_hook(lambda g: g), "2 tensor_pre_hook"),
    ],
)
def test_reasons_name_the_property(change, expected):
    def passes():
        for hooked in (False, True):
            x = torch.ones(3, requires_grad=True)
            y = x.exp()
            if hooked:
                change(y)
            y.sum().backward()

    assert expected in compiled_autograd.explain(passes).reasons[1]


def test_reason_of_another_constant_and_another_dtype():
    def passes():
        x = torch.ones(2, 3, requires_grad=True)
        x.sum(0).exp().sum().backward()
        x.grad = None
        x.sum(1).exp().sum().backward()
        x = torch.ones(2, 3, requires_grad=True, dtype=torch.float64)
        x.sum(1).exp().sum().backward()

    _, constant, dtype = compiled_autograd.explain(passes).reasons
    assert "SumBackward1" in constant
    assert "is 1, was 0" in constant
    assert "float64" in dtype or "7, was 6" in dtype


def test_verbose_log(caplog):
    with (
        compiled_autograd.config.patch(verbose=True),
        caplog.at_level(logging.INFO, "compiled_autograd"),
        fresh(),
    ):
        loss()[1].backward()
        loss()[1].backward()
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            loss()[1].backward()
    text = caplog.text
    assert "cache miss: the first capture" in text
    assert "MulBackward0 (NodeCall 2)" in text
    assert "def forward" in text
    assert "cache hit" in text
    assert "runs in eager: anomaly mode" in text


def test_no_log_unless_asked_for(caplog):
    with caplog.at_level(logging.DEBUG, "compiled_autograd"), fresh():
        loss()[1].backward()
    assert caplog.text == ""


def test_save_and_load(tmp_path):
    graphs, calls = [], []

    def spy(graph):
        graphs.append(graph)

        def run(inputs, *rest):
            calls.append((list(inputs), *rest))
            return graph(inputs, *rest)

        return run

    with fresh(spy):
        x, out = loss()
        (expected,) = torch.autograd.grad(out, x)
    path = tmp_path / "graph.py"
    compiled_autograd.save_graph(graphs[0], path)
    assert "MulBackward0" in path.read_text()
    inputs, *rest = calls[0]
    with torch.no_grad():
        (found,) = compiled_autograd.load_graph(path)(inputs, *rest)
    torch.testing.assert_close(found, expected)


def test_load_errors(tmp_path):
    with pytest.raises(GraphReloadError, match="cannot be read"):
        compiled_autograd.load_graph(tmp_path / "missing.py")
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(GraphReloadError, match="defines no forward"):
        compiled_autograd.load_graph(tmp_path / "empty.py")
    with pytest.raises(UnboundOperatorError, match="NoSuchBackward0"):
        compiled_autograd.program.persist.operator("NoSuchBackward0")


def test_activations_are_freed_as_they_are_consumed():
    def freed(enabled):
        alive = []
        refs = []

        class Watch(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                out = x * 2
                ctx.save_for_backward(out)
                refs.append(weakref.ref(out))
                return out

            @staticmethod
            def backward(ctx, grad):
                alive.append([ref() is not None for ref in refs])
                return grad * 2

        def run():
            x = torch.randn(3, requires_grad=True)
            y = x
            for _ in range(4):
                y = Watch.apply(y).sin()
            out = y.sum()
            del y
            out.backward()

        if enabled:
            with fresh(keep):
                run()
        else:
            run()
        return alive

    assert freed(True) == freed(False)


def test_cuda_graph_plan_lifts_scalars_and_names_obstacles():
    graphs = []

    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad

    class OnCuda(torch.Tensor):
        device = torch.device("cuda")

    with fresh(lambda graph: graphs.append(graph) or graph):
        x = torch.ones(3, requires_grad=True)
        (x / torch.tensor(2.0)).sum().backward()
        Opaque.apply(x).sum().backward()
    divided, opaque = graphs
    inputs = [torch.ones(3).as_subclass(OnCuda) for _ in range(8)]
    elements = [n for n in divided.graph.nodes if n.target is operator.getitem and n.args[0].name == "inputs"]
    scalar = next(n for n in elements if any(u.name == "div_backward0" for u in n.users))
    inputs[scalar.args[1]] = torch.tensor(2.0)
    assert cudagraphs.liftable_scalars(divided, inputs) == [scalar.args[1]]
    assert cudagraphs.skip_reason(divided, inputs) is None
    cudagraphs.lift_scalars(inputs, [scalar.args[1]], torch.device("meta"))
    assert inputs[scalar.args[1]].device.type == "meta"
    inputs[scalar.args[1]] = torch.ones(3)
    assert "DivBackward0 uses a CPU tensor" in cudagraphs.skip_reason(divided, inputs)
    cuda_only = [torch.ones(3).as_subclass(OnCuda) for _ in range(8)]
    assert "OpaqueBackward runs Python" in cudagraphs.skip_reason(opaque, cuda_only)
    assert cudagraphs.liftable_scalars(divided, [torch.tensor(1.0)] * 8) == []


def test_an_unknown_torch_runs_in_eager_and_says_so_once(monkeypatch, recwarn):
    class OtherProtocol:
        def begin_capture(self, everything):
            pass

    problem = _torch.hook_problem(OtherProtocol)
    assert "begin_capture(self, everything) has other parameters than we know" in problem
    monkeypatch.setattr(_torch, "HOOK_PROBLEM", problem)
    fallback._warn_of_unknown_torch.cache_clear()
    try:
        for _ in range(2):
            with compiled_autograd.enable(keep):
                x, out = loss()
                out.backward()
        assert x.grad is not None
        assert compiled_autograd.stats().captures == 0
        assert len([w for w in recwarn if "everything runs in eager" in str(w.message)]) == 1
    finally:
        fallback._warn_of_unknown_torch.cache_clear()


def test_together_with_torchs_own_compiled_autograd():
    from torch._dynamo import compiled_autograd as torchs

    for _ in range(2):
        with torchs._enable(lambda graph: graph):
            x, out = loss()
            out.backward()
            expected = x.grad
        with compiled_autograd.enable(keep):
            x, out = loss()
            out.backward()
        torch.testing.assert_close(x.grad, expected)


def test_a_cpu_pass_says_why_it_is_no_cuda_graph(caplog):
    settings = compiled_autograd.config.patch(verbose=True, cudagraphs=True)
    with settings, caplog.at_level(logging.INFO, "compiled_autograd"), fresh():
        loss()[1].backward()
    assert "no CUDA graph: GraphRoot uses a CPU tensor" in caplog.text.replace("torch::autograd::", "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_peak_is_no_higher_than_eagers():
    def peak(enabled):
        x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
        y = x
        for _ in range(16):
            y = (y * y).sin()
        out = y.sum()
        del y
        torch.cuda.reset_peak_memory_stats()
        with fresh() if enabled else compiled_autograd.disable():
            out.backward()
        return torch.cuda.max_memory_allocated()

    peak(True)
    assert peak(True) <= peak(False) * 1.01
