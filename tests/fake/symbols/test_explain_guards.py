"""Explanations: the condition in the user's terms, why, who asked, and what would avoid it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import AttrSource, GetItemSource, LocalSource, TensorProperty, TensorPropertySource
from torch.fx.experimental.symbolic_shapes import ShapeEnv as TorchShapeEnv

import fake
from fake.symbols.terms import text_of_source


def mode_with(**shapes):
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    return mode, [mode.from_tensor(torch.zeros(shape), name=name) for name, shape in shapes.items()]


def only(report, kind):
    (found,) = (guard for guard in report if guard.kind == kind)
    return found


def test_an_operator_that_asks_is_named_with_the_users_line():
    mode, (x,) = mode_with(x=(6, 5))
    with mode:
        x.view(-1, 3, x.shape[1])  # this line
    guard = only(mode.shape_env.guards.explain(), "relation")
    assert guard.expression == "x.size(0) % 3 == 0"
    assert guard.operator == "aten.view.default"
    assert guard.where.file == __file__
    assert "this line" in guard.where.code
    assert "multiple_of" in guard.avoid


def test_the_program_itself_may_have_asked():
    mode, (x,) = mode_with(x=(6, 5))
    if x.shape[0] > x.shape[1]:  # a branch
        pass
    guard = only(mode.shape_env.guards.explain(), "relation")
    assert guard.expression == "x.size(0) > x.size(1)"
    assert guard.operator is None
    assert "a branch" in guard.where.code
    assert "torch.cond" in guard.avoid


def test_a_function_that_the_line_calls_may_have_asked():
    mode, (x,) = mode_with(x=(6, 8, 12))
    with mode:
        tiles = x.unflatten(1, (2, -1))
        tiles.reshape(x.shape[0] // 2, -1, x.shape[2])  # this line
    report = [guard for guard in mode.shape_env.guards.explain() if guard.chain]
    assert report
    assert not any("int()" in guard.avoid for guard in report)


@pytest.mark.parametrize("ours", [True, False])
def test_a_method_that_torch_composes_is_named(ours):
    reports = []

    def backend(gm, inputs):
        reports.append(fake.explain(torch._guards.TracingContext.get().fake_mode.shape_env))
        return gm

    def program(x):
        b, c, h, w = x.shape
        return x.reshape(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c)  # this line

    torch._dynamo.reset()
    with fake.using_shape_env() if ours else contextlib.nullcontext():
        torch.compile(program, backend=backend, dynamic=True)(torch.randn(2, 3, 8, 12))
    (report,) = reports
    texts = [guard.expression for guard in report]
    assert len(set(texts)) == len(texts)
    assert not any("1 %" in text for text in texts)
    asked = [guard for guard in report if guard.chain]
    assert asked
    for guard in asked:
        assert len(set(guard.chain)) == len(guard.chain)
        assert "this line" in guard.where.code
        assert "int()" not in guard.avoid
    if ours:
        assert any(guard.operator == "reshape" for guard in asked)


def test_a_size_that_a_weight_fixes_behind_a_reshape_is_a_constant():
    mode, (x,) = mode_with(x=(4, 3, 5))
    weight = mode.from_tensor(torch.zeros(15, 2), name="weight", dims={0: "static", 1: "static"})
    with mode:
        x.reshape(x.shape[0], -1)[:, : 5 * x.shape[1]] @ weight
    report = mode.shape_env.guards.explain()
    guards = [guard for guard in report if guard.expression == "x.size(1) == 3"]
    assert [guard.kind for guard in guards] in (["specialized"], [])
    assert "3" in str(report)


def test_plain_reads_of_cpp_code_say_what_would_help():
    mode, (x,) = mode_with(x=(2, 3, 8, 6))
    with mode:
        torch.nn.functional.interpolate(x, scale_factor=2)
    constants = [guard for guard in mode.shape_env.guards.explain() if guard.kind == "specialized"]
    assert constants
    assert all("enable_python_dispatcher" in guard.avoid for guard in constants)
    mode, (x,) = mode_with(x=(2, 3, 8, 6))
    with mode, enable_python_dispatcher():
        torch.nn.functional.interpolate(x, scale_factor=2)
    assert not [guard for guard in mode.shape_env.guards.explain() if guard.kind == "specialized"]


def test_sizes_are_told_before_numbers():
    mode, (x, y) = mode_with(x=(3, 4), y=(5, 6))
    assert min(x.shape[0], y.shape[0]) is not None
    assert int(y.shape[0]) == 5
    assert "5 >=" not in str(mode.shape_env.guards.explain())


def test_a_specialized_size_tells_the_chain():
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv(duck_shape=False))
    x, y = (mode.from_tensor(torch.zeros(6), name=name) for name in "xy")
    with mode:
        z = x + y  # ties them
    assert int(z.shape[0]) == 6  # fixes them
    report = mode.shape_env.guards.explain()
    told = {guard.expression: guard for guard in report if guard.kind == "specialized"}
    assert set(told) == {"x.size(0) == 6", "y.size(0) == 6"}
    chains = {len(guard.chain): guard for guard in told.values()}
    assert set(chains) == {1, 2}, "one of them was fixed directly, the other through it"
    (_, first, first_line), (_, second, second_line) = chains[2].chain
    assert first == "aten.add.Tensor"
    assert "ties them" in first_line.code
    assert second == "the program itself"
    assert "fixes them" in second_line.code


def test_ducks_zero_one_and_layout_say_so():
    mode, _ = mode_with(x=(6, 5), y=(6, 3))
    report = mode.shape_env.guards.explain()
    assert only(report, "duck").expression == "y.size(0) == x.size(0)"
    assert "duck_shape=False" in only(report, "duck").avoid
    assert all(guard.where is None for guard in report)
    ranges = [guard for guard in report if guard.kind == "range"]
    assert {guard.expression for guard in ranges} == {"2 <= x.size(0)", "2 <= x.size(1)", "2 <= y.size(1)"}
    assert "0 and 1" in ranges[0].why
    assert {g.expression for g in report if g.kind == "layout"} == {
        "x.stride(0) == x.size(1)",
        "y.stride(0) == y.size(1)",
    }


def test_a_narrower_range_tells_who_narrowed_it():
    mode, (x,) = mode_with(x=(6,))
    assert x.shape[0] < 10  # narrows
    guard = only(mode.shape_env.guards.explain(), "range")
    assert guard.expression == "2 <= x.size(0) <= 9"
    assert "narrows" in guard.where.code


def test_it_prints_and_is_data():
    mode, (x,) = mode_with(x=(6, 5))
    with mode:
        x.view(-1, 3, 5)
    report = mode.shape_env.guards.explain()
    text = str(report)
    assert text.startswith(f"{len(report)} guards decide")
    for guard in report:
        assert guard.expression in text
        assert guard.why in text
        assert guard.avoid in text
    assert [entry["expression"] for entry in json.loads(json.dumps(report.to_dict()))] == [
        g.expression for g in report
    ]
    assert json.dumps(mode.shape_env.guards.minimal().to_dict())
    assert "No guards" in str(fake.explain(fake.ShapeEnv()))


def test_torchs_own_environment_is_explained_too():
    mode = fake.FakeTensorMode(shape_env=TorchShapeEnv())
    x = mode.from_tensor(torch.zeros(6, 5), source=LocalSource("x"))
    if x.shape[0] > x.shape[1]:  # a branch
        pass
    guard = only(fake.explain(mode.shape_env), "relation")
    assert "x.size(0)" in guard.expression
    assert "a branch" in guard.where.code


def run_compiled(function, *inputs, **options):
    """Compile with a backend that explains; the explanation that it saw and the one after everything."""
    seen = []

    def backend(gm, example_inputs):
        env = torch._guards.TracingContext.get().fake_mode.shape_env
        seen.append(env)
        return gm

    torch._dynamo.reset()
    try:
        torch.compile(function, backend=backend, dynamic=True, **options)(*inputs)
    finally:
        torch._dynamo.reset()
    return seen[0]


def program(x, y):
    h = torch.relu(x @ y)
    return h.view(-1, 2, h.shape[1]).sum(1)


@pytest.mark.parametrize("ours", [True, False])
def test_users_of_torch_compile_get_their_lines(ours):
    if ours:
        with fake.using_shape_env():
            env = run_compiled(program, torch.ones(8, 6), torch.ones(6, 12))
        assert isinstance(env, fake.ShapeEnv)
    else:
        env = run_compiled(program, torch.ones(8, 6), torch.ones(6, 12))
        assert type(env) is TorchShapeEnv
    guard = only(fake.explain(env), "relation")
    assert guard.expression == "x.size(0) % 2 == 0"
    assert guard.where.code == "return h.view(-1, 2, h.shape[1]).sum(1)"
    assert guard.where.function == "program"
    if ours:
        assert guard.operator == "aten.view.default"
    assert only(fake.explain(env), "duck").expression == "y.size(0) == x.size(1)"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (LocalSource("x"), "x"),
        (AttrSource(LocalSource("self"), "table"), "self.table"),
        (TensorPropertySource(LocalSource("x"), TensorProperty.STRIDE, 1), "x.stride(1)"),
        (TensorPropertySource(LocalSource("x"), TensorProperty.STORAGE_OFFSET), "x.storage_offset()"),
        (GetItemSource(LocalSource("xs"), 2), "xs[2]"),
    ],
)
def test_sources_are_written_as_in_the_program(source, text):
    assert text_of_source(source) == text


def test_members_of_modules_are_called_as_in_the_program():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = [torch.ones(5, 3)]

        def forward(self, x):
            return x @ self.tables[0]

    with fake.using_shape_env():
        env = run_compiled(Model(), torch.ones(4, 5))
    assert "self.tables[0].size(0) == x.size(1)" in str(env.guards.minimal())


def test_a_backend_may_adopt_dynamos_environment():
    """Dynamo goes on with the same object: its guards are then the minimal ones, and right for other sizes."""
    reports = []

    def backend(gm, inputs):
        env = fake.ShapeEnv.adopt(torch._guards.TracingContext.get().fake_mode.shape_env)
        compiled = torch._dynamo.lookup_backend("aot_eager")(gm, inputs)
        reports.append(fake.explain(env))
        return compiled

    torch._dynamo.reset()
    run = torch.compile(program, backend=backend, dynamic=True)
    for rows, inner, columns in ((8, 6, 12), (4, 7, 3), (2, 2, 2), (10, 6, 5)):
        x, y = torch.randn(rows, inner), torch.randn(inner, columns)
        assert torch.allclose(run(x, y), program(x, y), atol=1e-5)
    with pytest.raises(RuntimeError):
        run(torch.randn(5, 3), torch.randn(3, 3))
    torch._dynamo.reset()
    assert "x.size(0) % 2 == 0" in [guard.expression for guard in reports[0]]
    assert len(reports) <= 2, "two rows make a result of one row, which is traced on its own"


class Projected(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.projection(x)
        return x.reshape(-1, 2, 6).relu() if x.shape[0] > 3 else x


def test_guards_of_torchs_environment_name_the_graphs_calls() -> None:
    reports = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        shape_env = next(value.node.shape_env for value in inputs if isinstance(value, torch.SymInt))
        reports.append(fake.explain(shape_env, graph=gm.graph))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(Projected(), backend=backend, dynamic=True)(torch.randn(12, 8))
    (report,) = reports
    told = {guard.expression: (guard.operator, guard.where and guard.where.code) for guard in report}
    assert told["x.size(1) == 8"] == ("linear", "x = self.projection(x)")
    assert told["x.size(0) % 3 == 0"][0] == "reshape"
    assert told["4 <= x.size(0)"][0] is None  # the program's own branch, told at its line
    assert "if x.shape[0] > 3" in told["4 <= x.size(0)"][1]


def test_torchs_environment_tells_the_users_line_and_not_a_modules():
    """Dynamo takes the lines of ``torch.nn`` for the user's; the first call that could have asked is the one."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
            self.larger = torch.nn.Upsample(scale_factor=2)

        def forward(self, x):
            y = self.first(x)  # asks for 16
            y = self.second(y)
            return self.larger(y[None])  # asks for a number

    reports = []

    def backend(gm, inputs):
        env = torch._guards.TracingContext.get().fake_mode.shape_env
        reports.append(fake.explain(env, graph=gm.graph))
        return gm

    torch._dynamo.reset()
    torch.compile(Model(), backend=backend, dynamic=True)(torch.zeros(5, 16))
    found = {guard.expression: guard for guard in reports[0]}
    assert "asks for 16" in found["x.size(1) == 16"].where.code
    assert found["x.size(1) == 16"].operator == "linear"
    (scale,) = [guard for text, guard in found.items() if "scale_factor" in text]
    assert "asks for a number" in scale.where.code


@pytest.mark.parametrize("ask", [fake.explain, fake.guards_of])
def test_what_has_no_guards_is_refused(ask):
    for wrong in (len, None, fake.FakeTensorMode()):
        with pytest.raises(fake.errors.ShapeEnvError, match=type(wrong).__name__):
            ask(wrong)
