"""Outputs that are new memory in eager are new memory when compiled, whatever Inductor's passes drop."""

import pytest
import torch
from torch._higher_order_ops import while_loop

from fxpasses import stats


def storages(x, outputs):
    """For the input and each output, who is the first of them with this memory."""
    pointers = [value.untyped_storage().data_ptr() for value in (x, *outputs)]
    return [pointers.index(pointer) for pointer in pointers]


def both(x, first, second):
    y = x.sin()
    return first(y), second(y)


def with_views(y):
    return y, y[1:], y.view(2, 2).t()


def written(x, results, rows=0):
    "A write to some rows, which Inductor makes in the memory of the input."
    x.detach().index_put_((torch.tensor([rows]),), torch.tensor(7.0))
    return results(x)


PROGRAMS = {
    "times_one": lambda x: (x * 1,),
    "plus_zero": lambda x: (x + torch.zeros(4),),
    "row_of_a_product": lambda x: ((x.view(2, 2) * 1)[0],),
    "with_views_the_input": lambda x: (x * 1, x + 0),
    "value_and_product": lambda x: both(x, lambda y: y, lambda y: y * 1),
    "two_copies": lambda x: both(x, torch.clone, torch.clone),
    "copy_of_a_view": lambda x: both(x, torch.clone, lambda y: y.view(2, 2).clone()),
    "one_that_is_joined": lambda x: both(x, torch.clone, lambda y: torch.cat([y])),
    "value_and_views": lambda x: (*both(x, lambda y: y.view(2, 2), lambda y: y[1:]), x * 1, x.view(2, 2) * 1),
    "copy_and_its_views": lambda x: (*both(x, lambda y: y, torch.clone), *with_views(x.sin() * 1)),
    "written": lambda x: written(x, lambda x: (x * 1, x.clone())),
    "written_and_part": lambda x: written(x, lambda x: ((x * 1)[1:], x.view(2, 2).clone())),
    "cond": lambda x: (torch.cond(x.sum() > 0, lambda x: x * 1, lambda x: x + 0, (x,)),),
    "detached": lambda x: both(x, lambda y: y * 1, lambda y: y.detach() * 1),
    "written_and_views_of_a_copy": lambda x: written(x, lambda x: with_views(x.clone())),
    # Not fresh in eager either.
    "views": lambda x: (x.view(2, 2), x[1:], x * 1),
    "views_of_one": lambda x: both(x, lambda y: y, lambda y: y.view(2, 2)),
}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("compiler", ["inductor", "eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_is_shared_as_in_eager(name, compiler, gradients):
    program = PROGRAMS[name]
    x = torch.arange(1.0, 5.0, requires_grad=gradients)
    compiled = torch.compile(program, backend="fxpasses", options={"compiler": compiler})
    outputs, expected = compiled(x), program(x)
    assert storages(x, outputs) == storages(x, expected)
    assert [y.requires_grad for y in outputs] == [y.requires_grad for y in expected]
    torch.testing.assert_close(outputs, expected)


def test_values_between_writes():
    def program(x):
        return written(x, lambda x: x * 1), written(x, torch.clone, 1), written(x, torch.neg, 2)

    x = torch.zeros(4)
    results = torch.compile(program, backend="fxpasses")(x)
    assert [y.tolist() for y in results] == [[7, 0, 0, 0], [7, 7, 0, 0], [-7, -7, -7, 0]]
    assert x.tolist() == [7, 7, 7, 0]


def test_the_condition_of_a_loop_returns_one_value():
    def program(x):
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + 1), (torch.tensor(0), x))

    assert torch.compile(program, backend="fxpasses")(torch.zeros(2))[1].tolist() == [3.0, 3.0]


def test_symbolic_sizes():
    compiled = torch.compile(lambda x: (x * 1, x + 0), backend="fxpasses", dynamic=True)
    for size in (3, 5):
        x = torch.ones(size)
        assert storages(x, compiled(x)) == [0, 1, 2]


def test_a_write_behind_a_graph_stays_out_of_its_input():
    @torch.compile(backend="fxpasses")
    def program(x):
        y = x * 1
        torch._dynamo.graph_break()
        y.add_(x)
        torch._dynamo.graph_break()
        return y + x

    x = torch.ones(4)
    assert program(x).tolist() == [3.0] * 4
    assert x.tolist() == [1.0] * 4


@pytest.mark.parametrize("copy", [lambda x: x * 1, torch.clone], ids=["product", "clone"])
def test_what_a_gradient_needs_is_kept_from_a_later_write(copy):
    def program(state, weight):
        result = (weight * copy(state)).sum()
        state.add_(1)
        return result

    gradients = []
    for run in (program, torch.compile(program, backend="fxpasses")):
        weight = torch.ones(4, requires_grad=True)
        run(torch.arange(4.0), weight).backward()
        gradients.append(weight.grad.tolist())
    assert gradients[0] == gradients[1] == [0.0, 1.0, 2.0, 3.0]


def test_passes_that_the_user_gives_inductor_run_too():
    seen = []
    options = {"inductor": {"post_grad_custom_post_pass": seen.append, "fx_graph_cache": False}}
    compiled = torch.compile(lambda x: x * 1, backend="fxpasses", options=options)
    x = torch.ones(4)
    assert storages(x, [compiled(x)]) == [0, 1]
    assert len(seen) == 1


@pytest.mark.parametrize("gradients", [False, True])
def test_a_value_and_its_copy_from_a_layer_that_is_compiled_once(gradients):
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4)).requires_grad_(gradients)

    def program(x):
        values = []
        for layer in layers:
            x = x + layer(x).tanh().sin()
            values += [x.detach(), x * 1]
        return values

    x = torch.randn(2, 4)
    before = stats().regions
    values = torch.compile(program, backend="fxpasses", options={"regions": "always", "cache": "off"})(x)
    assert stats().regions > before
    assert storages(x, values) == storages(x, program(x))
