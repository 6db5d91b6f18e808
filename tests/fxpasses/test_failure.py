"""What happens when a stage fails: a named error, or eager in its place."""

import logging

import pytest
import torch
from torch.nn import functional as F

import fxpasses
from fake.seam.symbolic_shapes import PendingUnbackedSymbolNotFound
from fxpasses import HandoverError, PartitionError, PassError, _torch
from fxpasses.compiling.graph_compilers import InductorCompiler

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def f(x):
    y = x.sin()
    return (y * y).sum()


def call(options, fn=f, backward=True):
    x = torch.linspace(0, 1, 4, requires_grad=True)
    result = torch.compile(fn, backend="fxpasses", options={"compiler": "eager", **options})(x)
    if backward:
        result.backward()
    return result, x.grad


def calls(gm):
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def break_on(*graphs):
    @fxpasses.graph_pass(graphs=graphs, name="breaks")
    def breaks(gm):
        for node in calls(gm):
            node.args = ()
            raise ZeroDivisionError("planted")
        return False

    return breaks


@pytest.fixture
def broken_inductor(monkeypatch):
    def refuse(gm, inputs, **_):
        for node in calls(gm):
            raise NotImplementedError(f"planted: {node.target}")

    monkeypatch.setattr(_torch, "compile_fx_forward", refuse)
    monkeypatch.setattr(_torch, "compile_fx_backward", refuse)


def failure(options, fn=f, **how):
    with pytest.raises(Exception) as caught:
        call(options, fn, **how)
    error = getattr(caught.value, "inner_exception", caught.value)
    return error, str(caught.value)


@pytest.mark.parametrize("graph", ["joint", "forward", "backward"])
def test_a_failing_pass_is_named_with_node_and_line(graph):
    error, message = failure({"passes": [break_on(graph)]})
    assert isinstance(error, PassError)
    assert (error.stage, error.pass_name, error.graph) == ("pass", "breaks", graph)
    assert "planted" in message
    assert error.location.node
    assert f"{__file__}:" in error.location.source
    assert error.location.node in message
    assert "on_failure" in message


@pytest.mark.filterwarnings("ignore:Error detected")
@pytest.mark.parametrize(
    "missing", [lambda x: torch.heaviside(x, torch.tensor(0.5)), lambda x: x // 2.0], ids=["named", "other"]
)
def test_a_missing_derivative_is_named_where_its_operator_is_called(missing):
    def model(x):
        y = missing(x * 2)
        return (y + x).exp()

    _, text = failure({}, model)
    assert "is not implemented" in text
    assert "return (y + x).exp()" not in text
    assert ("lambda x: torch.heaviside" in text) == ("aten::heaviside" in text)


def test_capture_does_not_advise_what_only_torch_compile_takes():
    with pytest.raises(PassError) as caught:
        fxpasses.capture(f, torch.linspace(0, 1, 4, requires_grad=True), passes=[break_on("joint")])
    assert "on_failure" not in str(caught.value)


@pytest.mark.parametrize("graph", ["joint", "forward", "backward", "inference"])
def test_a_failing_pass_can_leave_the_graph_to_eager(graph, caplog):
    if graph == "inference":
        wanted = f(torch.linspace(0, 1, 4)), None
        with torch.no_grad(), caplog.at_level(logging.WARNING, "fxpasses"):
            got = call({"passes": [break_on(graph)], "on_failure": "eager"}, backward=False)
    else:
        x = torch.linspace(0, 1, 4, requires_grad=True)
        wanted = f(x), torch.autograd.grad(f(x), x)[0]
        with caplog.at_level(logging.WARNING, "fxpasses"):
            got = call({"passes": [break_on(graph)], "on_failure": "eager"})
    assert torch.equal(got[0], wanted[0])
    assert wanted[1] is None or torch.allclose(got[1], wanted[1])
    (fallback,) = fxpasses.stats().fallbacks
    assert fallback.stage == "pass"
    assert "planted" in fallback.reason
    (message,) = [r.getMessage() for r in caplog.records if "planted" in r.getMessage()]
    assert "pass options={'on_failure'" not in message  # it is set


def test_inductor_failing_is_an_error_with_the_users_line(broken_inductor):
    error, message = failure({"compiler": "inductor"})
    assert isinstance(error, HandoverError)
    assert error.stage == "inductor"
    assert f"{__file__}:" in error.location.source
    assert "'compiler': 'eager'" in message


def test_inductor_failing_can_leave_the_graph_to_eager(broken_inductor):
    x = torch.linspace(0, 1, 4, requires_grad=True)
    result, gradient = call({"compiler": "inductor", "on_failure": "eager"})
    assert torch.allclose(result, f(x))
    assert torch.allclose(gradient, torch.autograd.grad(f(x), x)[0])
    assert {item.stage for item in fxpasses.stats().fallbacks} == {"inductor"}


def test_partition_failing(monkeypatch):
    def refuse(joint, joint_inputs, **_):
        raise KeyError("planted")

    monkeypatch.setattr("fxpasses.compiling.graph_compilers.partition", refuse)
    error, _ = failure({})
    assert isinstance(error, PartitionError)
    result, _ = call({"on_failure": "eager"})
    assert torch.allclose(result, f(torch.linspace(0, 1, 4)))


def test_a_pass_that_drops_an_output_is_refused():
    @fxpasses.graph_pass(graphs=["forward"])
    def drops(gm):
        (output,) = gm.graph.find_nodes(op="output")
        output.args = (output.args[0][:-1],)
        return True

    error, _ = failure({"passes": [drops]})
    assert "returned" in error.reason


def test_a_pass_that_changes_an_output_type_is_refused():
    @fxpasses.graph_pass(graphs=["inference"])
    def doubles(gm):
        (output,) = gm.graph.find_nodes(op="output")
        (value,) = output.args[0]
        with gm.graph.inserting_before(output):
            wide = fxpasses.insert_call(
                gm.graph, torch.ops.aten._to_copy.default, (value,), {"dtype": torch.float64}, like=value
            )
        output.args = ((wide,),)
        return True

    with torch.no_grad():
        error, _ = failure({"passes": [doubles]}, backward=False)
    assert "float32" in error.reason
    assert "float64" in error.reason


def test_a_pass_must_say_whether_it_changed_something():
    error, _ = failure({"passes": [fxpasses.graph_pass(lambda gm: None, name="silent")]})
    assert "True or False" in error.reason


def test_a_pass_that_hides_a_change_is_refused():
    @fxpasses.graph_pass(graphs=["joint"])
    def sneaks(gm):
        node = next(iter(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)))
        with gm.graph.inserting_after(node):
            fxpasses.insert_call(gm.graph, torch.ops.aten.cos.default, (node,), like=node)
        return False

    error, _ = failure({"passes": [sneaks]})
    assert "returned False but changed" in error.reason


def test_a_new_node_without_a_value_gets_one():
    values = []

    @fxpasses.graph_pass(graphs=["inference"], metadata="outputs")
    def bare(gm):
        (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(torch.ops.aten.neg.default, (node.args[0],))
            node.replace_input_with(node.args[0], new)
        return True

    @fxpasses.graph_pass(graphs=["inference"])
    def looks(gm):
        values.extend(
            n.meta["val"] for n in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
        )
        return False

    with torch.no_grad():
        result, _ = call({"passes": [bare, looks]}, backward=False)
    assert torch.allclose(result, f(torch.linspace(0, 1, 4)))
    assert [(tuple(v.shape), v.dtype) for v in values] == [((4,), torch.float32)]


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text either")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("returns", "told"), [(False, "Unspeakable: <exception"), (True, "<Unspeakable at 0x")]
)
def test_an_exception_or_a_result_without_a_text_does_not_hide_the_pass(returns, told):
    @fxpasses.graph_pass(graphs="any")
    def speechless(gm):
        if returns:
            return Unspeakable()
        raise Unspeakable

    error, message = failure({"passes": [speechless], "compiler": "eager"})
    assert isinstance(error, PassError)
    assert error.pass_name == "speechless"
    assert told in message


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"compiler": "eager"}, {}], ids=["eager", "inductor"])
def test_a_backward_graph_whose_sizes_depend_on_values_is_compiled(options):
    def assign(x, mask, value):
        x = x * 2
        x[mask] = value  # the gradient of value has as many rows as the mask is true
        return x.sin()

    def gradients(run, rows):
        x = torch.linspace(0, 1, rows * 3).view(rows, 3).requires_grad_()
        mask = torch.arange(rows) % 3 == 0
        value = torch.ones(int(mask.sum()), 3, requires_grad=True)
        run(x, mask, value).sum().backward()
        return x.grad, value.grad

    torch._dynamo.reset()
    fxpasses.reset_stats()
    compiled = torch.compile(assign, backend="fxpasses", options=options)
    for rows in (4, 7, 9):
        for got, wanted in zip(gradients(compiled, rows), gradients(assign, rows), strict=True):
            torch.testing.assert_close(got, wanted)
    assert fxpasses.stats().fallbacks == ()
    assert fxpasses.stats().graphs == 2  # one for 4 rows, one for any number


def unpadded(x, mask, value):
    padded = torch.zeros_like(x)
    padded[mask] = value
    return padded


def put(x, mask, value):
    return torch.zeros(len(x), 3).index_put((mask,), value)


@pytest.mark.slow
@pytest.mark.parametrize("assign", [unpadded, put])
def test_a_backward_graph_knows_the_sizes_that_a_mask_has_let_through(assign):
    """All that it reads is the mask and the gradient of the result: neither has as many rows as ``value``."""
    torch._dynamo.reset()
    compiled = torch.compile(assign, backend="fxpasses")
    for rows in (4, 7, 9):
        mask = torch.arange(rows) % 3 == 0
        value = torch.ones(int(mask.sum()), 3, requires_grad=True)
        gradients = torch.autograd.grad(compiled(torch.ones(rows, 3), mask, value).sum(), value)
        torch.testing.assert_close(gradients, (torch.ones_like(value),))


def test_gradients_of_rows_and_a_mask_together():
    """As many rows as the mask is true are broadcast with a number of rows, which torch cannot trace."""

    def added(x, rows, mask, value):
        x = x.clone()
        x[rows, mask] = value
        x[rows, mask] += value
        return x.sin()

    inputs = torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([True, True, False])
    value = torch.ones(2, requires_grad=True)
    results = [run(*inputs, value) for run in (added, torch.compile(added, backend="fxpasses"))]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(result.sum(), value) for result in results))


def test_a_backward_graph_that_depends_on_data_runs_as_it_was_before_it_failed(monkeypatch):
    """Inductor rewrites the graph that it is given, and random operators in it are its own."""
    seen = []

    def fails(self, gm, inputs):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            seen.append(node.name)
            node.target = torch.ops.aten.div.Tensor
        gm.recompile()
        raise PendingUnbackedSymbolNotFound("u0")

    def assign(x, mask, value):
        x = x.clone()
        x[mask] = value
        return F.dropout(x * x, 0.5)

    monkeypatch.setattr(InductorCompiler, "backward", fails)
    torch._dynamo.reset()
    x, value = torch.ones(4, 3), torch.full((2, 3), 3.0, requires_grad=True)
    mask = torch.tensor([True, False, True, False])
    y = torch.compile(assign, backend="fxpasses", options={"cache": "off"})(x, mask, value)
    (gradient,) = torch.autograd.grad(y.sum(), value)
    assert seen
    torch.testing.assert_close(gradient, y[mask].detach() * 2 / 3)  # of value**2 / 0.5, or of nothing


def test_a_graph_whose_gradients_read_values_is_left_to_eager(caplog):
    @torch.library.custom_op("fxpasses_test_failure::scaled", mutates_args=())
    def scaled(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x * mask.sum()

    scaled.register_fake(lambda x, mask: torch.empty_like(x))
    scaled.register_autograd(
        lambda ctx, gradient: (gradient * ctx.saved_tensors[0].sum().item(), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    )

    def f(x, mask):
        return scaled(x, mask).sin()

    torch._dynamo.reset()
    fxpasses.reset_stats()
    x, mask = torch.linspace(0, 1, 4, requires_grad=True), torch.arange(4) > 1
    with caplog.at_level(logging.WARNING, "fxpasses"):
        torch.compile(f, backend="fxpasses", options={"compiler": "eager"})(x, mask).sum().backward()
    wanted = torch.autograd.grad(f(x, mask).sum(), x)[0]
    assert torch.equal(x.grad, wanted)
    assert {item.stage for item in fxpasses.stats().fallbacks} == {"capture"}
    assert "_local_scalar_dense" in fxpasses.stats().fallbacks[0].reason
    assert any("running in eager instead" in record.getMessage() for record in caplog.records)
