import torch
from torch.nn import functional as F

from fxpasses.passes import IndexRanges
from tests.fxpasses.passes.support import Wrapped, assert_golden, assert_left_alone, assert_trains

PASS = IndexRanges()
TABLE = torch.linspace(-1, 1, 32).reshape(8, 4).requires_grad_()
X = torch.linspace(-1, 1, 40).reshape(2, 5, 4)


def positions(x, table):
    return x * F.embedding(torch.arange(x.shape[1]), table)


def test_golden():
    assert_golden(PASS, positions, X, TABLE)


def test_results_and_gradients():
    assert_trains(PASS, Wrapped(positions, TABLE), X)
    assert_trains(PASS, Wrapped(lambda x, t: x * t[torch.arange(2, 7)], TABLE), X)
    assert_trains(PASS, Wrapped(lambda x, t: x * F.embedding(torch.arange(5)[None] + 1, t), TABLE), X)


def test_gradients_stay_the_same_bit_by_bit():
    weight = torch.tensor([[-0.0, 1.0], [2.0, -0.0], [3.0, 4.0]], requires_grad=True)

    def f(weight):
        return F.embedding(torch.arange(2), weight).relu().sum()

    f(weight).backward()
    eager, weight.grad = weight.grad, None
    from fxpasses.backend import fxpasses as backend

    compiled = torch.compile(f, backend=backend, options={"passes": ["default", PASS], "compiler": "eager"})
    compiled(weight).backward()
    assert torch.equal(eager.signbit(), weight.grad.signbit())
    assert torch.equal(eager, weight.grad)


def test_left_alone():
    for f in (
        lambda x, t: x * F.embedding(torch.arange(5) * 2 % 8, t),  # a permutation
        lambda x, t: x * F.embedding(torch.arange(4, -1, -1), t),  # backwards
        lambda x, t: x * F.embedding((x[0, :, 0] > 0).long(), t),  # depends on the input
        lambda x, t: x * F.embedding(torch.arange(-1, 4) % 8, t),  # not consecutive
    ):
        assert_left_alone(PASS, f, X, TABLE)


def test_padding_index_keeps_its_scatter():
    # Row 2 gets no gradient.
    model = Wrapped(lambda x, t: x * F.embedding(torch.arange(5), t, padding_idx=2), TABLE)
    assert_trains(PASS, model, X)


def test_a_returned_lookup_is_no_view_of_the_table():
    assert_left_alone(PASS, lambda t: F.embedding(torch.arange(5), t), TABLE.detach())


def test_a_table_that_is_written_to_is_looked_up_before():
    def f(table):
        rows = F.embedding(torch.arange(5), table)
        table.mul_(2)
        return rows + 1

    model_table = TABLE.detach().clone()
    wanted = f(model_table.clone())
    from fxpasses.backend import fxpasses as backend

    compiled = torch.compile(f, backend=backend, options={"passes": ["default", PASS], "compiler": "eager"})
    assert torch.equal(compiled(model_table.clone()), wanted)
