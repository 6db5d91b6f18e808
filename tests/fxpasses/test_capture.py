import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpasses
from fxpasses import CaptureError, OptionsError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        self.calls.add_(1)
        return x.sum()


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def run(captured, *gradients):
    """Outputs and input gradients, computed by the captured graphs alone."""
    results = captured.forward(*(t.clone() if isinstance(t, torch.Tensor) else t for t in captured.inputs))
    outputs, saved = results[: captured.num_outputs], results[captured.num_outputs :]
    # The backward graph takes symbolic sizes before the saved tensors.
    ordered = [s for s in saved if not isinstance(s, torch.Tensor)] + [
        s for s in saved if isinstance(s, torch.Tensor)
    ]
    return outputs, captured.backward(*ordered, *gradients)


@pytest.mark.parametrize("dynamic", [False, True])
def test_graphs_run_and_agree_with_eager(net, dynamic):
    x = torch.randn(3, 4, requires_grad=True)
    captured = fxpasses.capture(net, x, dynamic=dynamic)
    assert x.grad is None
    assert net.calls == 0, "capturing does not run the model"
    outputs, gradients = run(captured, torch.ones(()))
    loss = net(x)
    loss.backward()
    assert any(torch.allclose(o, loss) for o in outputs if isinstance(o, torch.Tensor))
    wanted = {id(p): p.grad for p in (*net.parameters(), x)}
    found = [g for g in gradients if g is not None]
    assert len(found) == len(wanted)
    for tensor, gradient in zip(captured.inputs, gradients, strict=True):
        if gradient is not None:
            torch.testing.assert_close(gradient, wanted[id(tensor)])


def test_each_node_knows_where_it_comes_from(net):
    captured = fxpasses.capture(net, torch.randn(3, 4, requires_grad=True), decompose=False)
    calls = [n for n in captured.joint.graph.nodes if n.op == "call_function"]
    assert all(captured.provenance(n).file == __file__ for n in calls)
    tanh = captured.joint.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    assert [captured.provenance(n).code for n in tanh] == ["x = x + torch.tanh(block(x))"] * 2
    (first, second) = captured.joint.graph.find_nodes(
        op="call_function", target=torch.ops.aten.native_layer_norm.default
    )
    assert captured.provenance(first).module == "blocks.0.0"
    assert captured.provenance(second).module == "blocks.1.0"
    assert captured.provenance(second).module_type == "LayerNorm"


def test_each_backward_node_names_its_forward_node(net):
    captured = fxpasses.capture(net, torch.randn(3, 4, requires_grad=True), decompose=False)
    names = {n.name: n for n in captured.joint.graph.nodes}
    backward = [
        n for n in captured.backward.graph.nodes if captured.provenance(n).backward and n.op != "placeholder"
    ]
    assert backward
    for node in backward:
        forward = captured.provenance(node).forward_node
        assert forward in names
        assert not captured.provenance(names[forward]).backward
    pairs = {
        torch.ops.aten.tanh_backward.default: torch.ops.aten.tanh.default,
        torch.ops.aten.native_layer_norm_backward.default: torch.ops.aten.native_layer_norm.default,
        torch.ops.aten.mm.default: torch.ops.aten.addmm.default,
    }
    paired = [node for node in backward if node.target in pairs]
    assert {node.target for node in paired} == pairs.keys()
    for node in paired:
        assert names[captured.provenance(node).forward_node].target is pairs[node.target]


def test_modules_of_a_sequential_are_told_apart():
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.GELU()
    )
    captured = fxpasses.capture(model, torch.randn(2, 4))
    found = {str(n.target): captured.provenance(n).module for n in captured.joint.graph.nodes}
    assert found["aten.tanh.default"] == "1"
    assert found["aten.erf.default"] == "3"
    assert found["aten.exp.default"] == "3"  # of its gradient


def test_a_sum_of_gradients_names_the_value_that_was_used_twice():
    def f(x):
        y = x.exp()
        return (y.sin() * y.cos()).sum()

    captured = fxpasses.capture(f, torch.randn(3, requires_grad=True))
    (addition,) = captured.joint.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert captured.provenance(addition).forward_node == "exp"


def test_saved_values():
    w = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(8, 4)
    captured = fxpasses.capture(lambda w, x: torch.sort(x @ w)[0].sum(), w, x)
    computed = [v for v in captured.saved if not v.is_input]
    assert [(v.shape, v.dtype, v.nbytes) for v in computed] == [((8, 4), torch.int64, 8 * 4 * 8)]
    assert captured.saved_bytes == 256
    assert captured.partition is not None
    assert {v.name for v in captured.partition.saved} == {v.name for v in captured.saved}
    inputs = [v for v in captured.saved if v.is_input]
    assert inputs
    assert all(v.nbytes for v in inputs if v.dtype is not None)


def test_symbolic_sizes_have_their_hint_in_bytes():
    w = torch.randn(4, 4, requires_grad=True)
    captured = fxpasses.capture(lambda w, x: torch.sort(x @ w)[0].sum(), w, torch.randn(8, 4), dynamic=True)
    assert captured.saved_bytes == 256


def test_without_gradients_there_is_one_graph():
    captured = fxpasses.capture(lambda x: x.sin() + 1, torch.ones(3))
    assert captured.joint is None
    assert captured.backward is None
    assert captured.saved == ()
    assert torch.equal(captured.forward(*captured.inputs)[0], torch.ones(3).sin() + 1)


def test_keyword_arguments_and_dictionaries():
    def f(batch, *, scale):
        return {"loss": (batch["x"] * scale).sum()}

    captured = fxpasses.capture(f, {"x": torch.ones(3, requires_grad=True)}, scale=2.0)
    assert captured.backward is not None


def test_passes_run_on_request():
    def f(x):
        return (x.exp() * x.exp()).sum()

    x = torch.ones(3)
    plain = fxpasses.capture(f, x)
    rewritten = fxpasses.capture(f, x, passes=["eliminate_common_subexpressions"])
    count = lambda c: len(c.forward.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default))  # noqa: E731
    assert (count(plain), count(rewritten)) == (2, 1)


def test_a_pass_sees_the_joint_graph():
    seen = []

    @fxpasses.graph_pass(graphs=["joint"])
    def look(gm):
        seen.extend(n.target for n in gm.graph.nodes)
        return False

    fxpasses.capture(lambda x: x.sin().sum(), torch.ones(3, requires_grad=True), passes=[look])
    assert torch.ops.aten.sin.default in seen
    assert torch.ops.aten.cos.default in seen


@pytest.mark.slow
def test_repeated_captures_do_not_wear_out_dynamo():
    def f(x):
        return x * 2

    for size in range(2, 30):
        fxpasses.capture(f, torch.ones(size, requires_grad=True), dynamic=False)


def test_a_graph_break_is_an_error_that_says_where():
    def f(x):
        torch._dynamo.graph_break()
        return x.sin()

    with pytest.raises(CaptureError, match="graph_break"):
        fxpasses.capture(f, torch.ones(3))


def test_no_tensor_operation_is_an_error():
    with pytest.raises(CaptureError, match="no graph"):
        fxpasses.capture(lambda x: 3, torch.ones(3))


def test_wrong_options_are_named():
    with pytest.raises(OptionsError, match="'eliminate_dead_code'"):
        fxpasses.capture(F.relu, torch.ones(3), passes=["eliminate_ded_code"])
    with pytest.raises(OptionsError, match="memory_budget"):
        fxpasses.capture(F.relu, torch.ones(3), memory_budget=2)


def test_errors_of_the_model_are_located():
    def f(x):
        return torch.ops.aten.mm.default(x, x.t()[:1])

    with pytest.raises(CaptureError):
        fxpasses.capture(f, torch.ones(3, 4, requires_grad=True))


def test_sizes_of_another_capture_make_none_symbolic():
    for size in (3, 4, 5):
        captured = fxpasses.capture(torch.nn.Linear(size, size), torch.randn(size + 2, size))
        shapes = [n.meta["val"].shape for n in captured.forward.graph.find_nodes(op="placeholder")]
        assert all(type(n) is int for shape in shapes for n in shape)


def test_looking_for_the_lines_of_nodes_adds_no_guard():
    w = torch.randn(3, requires_grad=True)
    joint = fxpasses.capture(lambda x, w: x * w + x.sin() * w, torch.randn(2, 5, 3), w, dynamic=True).joint
    sizes = [n.meta["val"] for n in joint.graph.find_nodes(op="placeholder") if "val" in n.meta]
    (env,) = {id(e): e for e in (s.node.shape_env for s in sizes if isinstance(s, torch.SymInt))}.values()
    assert not [guard.expr for guard in env.guards if len(guard.expr.free_symbols) > 1]
