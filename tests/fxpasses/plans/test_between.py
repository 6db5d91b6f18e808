"""Functions that run in Python between the graphs of a call have plans of their own, and later processes compile neither."""

import json
import threading
import types

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.graph_breaks.between import Functions, Stub, find_stubs, names_of, stub_of, without_hook
from fxpasses.plans.walks.walk import Walk
from tests import children
from tests.fxpasses.plans import functions_between
from tests.fxpasses.plans.functions_between import (
    Base,
    Layers,
    Local,
    WithLoss,
    breaks_first,
    chooses,
    decorated,
    gives_away,
    loss,
    makes_closures,
    shared_before,
    shared_with_generator,
    step,
    tripled,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def run(cache, *names):
    done = children.run("-m", functions_between.__name__, cache, *names)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_next_process_compiles_nothing(tmp_path):
    names = "WithLoss", "Layers", "Cells", "Local"
    cold, warm = run(tmp_path, *names), run(tmp_path, *names)
    for name in names:
        assert (cold[name][0], warm[name][0]) == (True, True), name
        assert cold[name][1] > 1, name  # graphs
    for name in names[:3]:
        _, graphs, used, written, refused = warm[name]
        assert (graphs, written, refused) == (0, 0, {}), name
        assert used > 2
        assert not cold[name][4].keys() - {"nothing was compiled"}, cold[name][4]
    assert {"another function runs in Python", "a graph break"} & cold["Local"][4].keys()  # by the torch


def compiled_step(model, cache, x, target):
    torch._dynamo.reset()
    fxpasses.reset_stats()
    return step(model, fxpasses.compile(model, cache=cache), x, target)


@pytest.fixture
def given():
    torch.manual_seed(0)
    return [torch.randn(3, 4, dtype=torch.float64) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WithLoss, Layers])
def test_what_such_a_function_reads_is_noticed(tmp_path, monkeypatch, given, kind):
    model = kind().double()
    torch.testing.assert_close(compiled_step(model, tmp_path, *given), step(model, model, *given))

    def other(result, target, *rest, scale=2.0, **named):
        result = (result - target).abs() * scale
        torch._dynamo.graph_break()
        return result.mean()

    monkeypatch.setattr(functions_between, "loss", other)
    found = compiled_step(model, tmp_path, *given)
    torch.testing.assert_close(found, step(model, model, *given))
    monkeypatch.setattr(functions_between.loss, "__defaults__", None)
    monkeypatch.setattr(functions_between.loss, "__kwdefaults__", {"scale": 5.0})
    compiled = fxpasses.compile(model, cache=tmp_path)
    for scale in (5.0, 7.0):
        functions_between.loss.__kwdefaults__["scale"] = scale
        torch.testing.assert_close(step(model, compiled, *given), step(model, model, *given))


@pytest.mark.slow
def test_a_layer_that_changes_between_calls(tmp_path, given):
    model = Layers().double()
    compiled = fxpasses.compile(model, cache=tmp_path)
    for change in (
        lambda: None,
        lambda: model.layers[1].linear.register_forward_hook(lambda module, args, out: out * 3),
        lambda: setattr(model.layers[2], "linear", nn.Linear(4, 4, bias=False).double()),
        lambda: setattr(
            model.layers[0], "forward", lambda x: model.layers[0].norm(model.layers[0].linear(x)) * 3
        ),
        lambda: model.layers[1].norm.eval(),
    ):
        change()
        for _ in range(2):
            torch.testing.assert_close(step(model, compiled, *given), step(model, model, *given))


@pytest.mark.slow
def test_other_compilers_of_such_a_function_are_not_disturbed(tmp_path, given):
    """Its frames enter a stub in this process; where no plan runs, that calls it as it is."""
    model, (x, target) = WithLoss().double(), given
    for _ in range(2):
        compiled_step(model, tmp_path, *given)
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    by_other = torch.compile(lambda x: loss(x, target) + decorated(x, target, scale=2.0), backend=backend)
    for _ in range(2):
        torch.testing.assert_close(by_other(x), loss(x, target) + decorated(x, target, scale=2.0))
    assert len(graphs) >= 2
    results = []
    thread = threading.Thread(target=lambda: results.append(loss(x, target)))
    thread.start()
    thread.join()
    assert results[0].equal(loss(x, target))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WithLoss, Layers])
def test_other_sizes(tmp_path, kind):
    torch.manual_seed(0)
    model = kind().double()
    for _ in range(2):
        torch._dynamo.reset()
        compiled = fxpasses.compile(model, cache=tmp_path)
        for rows in (3, 5, 7, 3):
            given = [torch.randn(rows, 4, dtype=torch.float64) for _ in range(2)]
            torch.testing.assert_close(step(model, compiled, *given), step(model, model, *given))


@pytest.mark.slow
def test_errors_of_such_a_function_are_its_own(tmp_path, given):
    model, (x, _) = WithLoss().double(), given
    compiled = fxpasses.compile(model, cache=tmp_path)
    step(model, compiled, *given)
    for _ in range(2):
        with pytest.raises((RuntimeError, TypeError)):
            compiled(x, torch.randn(3, 7, dtype=torch.float64))
        torch.testing.assert_close(step(model, compiled, *given), step(model, model, *given))


@pytest.mark.slow
def test_saved_and_loaded(tmp_path, given):
    model = WithLoss().double()
    expected = step(model, model, *given)
    compiled = fxpasses.compile(model, cache=tmp_path)
    step(model, compiled, *given)
    step(model, compiled, *given)
    fxpasses.save(compiled, tmp_path / "model.fxp")
    fxpasses.reset_stats()
    found = step(model, fxpasses.load(tmp_path / "model.fxp", model, trust=True), *given)
    torch.testing.assert_close(found, expected)
    assert fxpasses.stats().graphs == 0


def every(a, b=2, /, c=3, *rest, d, e=5, **named):
    total = [a + b, c, d]
    return lambda: (total, rest, e, named)


class Inner(Base):
    def method(self, x):
        return super().forward(x)


def test_a_stub_has_the_parameters_locals_and_cells_of_its_function():
    def closes(x):
        return every, x

    codes = [every.__code__, Inner.method.__code__, closes.__code__, loss.__code__, (lambda x: x).__code__]
    for code in codes[:4]:
        stub = stub_of(code)
        assert isinstance(stub, Stub)
        assert stub is stub_of(code)
        for fact in ("co_varnames", "co_cellvars", "co_freevars", "co_argcount", "co_kwonlyargcount"):
            assert getattr(stub.stub_code, fact) == getattr(code, fact), fact
    assert stub_of(codes[4]) is None  # "<lambda>" is no name

    def generates(x):
        yield x

    assert stub_of(generates.__code__) is None


def test_frames_enter_stubs_only_inside():
    class Planned:
        has_no_graph = False

        def __init__(self, function):
            self.function = function

        def __call__(self, *args, **kwargs):
            return "planned", self.function(*args, **kwargs)

    functions = Functions(Planned)
    stub = stub_of(every.__code__)

    def caller():
        return every(1, 2, 3, 4, d=5, f=6)

    def without():
        return caller(), without_hook(caller)()

    (kind, made), alone = functions.call([stub], without, (), {})
    assert alone() == made()
    assert kind == "planned"
    assert made() == ([3, 3, 5], (4,), 5, {"f": 6})
    assert isinstance(caller(), types.FunctionType)
    assert functions.call([], caller, (), {})[0] == "planned"
    assert functions.stubs() == [stub]


@pytest.mark.slow
def test_code_of_other_backends_is_not_run(tmp_path):
    def thousandfold(gm, inputs):
        return lambda *args: tuple(1000 * out for out in gm(*args))

    x = torch.ones(2)
    assert torch.equal(torch.compile(tripled, backend=thousandfold)(x), 3000 * x)
    compiled = fxpasses.compile(chooses, cache=tmp_path)
    fxpasses.reset_stats()
    for value in (-x, -x, x):
        torch.testing.assert_close(compiled(value), chooses(value))
    assert fxpasses.stats().plans_used


@pytest.mark.slow
def test_what_follows_a_call_before_the_first_graph_is_compiled(tmp_path):
    x = torch.randn(3, 4)
    for is_second in (False, True):
        torch._dynamo.reset()
        fxpasses.reset_stats()
        compiled = fxpasses.compile(breaks_first, cache=tmp_path)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), breaks_first(x))
        with torch.profiler.profile() as profile:
            compiled(x)
        assert not {"aten::mul", "aten::sin"} & {event.name for event in profile.events()}
        stats = fxpasses.stats()
        assert not stats.plans_refused
        assert (stats.graphs == 0, stats.plans_written == 0) == (is_second, is_second)


@pytest.mark.slow
@pytest.mark.parametrize("function", [shared_with_generator, shared_before, gives_away])
def test_variables_shared_with_functions_inside(tmp_path, function):
    for is_second in (False, True):
        torch._dynamo.reset()
        fxpasses.reset_stats()
        compiled, kept = fxpasses.compile(function, cache=tmp_path), []
        for i, (size, times) in enumerate([(3, 2), (3, 2), (5, 2), (3, 7), (3, 2)]):
            x = torch.randn(size)
            found, expected = compiled(x, times), function(x, times)
            if function is gives_away:
                (found, scale), (expected, scale_expected) = found, expected
                kept.append((scale, scale_expected))
            torch.testing.assert_close(found, expected)
            for scale, scale_expected in kept:
                torch.testing.assert_close(scale(x), scale_expected(x))
            if i == 1 and function is shared_with_generator:
                assert (fxpasses.stats().graphs == 0) is is_second


@pytest.mark.slow
def test_many_layers_are_known_at_once(tmp_path, monkeypatch):
    model, x, target = Layers(7), torch.randn(3, 4), torch.randn(3, 4)
    with torch.no_grad():
        compiled = fxpasses.compile(model, cache=tmp_path)
        for _ in range(3):
            compiled(x, target)
        walks = []
        over = Walk.walk_call
        monkeypatch.setattr(Walk, "walk_call", lambda self, *given: walks.append(given) or over(self, *given))
        torch.testing.assert_close(compiled(x, target), model(x, target))
    assert not walks


@pytest.mark.slow
def test_closures_made_in_each_call_are_compiled_once(tmp_path):
    compiled = fxpasses.compile(makes_closures, cache=tmp_path)
    fxpasses.reset_stats()
    x = torch.randn(3, 4)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), makes_closures(x))
    graphs = fxpasses.stats().graphs
    for _ in range(6):
        compiled(x)
    assert fxpasses.stats().graphs == graphs < 12


def test_names_lead_to_functions_and_to_what_decorators_wrap():
    inner = decorated.__wrapped__.__code__
    stubs = [stub_of(code) for code in (loss.__code__, inner, decorated.__code__, Base.forward.__code__)]
    names = names_of(stubs)
    assert [depth for *_, depth in names] == [0, 1, 0, 0]
    assert find_stubs(names) == stubs
    assert find_stubs([*names, ("no.such.module", "f", 0)]) is None
    model = Local()
    with pytest.raises(NoPlan, match="no name leads to"):
        names_of([stub_of(model.inner.__code__)])


def detached(a, b):
    e = a * 2
    torch._dynamo.graph_break()
    return (b * e.detach()).sum()


def backward_between(a, b):
    e = a * 2
    e.sum().backward()
    return (b * e.detach()).sum()


@pytest.mark.parametrize("function", [detached, backward_between])
def test_a_graph_asks_for_no_gradient_where_it_gives_none(function, tmp_path):
    """A gradient of zeros would run what computed the input backward: a weight without a gradient would get one, and a graph that is freed run again."""

    def gradients(run):
        a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        run(a, b).backward()
        return a.grad, b.grad

    wanted = gradients(function)
    for used in (False, True):
        torch._dynamo.reset()
        fxpasses.reset_stats()
        found = gradients(fxpasses.compile(function, cache=tmp_path))
        assert (fxpasses.stats().plans_used > 0) == used
        assert (found[0] is None) == (wanted[0] is None)
        torch.testing.assert_close(found, wanted)


def test_an_argument_may_be_called_self(tmp_path):
    compiled = fxpasses.compile(lambda **named: named["self"] * 2, cache=tmp_path)
    torch.testing.assert_close(compiled(self=torch.ones(2)), torch.full((2,), 2.0))


def test_views_of_which_autograd_does_not_say_whether_they_are_leaves(tmp_path):
    def add(*parts):
        for part in parts:
            part.add_(1)

    for _ in range(2):
        torch._dynamo.reset()
        x = torch.ones(8, requires_grad=True)
        parts = x.split(4)
        compiled = fxpasses.compile(add, cache=tmp_path)
        with torch.no_grad():
            compiled(*parts)
            compiled(*parts)
        torch.testing.assert_close(x.detach(), torch.full((8,), 3.0))
