"""Repeated modules are traced once or twice by Dynamo and copied after that, and nothing can be told from it."""

import contextlib
import copy
import types

import pytest
import torch
from torch import nn

import fake
from fxpasses import reset_stats, stats
from fxpasses.dynamo.traces import Unknown, reader
from tests.fxpasses.dynamo.support import COPIED, LAYERS, Layer, Stack, agree, compiled


def graphs_of(model, *inputs, accelerate, dynamic=False):
    """The graphs that the backend was given, their places in the program and their guards."""
    from fxpasses.pipeline import compile_graph

    found, original = [], compile_graph.with_regions

    def keep(gm, *given, **more):
        guards = torch._guards.TracingContext.get().guards_context.dynamo_guards
        calls = [n for n in gm.graph.nodes if n.op != "placeholder"]
        stacks = [[name for name, _ in n.meta.get("nn_module_stack", {}).values()] for n in calls]
        lines = [n.meta.get("stack_trace") for n in calls]
        number = {node: i for i, node in enumerate(gm.graph.nodes)}
        nodes = [
            (n.op, str(n.target), str(torch.fx.node.map_arg((n.args, n.kwargs), number.get)))
            for n in gm.graph.nodes
        ]
        found.append((nodes, stacks, lines, {(g.name, g.create_fn_name()) for g in guards}))
        return original(gm, *given, **more)

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_graph, "with_regions", keep)
        compiled(model, dynamic, accelerate=accelerate)(*inputs)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_repeats_are_copied(dynamic):
    model, x = Stack(), torch.randn(3, 8)
    agree(model, compiled(model, dynamic), x)
    assert stats().copied_calls == COPIED
    if not dynamic:  # regions with symbolic sizes go through Inductor in `regional/test_with_inductor.py`
        agree(model, torch.compile(model, backend="fxpasses", dynamic=False), x)


def test_graphs_places_and_guards_are_those_of_tracing():
    model, x = Stack(), torch.randn(3, 8)
    (traced,), (copied,) = (graphs_of(model, x, accelerate=a) for a in (False, True))
    assert stats().copied_calls == COPIED
    for a, b in zip(traced, copied, strict=True):
        names = [
            {(n.split("___")[0], kind) for n, kind in each} if isinstance(each, set) else each
            for each in (a, b)
        ]
        assert names[0] == names[1]


@pytest.mark.usefixtures("as_traced")
def test_other_arguments():
    class Keyed(Layer):
        def forward(self, x, pair, factor=1.0, flip=False, extra=None):
            y = super().forward(x * factor) + pair[0] * pair[1]
            y = -y if flip else y
            return (y, pair) if extra is None else (y + extra, pair)

    class Caller(Stack):
        def forward(self, x, a):
            pair = (a, a + 1)
            for number, layer in enumerate(self.layers):
                x, pair = layer(x, pair, factor=2.0, flip=number == 4, extra=a if number > 7 else None)
            return x + pair[0]

    model = Caller(Keyed, 9)
    agree(model, compiled(model), torch.randn(3, 8), torch.randn(3, 8))
    assert stats().copied_calls >= 4


@pytest.mark.usefixtures("as_traced")
def test_changing_numbers_as_arguments():
    class Scaled(Layer):
        def forward(self, x, number):
            return super().forward(x) * number

    class Caller(Stack):
        def forward(self, x):
            for number, layer in enumerate(self.layers):
                x = layer(x, number + 1)
            return x

    model = Caller(Scaled)
    agree(model, compiled(model), torch.randn(3, 8))


@pytest.mark.usefixtures("as_traced")
@pytest.mark.usefixtures("as_traced")
@pytest.mark.parametrize(
    "argument",
    [
        lambda model, number: number + 1,
        lambda model, number: 1 - model.factor,
        lambda model, number: not model.flips,
        lambda model, number: len(model.layers) ** -0.5,
        lambda model, number: model.factor > 1,
    ],
    ids=["sum", "difference", "negation", "root", "comparison"],
)
def test_arguments_that_are_computed_of_numbers(argument):
    """Since torch 2.14 what is computed of numbers that nothing has looked at is not looked at either, and comes from nowhere."""

    class Scaled(Layer):
        def forward(self, x, number=1):
            return super().forward(x) * (number + 1)

    class Caller(Stack):
        factor, flips = 0.5, True

        def forward(self, x, number=2):
            for layer in self.layers:
                x = layer(x, number=argument(self, number))
            return x

    model = Caller(Scaled)
    run = compiled(model)
    agree(model, run, torch.randn(3, 8))
    model.factor, model.flips = 1.75, False
    agree(model, run, torch.randn(3, 8))


def test_shared_weights_and_shared_layers():
    model, x = Stack(), torch.randn(3, 8)
    model.layers[4].linear.weight = model.layers[0].linear.weight
    model.layers[5] = model.layers[2]
    agree(model, compiled(model), x)


@pytest.mark.usefixtures("as_traced")
def test_one_layer_called_again_and_again():
    class Unrolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def forward(self, x):
            for _ in range(LAYERS):
                x = self.layer(x)
            return x

    model = Unrolled()
    agree(model, compiled(model), torch.randn(3, 8))
    assert stats().copied_calls == COPIED


def test_batch_norm_keeps_its_statistics():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

        def forward(self, x):
            return torch.relu(self.norm(self.conv(x))) + x

    model = Stack(Normed)
    call = compiled(model)
    for _ in range(2):
        agree(model, call, torch.randn(2, 4, 5, 5))
    assert stats().copied_calls == COPIED


def test_buffers_written_in_place():
    class Counting(Layer):
        def forward(self, x):
            self.seen.add_(1)
            return super().forward(x) + self.seen

    model = Stack(Counting)
    call = compiled(model)
    agree(model, call, torch.randn(3, 8))
    agree(model, call, torch.randn(3, 8))


class CountsItself(Layer):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class WritesAGlobal(Layer):
    def forward(self, x):
        _log.append(self.scale)
        return super().forward(x) * len(_log)


class ReadsAGlobal(Layer):
    def forward(self, x):
        return super().forward(x) * _state["factor"]


_log: list = []
_state = {"factor": 2.0}


@pytest.mark.usefixtures("as_traced")
def test_python_state_that_layers_change():
    model, x = Stack(CountsItself), torch.randn(3, 8)
    call = compiled(model)
    for _ in range(2):
        eager = copy.deepcopy(model)
        torch.testing.assert_close(call(x), eager(x))
        assert [a.calls for a in model.layers] == [b.calls for b in eager.layers]
    _log.clear()
    writes = Stack(WritesAGlobal)
    first = compiled(writes)(x)
    assert len(_log) == LAYERS
    _log.clear()
    torch.testing.assert_close(first, writes(x))


@pytest.mark.usefixtures("as_traced")
def test_state_that_changes_between_layers():
    class Changes(Stack):
        def forward(self, x):
            for number, layer in enumerate(self.layers):
                _state["factor"] = 1.0 + number
                x = layer(x)
            return x

    class ChangesThemselves(Stack):
        def forward(self, x):
            for number, layer in enumerate(self.layers):
                if number > 3:
                    layer.scale = 0.25
                x = layer(x)
            return x

    x = torch.randn(3, 8)
    for model in (Changes(ReadsAGlobal), ChangesThemselves()):
        torch._dynamo.reset()
        expected = copy.deepcopy(model)(x)
        torch.testing.assert_close(compiled(model)(x), expected)


@pytest.mark.usefixtures("as_traced")
def test_an_object_of_some_layers_that_changes():
    class Settings:
        def __init__(self):
            self.factor = 1.0

    class Reads(Layer):
        def __init__(self):
            super().__init__()
            self.settings = Settings()

        def forward(self, x):
            return super().forward(x) * self.settings.factor

    class Changes(Stack):
        def forward(self, x):
            self.layers[4].settings.factor = 7.0
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Changes(Reads), torch.randn(3, 8)
    model.shared = model.layers[4].settings = model.layers[5].settings
    expected = copy.deepcopy(model)(x)
    torch.testing.assert_close(compiled(model)(x), expected)


@pytest.mark.usefixtures("as_traced")
def test_tensors_that_are_given_attributes():
    class Reads(Layer):
        def forward(self, x):
            return super().forward(x) * x.factor

    class Gives(Stack):
        def forward(self, x):
            for number, layer in enumerate(self.layers):
                x = x + 1
                x.factor = number + 1.0
                x = layer(x)
            return x

    model = Gives(Reads)
    agree(model, compiled(model), torch.randn(3, 8))


def test_hooks_on_values_inside_of_layers():
    class Hooked(Layer):
        def forward(self, x):
            y = super().forward(x)
            y.register_hook(lambda gradient: gradient * 2)
            return y

    model = Stack(Hooked)
    agree(model, compiled(model), torch.randn(3, 8))


@pytest.mark.usefixtures("as_traced")
def test_modes_around_some_layers():
    class Modes(Stack):
        def forward(self, x):
            for number, layer in enumerate(self.layers):
                frozen = torch.no_grad() if number == 4 else contextlib.nullcontext()
                mixed = torch.autocast("cpu", torch.bfloat16) if number == 3 else contextlib.nullcontext()
                with frozen, mixed:
                    x = torch.tanh(layer(x)).float()
            return x

    torch.set_default_dtype(torch.float32)
    model = Modes()
    agree(model, compiled(model), torch.randn(3, 8))


@pytest.mark.usefixtures("as_traced")
def test_what_layers_return():
    class Returns(Layer):
        def forward(self, x, number):
            y = super().forward(x)
            return (y, None, 3, (y + 1, x))[number]

    class Caller(Stack):
        def forward(self, x):
            total = x
            for layer in self.layers:
                total = total + layer(x, 0) + layer(x, 3)[0] + layer(x, 3)[1] * layer(x, 2)
                assert layer(x, 1) is None
            return total

    model = Caller(Returns)
    agree(model, compiled(model), torch.randn(3, 8))


@pytest.mark.slow
def test_sizes_that_depend_on_data():
    class Chooses(Layer):
        def forward(self, x):
            return super().forward(x)[x[:, 0] > -9]

    model, x = Stack(Chooses), torch.randn(3, 8)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        agree(model, compiled(model), x)


def test_a_source_that_has_neither_value_nor_name_is_unknown():
    class OfAFrame:
        @property
        def name(self):
            raise NotImplementedError

        def get_value(self, scopes, names, cache):
            raise NotImplementedError

    scope = types.SimpleNamespace(f_globals={}, f_locals={})
    read = reader(types.SimpleNamespace(output=types.SimpleNamespace(root_tx=scope)))
    with pytest.raises(Unknown, match="OfAFrame cannot be read"):
        read(OfAFrame())


@pytest.mark.slow
def test_changing_sizes_compile_as_often():
    counts = []
    for accelerate in (True, False):
        torch._dynamo.reset()
        reset_stats()
        model = Stack()
        call = torch.compile(
            model, backend="fxpasses", options={"compiler": "eager", "accelerate": accelerate}
        )
        for rows in (3, 5, 7, 9):
            agree(model, call, torch.randn(rows, 8))
        counts.append(stats().graphs)
    assert counts[0] == counts[1]


def test_other_backends_are_traced_as_ever():
    model, x = Stack(), torch.randn(3, 8)
    torch.compile(model, backend="eager")(x)
    assert stats().copied_calls == 0
    assert not fake.accelerate.is_enabled()


@pytest.mark.slow
@pytest.mark.usefixtures("as_traced")
def test_dynamo_is_left_as_it_was():
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    before = UnspecializedNNModuleVariable.call_function, SideEffects.mutation, SideEffects.store_attr

    class Broken(Layer):
        def forward(self, x):
            raise ValueError("broken on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        compiled(Stack(Broken))(torch.randn(3, 8))
    compiled(Stack())(torch.randn(3, 8))
    assert (
        UnspecializedNNModuleVariable.call_function,
        SideEffects.mutation,
        SideEffects.store_attr,
    ) == before
    assert not fake.accelerate.is_enabled()


@pytest.mark.usefixtures("as_traced")
def test_a_graph_break_in_a_layer():
    class Breaks(Layer):
        def forward(self, x):
            y = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(y)

    model = Stack(Breaks)
    agree(model, compiled(model), torch.randn(3, 8))


def test_off_by_option():
    model, x = Stack(), torch.randn(3, 8)
    agree(model, compiled(model, accelerate=False), x)
    assert stats().copied_calls == 0


def test_another_size_of_a_copied_layers_parameter_is_seen():
    model = Stack()
    call = compiled(model, dynamic=True)
    agree(model, call, torch.randn(4, 8))
    last = model.layers[-1]
    last.linear.weight = torch.nn.Parameter(torch.randn(1, 8))  # its result is broadcast over eight columns
    last.linear.bias = torch.nn.Parameter(torch.randn(1))
    agree(model, call, torch.randn(4, 8))
    agree(model, call, torch.randn(6, 8))
