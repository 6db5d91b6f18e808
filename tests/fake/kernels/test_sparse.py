"""Sparse tensors made and multiplied in the mode."""

import pytest
import torch

import fake


def coo():
    return torch.sparse_coo_tensor(torch.zeros(2, 3, dtype=torch.int64), torch.ones(3), (4, 5))


MADE = {
    "csr": lambda: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2), (2, 2)
    ),
    "csc": lambda: torch.sparse_csc_tensor(
        torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2), (2, 2)
    ),
    "bsr": lambda: torch.sparse_bsr_tensor(
        torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2, 2, 2), (4, 4)
    ),
    "compressed, another dtype": lambda: torch.sparse_compressed_tensor(
        torch.tensor([0, 1, 2]),
        torch.tensor([0, 1]),
        torch.ones(2),
        (2, 2),
        dtype=torch.float64,
        layout=torch.sparse_csr,
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_compressed_tensors_are_made(name):
    expected = MADE[name]()
    values = expected.values().shape
    with fake.FakeTensorMode() as mode:
        made = MADE[name]()
        assert made.fake_mode is mode
        assert (made.layout, made.shape, made.dtype, made.device) == (
            expected.layout, expected.shape, expected.dtype, expected.device,
        )  # fmt: skip
        assert made.values().shape == values
        assert made.to_dense().shape == expected.shape


def test_a_size_that_indices_decide_is_data_dependent():
    with fake.FakeTensorMode(), pytest.raises(fake.DynamicOutputShapeException):
        torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2))


PRODUCTS = {
    "mm": lambda: torch.mm(coo(), torch.ones(5, 3)),
    "sparse.mm": lambda: torch.sparse.mm(coo(), torch.ones(3, 5).t()),
    "sparse.addmm": lambda: torch.sparse.addmm(torch.ones(4, 3), coo(), torch.ones(5, 3)),
    "dense by sparse": lambda: torch.ones(3, 4) @ coo(),
    "csr by dense": lambda: MADE["csr"]() @ torch.ones(3, 2).t(),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    expected = PRODUCTS[name]()
    with fake.FakeTensorMode():
        result = PRODUCTS[name]()
    assert (result.layout, result.shape, result.stride(), result.dtype) == (
        expected.layout, expected.shape, expected.stride(), expected.dtype,
    )  # fmt: skip


@pytest.mark.parametrize("other", [(3, 3), (5, 3)], ids=["sizes", "dtypes"])
def test_products_that_eager_refuses(other):
    with pytest.raises(RuntimeError):
        torch.mm(coo(), torch.ones(other, dtype=torch.float64))
    with fake.FakeTensorMode(), pytest.raises(RuntimeError, match="aten::mm"):
        torch.mm(coo(), torch.ones(other, dtype=torch.float64))


def test_loops_need_no_shape_environment():
    from torch._higher_order_ops.while_loop import while_loop

    with fake.FakeTensorMode() as mode:
        count, x = while_loop(
            lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), torch.ones(3, 2))
        )
    assert (count.shape, count.dtype, x.shape) == ((), torch.int64, (3, 2))
    assert mode.shape_env is None
