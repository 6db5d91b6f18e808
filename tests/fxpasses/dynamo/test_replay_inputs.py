"""Inputs made like other inputs are what Dynamo itself makes of the same parameters."""

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.output_graph import OutputGraph

from fxpasses.dynamo import _torch_inputs
from tests.fxpasses.dynamo.support import Layer, Stack, agree, compiled

_FIELDS = (
    "dtype",
    "device",
    "ndim",
    "requires_grad",
    "class_type",
    "has_grad_fn",
    "_size",
    "stride",
    "is_contiguous",
)


@pytest.fixture
def made(monkeypatch):
    """Counts (made alike, left to Dynamo)."""
    counted = [0, 0]
    original = _torch_inputs.inputs_like

    def counting(tx):
        make = original(tx)

        def count(*arguments):
            variable = make(*arguments)
            counted[variable is None] += 1
            return variable

        return count

    monkeypatch.setattr(_torch_inputs, "inputs_like", counting)
    return counted


def _description(node, output):
    """All that later stages read of an input."""
    argument, fake = node.meta["grapharg"], node.meta["example_value"]
    variable = output.input_source_to_var[argument.source]
    context = output.tracing_context.tensor_to_context[argument.example]
    return {
        "name": node.name,
        "type": node.type,
        "source": argument.source.name,
        "is the tensor": argument.example is eval(argument.source.name, {}, {"L": output.root_tx.f_locals}),
        "notes": node.meta["tensor_dict"],
        "fake": (fake.shape, fake.stride(), fake.dtype, fake.fake_device, fake.requires_grad, type(fake)),
        "is the fake": argument.fake_tensor is fake,
        "is a parameter": isinstance(fake, nn.Parameter),
        "variable": [getattr(variable, name) for name in _FIELDS],
        "mutation": type(variable.mutation_type).__name__,
        "tracked": output.side_effects.id_to_variable[id(argument.example)] is variable,
        "cached": output.variable_tracker_cache[argument.source] is variable,
        "sizes": output.input_source_to_sizes_strides[argument.source],
        "symbols": (context.dynamic_sizes, context.constraint_sizes, context.tensor_source.name),
        "traced": argument.source in output.current_tracer.traced_sources,
    }


def _traced(monkeypatch, model, x, **settings):
    inputs = []
    original = OutputGraph.call_user_compiler

    def watch(self, gm, *args, **kwargs):
        inputs[:] = [
            _description(n, self)
            for n in gm.graph.find_nodes(op="placeholder")
            if "grapharg" in n.meta and isinstance(n.meta["grapharg"].example, nn.Parameter)
        ]
        return original(self, gm, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(OutputGraph, "call_user_compiler", watch)
        torch._dynamo.reset()
        call = compiled(model, **settings)
        call(x)
    (entry,) = _debug_get_cache_entry_list(model.forward.__code__)
    guards = sorted(
        line.strip() for line in str(entry.guard_manager).split("\n") if "GUARD" in line or "MATCH" in line
    )
    return inputs, [line for line in guards if "ID_MATCH" not in line]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_equal_to_dynamos_own(monkeypatch, made, dynamic):
    model, x = Stack(), torch.randn(4, 8)
    quick = _traced(monkeypatch, model, x, dynamic=dynamic)
    assert made[0] >= 12
    assert sum("TENSOR_MATCH" in line and "'5'" in line for line in quick[1]) == 4
    monkeypatch.setattr(_torch_inputs, "inputs_like", lambda tx: lambda *arguments: None)
    assert quick == _traced(monkeypatch, model, x, dynamic=dynamic)


class Held(nn.Module):
    """Layers that differ in what Dynamo asks of their weights."""

    def __init__(self, change):
        super().__init__()
        self.stack = Stack()
        with torch.no_grad():
            change(self.stack.layers)

    def forward(self, x):
        return self.stack(x)


def _tied(layers):
    layers[5].linear.weight = layers[4].linear.weight


def _tied_twice(layers):
    for layer in layers:
        layer.linear.weight = layers[0].linear.weight


def _strides(layers):
    layers[4].linear.weight = nn.Parameter(torch.randn(8, 8).t())


def _frozen(layers):
    layers[4].linear.weight.requires_grad_(False)


def _view(layers):
    layers[4].linear.weight = nn.Parameter(torch.randn(9, 8)[1:])


def _one_storage(layers):
    memory = torch.randn(2, 8, 8)
    layers[3].linear.weight = nn.Parameter(memory[0])
    layers[4].linear.weight = nn.Parameter(memory[1])


def _marked(layers):
    layers[4].linear.weight.tag = "mine"


def _with_gradient(layers):
    layers[4].linear.weight.grad = torch.zeros(8, 8)


@pytest.mark.parametrize(
    "change", [_tied, _tied_twice, _strides, _frozen, _view, _one_storage, _marked, _with_gradient]
)
def test_other_parameters_are_left_to_dynamo(monkeypatch, made, change, request):
    other, model, x = Held(change), Held(change), torch.randn(4, 8)
    agree(other, compiled(other), x)  # through all stages
    request.getfixturevalue("as_traced")
    made[:] = 0, 0
    quick, guards = _traced(monkeypatch, model, x)
    alike = made[0]
    assert alike >= 3
    monkeypatch.setattr(_torch_inputs, "inputs_like", lambda tx: lambda *arguments: None)
    own, its_guards = _traced(monkeypatch, model, x)
    assert [each["source"] for each in quick] == [each["source"] for each in own]
    assert guards == its_guards


@pytest.mark.usefixtures("as_traced")
@pytest.mark.parametrize("shape", [(9, 8), (8, 8)], ids=["size", "kind"])
def test_a_changed_parameter_recompiles(shape):
    graphs = torch._dynamo.utils.counters["stats"]
    model, x, before = Stack(), torch.randn(4, 8), graphs["unique_graphs"]
    call = compiled(model)
    agree(model, call, x)
    layer = model.layers[4]
    if shape == (8, 8):
        layer.linear.weight.requires_grad_(False)
    else:
        layer.linear = nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 8))
    agree(model, call, x)
    assert graphs["unique_graphs"] == before + 2


def test_a_weight_that_a_layer_changes():
    class Normed(Layer):
        def forward(self, x):
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
            return super().forward(x)

    model, x = Stack(Normed), torch.randn(4, 8)
    agree(model, compiled(model), x)


def test_dynamic_sources_are_asked_for_by_name(made):
    model, x = Stack(), torch.randn(4, 8)
    names = r"L\['self'\]\._modules\['layers'\]\._modules\['4'\]\._modules\['linear'\].*"
    with torch.compiler.config.patch(dynamic_sources=names):
        agree(model, compiled(model), x)
    assert made[0] >= 1
    assert made[1] >= 1
