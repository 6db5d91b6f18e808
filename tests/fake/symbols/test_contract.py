"""Contracts: promises become facts, and a program that forces less is told so, with the reasons."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch._dynamo.testing
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, ShapeEnv as TorchShapeEnv

import fake
from fake import Dim
from fake.errors import ContractError, ContractInputError, ContractViolationError


def declared(**inputs):
    """A mode, and fake inputs with contracts: name -> (shape, dims)."""
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    return mode, *(
        mode.from_tensor(torch.zeros(shape), name=name, dims=dims) for name, (shape, dims) in inputs.items()
    )


def violations(mode):
    with pytest.raises(ContractViolationError) as caught:
        mode.shape_env.check_contracts()
    return caught.value.violations


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "must be a string"),
        ({"name": "n", "min": -1}, "min must be"),
        ({"name": "n", "multiple_of": 0}, "multiple_of must be"),
        ({"name": "n", "max": 1}, "at least 2"),
        ({"name": "n", "min": 5, "max": 7, "multiple_of": 4}, "at least 8"),
        ({"name": "n", "max": 3.5}, "max must be"),
    ],
)
def test_a_dim_without_sizes_is_refused(fields, message):
    with pytest.raises(ContractError, match=message):
        Dim(**fields)


def test_what_is_promised_is_known_without_asking():
    mode, x = declared(x=((16, 5), {0: Dim("batch", min=4, max=64, multiple_of=8)}))
    size = x.shape[0]
    before = len(mode.shape_env.guards)
    assert size <= 64
    assert size >= 8
    assert size % 4 == 0
    assert len(mode.shape_env.guards) == before
    facts = fake.facts_of(size)
    assert (facts.min, facts.max, facts.divisors) == (8, 64, (2, 4, 8))
    mode.shape_env.check_contracts()


def test_a_program_that_serves_all_sizes_keeps_the_contract():
    batch = Dim("batch", min=1, max=64)
    mode, x, y = declared(x=((8, 6), {0: batch}), y=((8, 6), {0: batch}))
    with mode:
        z = torch.cat([x, y]).view(-1, 2, 6).transpose(0, 1) * 2
        assert tuple(z.shape)[2] == 6
        (x + y).sum(1)
    mode.shape_env.check_contracts()
    mode.shape_env.produce_guards([x, y], ["x", "y"])


def test_a_size_made_constant():
    mode, x = declared(x=((8, 6), {0: Dim("batch", max=64)}))
    with mode:
        x.view(8, 3, 2)  # eight
    (violation,) = violations(mode)
    assert violation.where == "x.size(0)"
    assert violation.forced == "x.size(0) == 8"
    (step,) = violation.chain
    assert "aten.view.default" in step
    assert "# eight" in step


def test_the_chain_holds_every_step_and_no_other():
    mode, x, y, z = declared(
        x=((6, 5), {0: Dim("batch", max=64)}), y=((6, 5), {0: "dynamic"}), z=((7,), {0: "dynamic"})
    )
    with mode:
        w = x + y  # first
        z.view(-1, 7)  # has nothing to do with it
        w.sum(1)
    assert int(y.shape[0]) == 6  # second
    (violation,) = violations(mode)
    assert violation.forced == "x.size(0) == 6"
    first, second = violation.chain
    assert "aten.add.Tensor" in first
    assert "# first" in first
    assert "the program itself" in second
    assert "# second" in second
    text = str(ContractViolationError((violation,)))
    assert "Dim('batch'" in text
    assert first in text
    assert second in text


def test_a_narrower_range_a_divisor_and_a_hole():
    mode, x = declared(x=((12, 6), {0: Dim("batch", max=64), 1: Dim("width", min=2, max=8)}))
    assert x.shape[0] < 50
    assert x.shape[0] % 4 == 0
    assert x.shape[0] != 20
    assert x.shape[1] <= 8
    assert {violation.forced for violation in violations(mode)} == {
        "x.size(0) <= 49",
        "x.size(0) != 20",
        "x.size(0) % 4 == 0",
    }


def test_promising_what_is_needed_mends_it():
    mode, x = declared(x=((12, 6), {0: Dim("batch", max=48, multiple_of=4)}))
    assert x.shape[0] < 50
    assert x.shape[0] % 4 == 0
    assert x.shape[0] % 2 == 0
    mode.shape_env.check_contracts()


def test_two_contracts_that_the_program_ties_together():
    mode, x, y = declared(x=((6,), {0: Dim("rows", max=64)}), y=((6,), {0: Dim("columns", max=64)}))
    with mode:
        x * y
    (violation,) = violations(mode)
    assert violation.forced in ("x.size(0) == y.size(0)", "y.size(0) == x.size(0)")


def test_one_name_is_one_size():
    rows = Dim("rows", max=64)
    mode, x, y = declared(x=((6,), {0: rows}), y=((6,), {0: rows}))
    with mode:
        x * y
    mode.shape_env.check_contracts()
    assert x.shape[0].node.expr == y.shape[0].node.expr


def test_a_dimension_without_a_contract_may_be_restricted():
    mode, x, y = declared(x=((6, 5), {0: Dim("rows", max=64), 1: "dynamic"}), y=((5,), {0: "dynamic"}))
    with mode:
        x + y
    assert y.shape[0] == 5
    mode.shape_env.check_contracts()


def test_a_double_of_something_demands_an_even_size():
    mode, x, y = declared(x=((6,), {0: Dim("rows", max=64)}), y=((3,), {0: "dynamic"}))
    with mode:
        torch.cat([y, y]) + x
    (violation,) = violations(mode)
    assert "% 2 == 0" in violation.forced


def test_an_example_that_breaks_its_contract_is_refused_before_anything_is_made():
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    with pytest.raises(ContractInputError, match=r"x.size\(0\) is 65"):
        mode.from_tensor(torch.zeros(65), name="x", dims={0: Dim("batch", max=64)})
    assert not mode.shape_env.var_to_sources
    rows = Dim("rows")
    mode.from_tensor(torch.zeros(6), name="y", dims={0: rows})
    with pytest.raises(ContractInputError, match=r"y.size\(0\) \(of the same Dim\) is 6"):
        mode.from_tensor(torch.zeros(7), name="z", dims={0: rows})
    with pytest.raises(ContractError, match="was declared as"):
        mode.from_tensor(torch.zeros(6), name="w", dims={0: Dim("rows", max=10)})


def test_sizes_of_one_get_a_graph_of_their_own():
    mode, x = declared(x=((1, 5), {0: Dim("batch", min=1, max=64)}))
    assert x.shape[0] == 1
    mode.shape_env.check_contracts()


def test_torchs_environment_keeps_no_contracts():
    mode = fake.FakeTensorMode(shape_env=TorchShapeEnv())
    with pytest.raises(ContractError, match=r"fake.ShapeEnv\(\)"):
        mode.from_tensor(torch.zeros(4), name="x", dims={0: Dim("batch")})


def compiled(function, *inputs, backend="aot_eager", **options):
    torch._dynamo.reset()
    try:
        return torch.compile(function, backend=backend, **options)(*inputs)
    finally:
        torch._dynamo.reset()


def halves(x):
    return x.view(2, -1) * x.shape[0]


def doubles(x):
    return torch.cat([x, x]) * x.shape[0]


def test_marked_tensors_in_torch_compile():
    x = torch.ones(8, 6)
    fake.mark_dynamic(x, {0: Dim("batch", max=64)})
    with fake.using_shape_env():
        assert torch.equal(compiled(doubles, x), doubles(x))
        with pytest.raises(ConstraintViolationError) as caught:
            compiled(halves, x)
    assert isinstance(caught.value, ContractViolationError)
    assert "x.size(0) % 2 == 0" in str(caught.value)
    assert "return x.view(2, -1) * x.shape[0]" in str(caught.value)
    even = torch.ones(8, 6)
    fake.mark_dynamic(even, {0: Dim("batch", max=64, multiple_of=2)})
    with fake.using_shape_env():
        with pytest.raises(ContractViolationError, match="!= 2"):
            compiled(halves, even)


def test_contracts_by_name_in_torch_compile():
    counter = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    with fake.using_shape_env(contracts={"x": {0: Dim("batch", max=64)}}):
        run = torch.compile(doubles, backend=counter)
        for size in (8, 3, 64, 17):
            x = torch.ones(size, 6)
            assert torch.equal(run(x), doubles(x))
    assert counter.frame_count == 1, "declared sizes are dynamic from the first call on"
    torch._dynamo.reset()
    with (
        fake.using_shape_env(contracts={"x": {0: Dim("batch", max=64)}}),
        pytest.raises(ContractViolationError),
    ):
        compiled(halves, torch.ones(8, 6))
    assert not fake.using_shape_env.is_enabled()


def test_contracts_of_names_that_no_input_has():
    contracts = {"x": {0: Dim("batch", max=64)}, "inputs": {0: Dim("rows")}}
    torch._dynamo.reset()
    with (
        pytest.warns(UserWarning, match="contracts for inputs, and no input had such a name: these were x"),
        fake.using_shape_env(contracts=contracts),
    ):
        compiled(doubles, torch.ones(8, 6))
    with fake.using_shape_env(contracts=contracts):
        pass  # nothing was traced


def test_wrong_contracts_are_refused_on_entering():
    with pytest.raises(ContractError), fake.using_shape_env(contracts={"x": {0: 5}}):
        pass
    assert not fake.using_shape_env.is_enabled()
    with pytest.raises(ContractError):
        fake.mark_dynamic(torch.ones(3), {2: Dim("n")})
    with pytest.raises(ContractInputError):
        fake.mark_dynamic(torch.ones(3), {0: Dim("n", multiple_of=2)})


def test_switching_is_nested_and_complete():
    import torch._dynamo.output_graph as output_graph

    before = output_graph.ShapeEnv
    with fake.using_shape_env():
        inside = output_graph.ShapeEnv
        with fake.using_shape_env(contracts={"x": {0: Dim("n")}}):
            assert fake.using_shape_env.is_enabled()
        assert output_graph.ShapeEnv == inside
        assert fake.using_shape_env.is_enabled()
    assert output_graph.ShapeEnv is before


def attend(x, y):
    scores = (x @ y.mT).softmax(-1)
    return torch.cat([scores @ y, x], 1).view(-1, 2, y.shape[1])


def test_compiled_by_inductor():
    def f(x):
        return (x.view(-1, 2, x.shape[1]) * x.shape[0]).sum(1)

    torch._dynamo.reset()
    contracts = {"x": {0: Dim("rows", min=4, max=256, multiple_of=2), 1: Dim("width", max=64)}}
    with fake.using_shape_env(contracts=contracts):
        run = torch.compile(f, backend="inductor")
        for size in ((4, 6), (10, 9)):
            x = torch.randn(size)
            assert torch.allclose(run(x), f(x), atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("accelerated", [True, False])
def test_compiled_with_contracts_and_changing_sizes(accelerated):
    rows, width = Dim("rows", max=256), Dim("width", max=64)
    contracts = {"x": {0: rows, 1: width}, "y": {0: "dynamic", 1: width}}
    compiles = []

    def counting(gm, inputs):
        compiles.append(gm)
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        if accelerated:
            stack.enter_context(fake.accelerate())
        stack.enter_context(fake.using_shape_env(contracts=contracts))
        run = torch.compile(attend, backend=counting)
        for a, b, w in ((4, 3, 6), (7, 3, 6), (5, 9, 8), (2, 2, 2)):
            x, y = torch.randn(a, w, requires_grad=True), torch.randn(b, w)
            expected = attend(x, y)
            found = run(x, y)
            assert torch.allclose(found, expected, atol=1e-5)
            (wanted,) = torch.autograd.grad(expected.sum(), x)
            (gradient,) = torch.autograd.grad(found.sum(), x)
            assert torch.allclose(gradient, wanted, atol=1e-5)
    torch._dynamo.reset()
    assert len(compiles) == 1


def test_one_broken_contract_is_told_once():
    """What holds for the one size that is left is no demand of its own."""

    def program(x, y):
        return torch.cat([x, y]).view(x.shape[0], 2, -1)

    x = torch.ones(8, 6)
    fake.mark_dynamic(x, {0: Dim("batch", max=64)})
    with fake.using_shape_env(), pytest.raises(fake.ContractViolationError) as raised:
        torch.compile(program, backend="eager")(x, torch.ones(8, 6))
    assert [violation.forced for violation in raised.value.violations] == ["x.size(0) == 8"]


@pytest.mark.parametrize(
    ("batch", "other", "program", "forced"),
    [
        (Dim("batch", max=64), "dynamic", lambda x: x.view(8, 6), "x.size(1)*x.size(0) == 48"),
        (Dim("batch"), "dynamic", lambda x: x.view(48), "x.size(1)*x.size(0) == 48"),
        (Dim("batch", max=64, multiple_of=4), "dynamic", lambda x: x.view(48), "x.size(1)*x.size(0) == 48"),
        (Dim("batch", max=64), Dim("width", max=9), lambda x: x.view(48), "x.size(1)*x.size(0) == 48"),
        (Dim("batch", max=64), "static", lambda x: x.view(8, 6), "x.size(0) == 8"),
        (Dim("batch", max=64), "dynamic", lambda x: x.view(-1), None),
        (Dim("batch", max=64), "dynamic", lambda x: x.view(8, 3, -1), None),
        (Dim("batch", max=64), "dynamic", lambda x: torch.cat([x, x.t().contiguous().t()]).view(-1, 2), None),
        (Dim("batch", min=8, max=8), "dynamic", lambda x: x.view(8, 6), None),
    ],
)
def test_a_tie_to_a_free_size_serves_each_promised_one(batch, other, program, forced):
    """``None``: for each promised size there is a free one that the guards take."""
    mode, x = declared(x=((8, 6), {0: batch, 1: other}))
    with mode:
        program(x)
    if forced is None:
        mode.shape_env.check_contracts()
    else:
        assert [violation.forced for violation in violations(mode)] == [forced]


@pytest.mark.parametrize("most", [64, None])
def test_pieces_of_a_size_are_as_many_for_all(most):
    def cut(size, program, **promise):
        mode, x = declared(x=((size,), {0: Dim("s", max=most, **promise)}))
        with mode:
            program(x)
        return mode

    cut(8, lambda x: x.chunk(2)).shape_env.check_contracts()
    cut(8, lambda x: x.chunk(4), multiple_of=4).shape_env.check_contracts()
    cut(9, lambda x: torch.stack(x.chunk(3)), multiple_of=3).shape_env.check_contracts()
    cut(8, lambda x: x.split(x.shape[0] // 2), multiple_of=2).shape_env.check_contracts()
    assert violations(cut(8, lambda x: x.chunk(4)))  # five give three
    assert violations(cut(9, lambda x: x.split(3)))


def test_an_unknown_torch_that_would_check_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    with pytest.raises(fake.UnsupportedTorchVersionError, match=r"fake.using_shape_env\(\) .* found 9\.9\.0"):
        fake.using_shape_env(contracts={"x": {0: fake.Dim("batch", max=64)}}).__enter__()
    assert not fake.using_shape_env.is_enabled()


@pytest.mark.parametrize(
    "refused", [Dim("b", min=9), Dim("b", max=2), Dim("b", multiple_of=5), Dim("taken", max=64)], ids=str
)
def test_a_contract_that_the_input_breaks_is_not_kept(refused):
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    mode.from_tensor(torch.zeros(8), name="y", dims={0: Dim("taken", max=32)})
    with pytest.raises((ContractError, ContractInputError)):
        mode.from_tensor(torch.zeros(3, 4), name="x", dims={0: refused})
    x = mode.from_tensor(torch.zeros(3, 4), name="x", dims={0: "dynamic"})
    assert x.view(x.shape[0], 2, 2).shape[1:] == (2, 2)
    assert set(mode.shape_env.contract.by_input) == {"y"}


def test_the_name_of_an_input_is_a_string():
    with pytest.raises(ContractError, match="not 3"):
        fake.ShapeEnv(contracts={3: {0: Dim("b")}})
    env = fake.ShapeEnv()
    with pytest.raises(ContractError, match="not None"):
        env.declare(None, {0: Dim("b")})
    assert not env.contract.by_input
