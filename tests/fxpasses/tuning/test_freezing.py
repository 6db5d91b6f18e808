"""Frozen programs: which weights, and what happens when these are changed without a trace."""

import torch

from fxpasses.compiling.options import Options
from fxpasses.tuning.choice import Choice
from fxpasses.tuning.freezing import FREEZING, FrozenProgram, weights_to_freeze
from fxpasses.tuning.kept import ResultLocation
from fxpasses.tuning.tuned_graph import _GraphWorkbench
from fxpasses.tuning.tuned_program import Graph
from fxpasses.tuning.tuning_session import Session


def captured(model, x):
    torch._dynamo.reset()  # other tests compile such modules, too
    seen = []
    backend = lambda gm, inputs: seen.append((gm, inputs)) or gm.forward  # noqa: E731
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=False)(x)
    return seen[0]


def test_a_frozen_program_compares_its_weights_before_each_call():
    torch.manual_seed(0)
    layers = (
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.PReLU(), torch.nn.Linear(16, 2)
    )  # fmt: skip
    model, x = torch.nn.Sequential(*layers).eval(), torch.randn(2, 3, 4, 4)
    gm, inputs = captured(model, x)
    frozen = weights_to_freeze(gm, inputs)
    assert {id(inputs[i]) for i in frozen} == {
        id(v) for v in (*layers[0].parameters(), *layers[1].parameters(), layers[1].running_mean, layers[1].running_var,
                        *layers[4].parameters())
    }  # fmt: skip
    compiled = []

    def compile(gm, given, options):
        compiled.append((len(given), bool(options.inductor.get("freezing"))))
        return gm.forward

    options = Options.parse({"inductor": {"freezing": True}})
    program = FrozenProgram(gm, options, compile)
    with torch.no_grad():
        assert program(*inputs)[0].equal(model(x))
        layers[3].weight.data += 1  # an input, as before
        assert program(*inputs)[0].equal(model(x))
        assert compiled == [(len(inputs) - len(frozen), True)]
        before = layers[0].weight._version
        layers[0].weight.data.numpy()[0, 0, 0, 0] += 1
        assert layers[0].weight._version == before, "there is no other trace of it"
        assert program(*inputs)[0].equal(model(x))
        assert program(*inputs)[0].equal(model(x))
        assert compiled == [(len(inputs) - len(frozen), True), (len(inputs), False)]


def test_weights_of_matmuls_are_frozen_and_tables_are_not():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(5, 4)
            self.first, self.second = (
                torch.nn.Parameter(torch.randn(4, 4)),
                torch.nn.Parameter(torch.randn(4, 4)),
            )

        def forward(self, x):
            return torch.addmm(x[0], self.table(x.long().abs() % 5).sum(1) @ self.first, self.second)

    model = Model()
    gm, inputs = captured(model, torch.randn(4, 4))
    frozen = {id(inputs[i]) for i in weights_to_freeze(gm, inputs)}
    assert frozen == {id(model.first), id(model.second)}


def test_weights_that_are_not_dense_stay_inputs():
    model, x = torch.nn.Conv2d(3, 4, 3), torch.randn(1, 3, 4, 4)
    gm, inputs = captured(model, x)
    assert len(weights_to_freeze(gm, inputs)) == 2
    rows = [value[::2] if value is model.weight else value for value in inputs]
    assert len(weights_to_freeze(gm, rows)) == 1


def test_a_frozen_program_is_measured_on_weights_that_no_other_program_has_pointers_to():
    gm, inputs = captured(torch.nn.Conv2d(3, 4, 3), torch.randn(1, 3, 4, 4))
    graph = Graph(gm, Options(), lambda gm, inputs, options: gm.forward, ResultLocation(None, "", "", {}))
    with torch.no_grad():
        bench = _GraphWorkbench(graph, inputs, Session(seconds=0))
        frozen, default = bench.compiled(Choice((FREEZING,))), bench.compiled(Choice())
        known = frozen.run._weights._known_addresses
        for value in default._inputs:
            value.data_ptr()  # as Inductor's kernels ask for memory
        frozen.step()
    assert frozen.run._weights._known_addresses is known, "compared bit by bit"
