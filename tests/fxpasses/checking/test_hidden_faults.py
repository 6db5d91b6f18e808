"""Mistakes that the values of a first step hide: found on other values, at the place itself, or inside of other graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses import StructureError, ValueMismatchError
from fxpasses._torch import disable_current_modes
from fxpasses.checking.execution.inputs import other_sizes, placeholders, symbol_bindings
from tests.fxpasses.checking import hidden_plants as plants
from tests.fxpasses.checking.repros import in_this_process

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x):
        return self.second(self.first(x).sin() * 3)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        pooled = self.norm(x + self.last(x)).view(-1, 2, 8).mean(1)
        return nn.functional.normalize(pooled, dim=-1)


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 4)

    def forward(self, index):
        return self.table(index).sin()


class Deep(nn.Module):
    def __init__(self, layers=12):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def branches(x):
    return torch.cond(x.sum() > 0, lambda y: (y.sin() + 1,), lambda y: (y.sin() - 1,), (x * 2,))[0]


def run(model, inputs, *passes, directory, backward=True):
    options = {
        "passes": ["default", *passes],
        "check": "values",
        "compiler": "eager",
        "report": str(directory),
    }
    compiled = torch.compile(model, backend="fxpasses", options=options)
    with torch.enable_grad() if backward else torch.no_grad():
        output = compiled(*inputs)
    if backward:
        output.float().pow(2).sum().backward()


CASES = {
    "forgets_the_limit": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU6()), lambda: torch.randn(3, 4)),
    "forgets_the_least_divisor": (Embedded, lambda: torch.randn(6, 8)),
    "exchanges_saved_values": (Norms, lambda: torch.randn(3, 8, requires_grad=True)),
    "forgets_the_last_row": (Lookup, lambda: torch.arange(5)),
    "forgets_nan": (lambda: lambda x: x.cos().sin() + (x - x)[0], lambda: torch.randn(6, 2)),
    "a_little_too_much": (lambda: Deep().bfloat16(), lambda: torch.randn(4, 16).bfloat16()),
    "under_one_percent": (lambda: Deep(4).bfloat16(), lambda: torch.randn(16, 16).bfloat16()),
    "sine_for_cosine_inside": (lambda: branches, lambda: torch.randn(3, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_hidden_fault_is_found_and_shown(name, tmp_path):
    build, make = CASES[name]
    item = getattr(plants, name)
    model, x = build(), make()
    with pytest.raises(ValueMismatchError) as caught:
        run(model, [x], item, directory=tmp_path, backward=isinstance(model, nn.Module))
    error = caught.value
    assert error.pass_name == name
    assert error.repro_calls <= (6 if "divisor" in name else 5 if "inside" in name else 3)
    status, output, errors = in_this_process(error.repro)
    assert status == 1, errors
    assert f"pass '{name}' is wrong" in output


@pytest.mark.slow
def test_of_many_sites_in_bfloat16_the_wrong_one_is_named(tmp_path):
    torch.manual_seed(0)
    with pytest.raises(ValueMismatchError) as caught:
        run(Deep().bfloat16(), [torch.randn(4, 16).bfloat16()], plants.a_little_too_much, directory=tmp_path)
    (site,) = caught.value.sites
    assert site.index == 35 // 2


@pytest.mark.slow
def test_more_roundings_of_the_same_function_are_no_fault(tmp_path):
    run(Deep(4).bfloat16(), [torch.randn(16, 16).bfloat16()], plants.half_as_two_halves, directory=tmp_path)


@pytest.mark.parametrize("passes", [["marks"], ["trusts_marks"]])
def test_alone_they_are_right(passes, tmp_path):
    run(Deep(2), [torch.randn(4, 16)], *(getattr(plants, p) for p in passes), directory=tmp_path)


def test_passes_that_are_wrong_only_together_are_both_named(tmp_path):
    with pytest.raises(
        ValueMismatchError, match="Only after 'marks': without it, 'trusts_marks' is right"
    ) as caught:
        run(Deep(2), [torch.randn(4, 16)], plants.marks, plants.trusts_marks, directory=tmp_path)
    error = caught.value
    assert (error.pass_name, error.partners) == ("trusts_marks", ("marks",))
    status, output, errors = in_this_process(error.repro)
    assert status == 1, errors
    assert "trusts_marks" in output


def test_a_pass_that_is_wrong_on_what_another_one_wrote_is_blamed_alone(tmp_path):
    with pytest.raises(ValueMismatchError) as caught:
        run(Deep(2), [torch.randn(4, 16)], plants.halves, plants.drops_doubling, directory=tmp_path)
    assert (caught.value.pass_name, caught.value.partners) == ("drops_doubling", ())
    status, output, errors = in_this_process(caught.value.repro)
    assert status == 1, errors
    assert "pass 'drops_doubling' is wrong" in output


def test_the_structure_of_a_branch_is_checked(tmp_path):
    options = {"passes": [plants.drops_an_output_inside], "compiler": "eager"}
    with pytest.raises(Exception, match=r"output 0: dtype torch\.float32 became torch\.float16") as caught:
        torch.compile(branches, backend="fxpasses", options=options)(torch.randn(3, 4))
    assert isinstance(caught.value.inner_exception, StructureError)


def test_a_pass_that_changed_a_branch_only_has_changed_the_graph():
    captured = fxpasses.capture(branches, torch.randn(3, 4))
    (run,) = fxpasses.PassManager([plants.sine_for_cosine_inside]).run(captured.forward, "inference")
    assert run.changed
    assert all(name.endswith(".sin") for name in run.modified)
    assert len(run.modified) == 2


def test_sizes_are_tried_in_a_model_with_symbolic_floats():
    """With ``dynamic=True`` constants such as an epsilon are symbols as well: they stay as they are."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8, eps=1e-5)

        def forward(self, x):
            return self.norm(x).sin()

    nodes = placeholders(fxpasses.capture(Model(), torch.randn(5, 8), dynamic=True).forward)
    values = [
        5
        if isinstance(n.meta["val"], torch.SymInt)
        else torch.zeros([s if isinstance(s, int) else s.node.hint for s in n.meta["val"].shape])
        for n in nodes
    ]
    assert len(list(other_sizes(nodes, symbol_bindings(nodes, values)))) > 5


def changed_constants(change):
    """A pass that puts a changed copy of each constant in its place."""

    @fxpasses.graph_pass
    def replaces_constants(gm):
        for node in list(gm.graph.find_nodes(op="get_attr")):
            with disable_current_modes():
                value = getattr(gm, node.target).detach().clone()
                gm.register_buffer(f"{node.target}_changed", change(value))
            with gm.graph.inserting_before(node):
                new = gm.graph.get_attr(f"{node.target}_changed")
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
        return True

    return replaces_constants


def with_last(change):
    return lambda value: torch.cat([value[:-1], change(value[-1:])])


CONSTANT = [100.0 * n for n in range(40)]
HIDDEN = {
    "an activation far beyond its end": lambda x: (x + torch.tensor(CONSTANT)).sigmoid(),
    "a bound": lambda x: (x - torch.tensor(CONSTANT)).clamp(0, 3),
    "a comparison": lambda x: x > torch.tensor(CONSTANT),
    "a condition": lambda x: torch.where(x > 50, torch.tensor(CONSTANT), x),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_new_constant_that_inputs_hide_is_found(name, tmp_path):
    wrong = changed_constants(with_last(lambda row: row + 1))
    with pytest.raises(ValueMismatchError):
        run(HIDDEN[name], [torch.randn(3, 40)], wrong, directory=tmp_path, backward=False)
    if name == "a condition":
        return  # the result has the constant itself, of which a unit in the last place is a fault, too
    rounded = changed_constants(with_last(lambda row: row * (1 + 2e-7)))
    torch._dynamo.reset()
    run(HIDDEN[name], [torch.randn(3, 40)], rounded, directory=tmp_path, backward=False)


TABLE = [[float(row), -float(row)] for row in range(40)]


def test_a_row_that_no_index_visits_is_read(tmp_path):
    def middle(value):
        value[20] *= 2
        return value

    with pytest.raises(ValueMismatchError, match="rows that a pass changed"):
        run(
            lambda index: torch.tensor(TABLE)[index].sin(),
            [torch.arange(5)],
            changed_constants(middle),
            directory=tmp_path,
            backward=False,
        )


def test_a_constant_that_a_bound_cuts_off_may_be_any(tmp_path):
    def model(x):
        return x + torch.tensor(CONSTANT).clamp(max=10)

    item = changed_constants(with_last(lambda row: row * 2))
    run(model, [torch.randn(3, 40)], item, directory=tmp_path, backward=False)
