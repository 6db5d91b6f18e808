"""The value check: planted wrong passes are found, blamed and cut down to a file; right ones raise no alarm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fxpasses
from fake.library import EffectType, custom_op
from fxpasses import PassError, StructureError, ValueMismatchError
from tests.fxpasses.checking import plants
from tests.fxpasses.checking.repros import in_a_new_process, in_this_process
from tests.models.zoo import ZOO


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    fxpasses.reset_stats()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def through_tanh(x):
    y = (x * 2).tanh()
    return y * x.cos()


def through_mean(x):
    return x.sin().mean(0) * 3


def scattered(x, index):
    table = torch.zeros(6, 3)
    return table.index_put((index,), x.sin()) * 2


def copied(x):
    return x.clone(), x.sin()


def random_twice(x):
    return x * torch.rand(4), x + torch.rand(4)


def forty_sites(x):
    total = x
    for k in range(40):
        total = total + (x + k).neg().neg().sin()
    return total


def angles(position):
    return (position.float() * 30.7).sin().bfloat16()


def through_product(x, w):
    y = x @ w
    return y.tanh() * y


def updated(x, state):
    state.add_(x.detach().sum())
    return x * state


def summed(x):
    return x.sin().sum(0)


PLANTS = {
    "gradient": (plants.wrong_gradient, through_tanh, lambda: [leaf(5, 3)], {}),
    "size": (plants.bakes_the_size_in, through_mean, lambda: [leaf(6, 3)], {"dynamic": True}),
    "odd_size": (plants.wrong_for_odd_sizes, summed, lambda: [leaf(7, 3)], {}),
    "empty": (plants.empty_for_zeros, scattered, lambda: [leaf(2, 3), torch.tensor([1, 4])], {}),
    "aliasing": (plants.drops_a_copy, copied, lambda: [torch.randn(4)], {}),
    "random": (plants.reorders_random_draws, random_twice, lambda: [leaf(4)], {}),
    "one_site": (plants.wrong_at_one_site, forty_sites, lambda: [leaf(4)], {}),
    "one_place": (plants.wrong_at_one_place, forty_sites, lambda: [leaf(4)], {}),
    "bfloat16": (plants.multiplies_in_bfloat16, angles, lambda: [leaf(30, 2, dtype=torch.bfloat16)], {}),
    "bfloat16_scale": (
        plants.scales_in_bfloat16,
        through_tanh,
        lambda: [leaf(32, 8, dtype=torch.bfloat16)],
        {},
    ),
    "backward_graph": (plants.wrong_backward_graph, through_tanh, lambda: [leaf(5, 3)], {}),
    "saved_value": (plants.wrong_saved_value, through_product, lambda: [leaf(5, 3), leaf(3, 2)], {}),
    "input": (plants.forgets_a_write, updated, lambda: [leaf(3), torch.zeros(())], {}),
    "stride": (plants.wrong_stride, through_tanh, lambda: [leaf(5, 3)], {}),
}


SEEN_WITHOUT_RUNNING = {"aliasing", "random", "stride"}
"""What the structure check finds before there is anything to run."""


def step(function, inputs, options, **how):
    compiled = torch.compile(function, backend="fxpasses", options={"compiler": "eager", **options}, **how)
    outputs = compiled(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if any(out.requires_grad for out in outputs):
        sum(out.float().sum() for out in outputs if out.requires_grad).backward()
    return outputs


def found(name, tmp_path, extra=()):
    item, function, inputs, how = PLANTS[name]
    options = {"passes": [*extra, item], "check": "values", "report": str(tmp_path)}
    with pytest.raises(Exception) as caught:
        step(function, inputs(), options, **how)
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, PassError), error
    return error


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_pass_is_found_and_blamed(name, tmp_path):
    error = found(name, tmp_path, extra=["default"])
    assert error.pass_name == PLANTS[name][0].name
    assert isinstance(error, StructureError if name in SEEN_WITHOUT_RUNNING else ValueMismatchError)
    assert error.location.node
    assert f"{__file__}:" in error.location.source
    assert Path(error.repro).is_file()
    assert error.repro_calls <= 4, Path(error.repro).read_text()


@pytest.mark.parametrize("name", PLANTS)
def test_without_the_check_the_plants_run(name):
    item, function, inputs, how = PLANTS[name]
    step(function, inputs(), {"passes": ["default", item], "check": "off"}, **how)


@pytest.mark.slow
def test_of_forty_sites_the_guilty_one_is_named(tmp_path):
    error = found("one_site", tmp_path)
    (site,) = error.sites
    assert site.index == 17
    assert "1 of 80 match sites" in str(error)


def test_without_sites_the_place_is_named(tmp_path):
    error = found("one_place", tmp_path)
    assert not error.sites
    assert error.location.node == "neg_35"  # the call that was replaced there, and left behind
    assert "that changed" in str(error)


@pytest.mark.parametrize("name", ["gradient", "size", "bfloat16", "one_site"])
def test_the_repro_shows_the_fault_again(name, tmp_path):
    error = found(name, tmp_path)
    run = in_a_new_process if name == "gradient" else in_this_process
    status, output, errors = run(error.repro)
    assert status == 1, errors
    assert f"pass {error.pass_name!r} is wrong" in output


@pytest.mark.parametrize("name", ["gradient", "backward_graph", "aliasing"])
def test_eager_takes_over_on_request(name, tmp_path):
    item, function, inputs, _ = PLANTS[name]
    given = inputs()
    wanted = function(*given)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    if wanted[0].requires_grad:
        wanted[0].sum().backward()
    gradient, given[0].grad = given[0].grad, None
    options = {"passes": [item], "check": "values", "report": str(tmp_path), "on_failure": "eager"}
    outputs = step(function, given, options)
    assert all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True))
    assert gradient is None or torch.allclose(gradient, given[0].grad)
    (fallback,) = fxpasses.stats().fallbacks
    assert fallback.stage in ("check", "pass")


def test_a_pass_that_raises_gets_a_repro_file_too(tmp_path):
    options = {"passes": [plants.raises_at_cos], "check": "values", "report": str(tmp_path)}
    with pytest.raises(Exception, match="no cosine") as caught:
        step(through_tanh, [leaf(5, 3)], options)
    error = getattr(caught.value, "inner_exception", caught.value)
    assert error.repro_calls == 1
    status, output, _ = in_this_process(error.repro)
    assert status == 1
    assert "no cosine" in output


def test_a_pass_made_in_a_function_is_written_out(tmp_path):
    options = {"passes": [plants.a_local_pass(3.0)], "check": "values", "report": str(tmp_path)}
    with pytest.raises(ValueMismatchError) as caught:
        step(through_tanh, [leaf(5, 3)], options)
    text = Path(caught.value.repro).read_text()
    assert "factor = 3.0" in text
    assert "def scale(gm" in text
    status, _, errors = in_a_new_process(caught.value.repro)
    assert status == 1, errors


def test_data_is_saved_where_random_data_does_not_show_the_fault(tmp_path):
    options = {"passes": [plants.wrong_beyond_a_thousand], "check": "values", "report": str(tmp_path)}
    x = torch.tensor([1.0, 2000.0, 3.0], requires_grad=True)
    with pytest.raises(ValueMismatchError) as caught:
        step(through_tanh, [x], options)
    assert Path(caught.value.repro).with_name("inputs.pt").is_file()
    status, _, errors = in_this_process(caught.value.repro)
    assert status == 1, errors


def test_what_a_contract_promises_is_what_is_checked(tmp_path):
    def through(item):
        step(through_tanh, [leaf(5, 3)], {"passes": [item], "check": "values", "report": str(tmp_path)})

    through(plants.rounds_otherwise("tolerance"))
    through(plants.changes_numbers("none"))
    with pytest.raises(ValueMismatchError):
        through(plants.rounds_otherwise("bitwise"))
    with pytest.raises(ValueMismatchError):
        through(plants.changes_numbers("tolerance"))


@pytest.mark.slow
def test_two_percent_are_found_deep_inside_a_model_in_bfloat16(tmp_path):
    entry = ZOO["gpt"]
    options = {"compiler": "eager", "passes": [plants.scales_the_first_product], "check": "values"}
    compiled = torch.compile(
        entry.build().bfloat16(), backend="fxpasses", options={**options, "report": str(tmp_path)}
    )
    with pytest.raises(ValueMismatchError) as caught:
        compiled(*entry.inputs(2))
    assert caught.value.repro_calls <= 3


def test_a_parameter_of_a_class_of_its_own_is_compared_as_a_tensor():
    class Weight(torch.nn.Parameter):
        pass

    item = PLANTS["gradient"][0]
    with pytest.raises(ValueMismatchError):
        step(through_tanh, [Weight(torch.randn(4))], {"passes": [item], "check": "values"})


def test_what_has_ragged_sizes_is_not_compared_and_runs(caplog):
    rows = [torch.ones(n, 4, requires_grad=True) for n in (2, 3)]
    weight = torch.ones(2, 4, requires_grad=True)

    def f(nested):
        return torch.nn.functional.linear(nested, weight).values().square().sum()

    options = {"compiler": "eager", "check": "values", "passes": [plants.reorders_a_product]}
    compiled = torch.compile(f, backend="fxpasses", options=options)
    compiled(torch.nested.as_nested_tensor(rows, layout=torch.jagged)).backward()
    assert torch.equal(weight.grad, torch.full((2, 4), 40.0))
    assert "is not checked by value: a ragged size" in caplog.text


SAID: list[float] = []


@custom_op("fxpasses_values::say", mutates_args=())
def say(x: torch.Tensor) -> None:
    SAID.append(x.sum().item())


@custom_op("fxpasses_values::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    SAID.append(0.0)
    return x * len(SAID)


say.register_fake(lambda x: None)
counted.register_fake(torch.empty_like)
say.register_effect(EffectType.ORDERED)
counted.register_effect(EffectType.ORDERED)


@fxpasses.graph_pass(graphs=["inference"])
def sines_for_exponentials(gm):
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default):
        node.target = torch.ops.aten.sin.default
    return True


def test_what_a_program_says_is_said_once():
    def f(x):
        say(x)
        y = x.exp()
        say(y)
        return y * x.exp()

    SAID.clear()
    step(f, [torch.zeros(2)], {"check": "values"})
    assert SAID == [0.0, 2.0]
    with pytest.raises(ValueMismatchError):
        step(f, [torch.ones(2)], {"passes": [sines_for_exponentials], "check": "values"})
    assert SAID == [0.0, 2.0]


def test_results_of_an_effect_are_not_made_again(caplog):
    SAID.clear()
    (got,) = step(lambda x: counted(x) + x.exp() * x.exp(), [torch.zeros(2) + 1], {"check": "values"})
    assert SAID == [0.0]
    torch.testing.assert_close(got, 1 + torch.full((2,), 2.0).exp())
    assert "whose effects may change what it returns" in caplog.text


def test_rows_whose_number_depends_on_data_are_compared(caplog):
    def f(x, weight):
        chosen = x[:, 0] > 0
        return x.masked_scatter(chosen[:, None], torch.nn.functional.gelu(x[chosen] @ weight))

    inputs = [leaf(5, 4), leaf(4, 4)]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (got,) = step(f, inputs, {"check": "values"})
    torch.testing.assert_close(got, f(*inputs))
    assert "not checked" not in caplog.text


def test_what_has_no_strides_is_not_compared_and_runs(caplog):
    table = torch.nn.Embedding(4, 2, sparse=True)
    compiled = torch.compile(table, backend="fxpasses", options={"compiler": "eager", "check": "values"})
    compiled(torch.tensor([1, 2, 1])).sum().backward()
    assert table.weight.grad.to_dense().tolist() == [[0, 0], [2, 2], [1, 1], [0, 0]]
    assert "a tensor of layout torch.sparse_coo" in caplog.text


@fxpasses.graph_pass(graphs=["inference"])
def drops_an_index(gm):
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
    return True


STORED = [
    torch.float8_e4m3fn,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex32,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_types_that_torch_stores_and_hardly_computes_in(dtype, caplog):
    def f(x, order):
        return x[order].clone(), x == x.clone()

    order = torch.tensor([3, 1, 0, 2])
    x = torch.tensor([1.0, 2.0, 4.0, 0.5]).to(dtype)
    step(f, [x, order], {"passes": ["default"], "check": "values"})
    assert "not checked" not in caplog.text
    with pytest.raises(ValueMismatchError):
        step(f, [x, order], {"passes": [drops_an_index], "check": "values"})
