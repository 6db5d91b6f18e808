"""What eager refuses, the mode refuses, with an error of eager's type that names the operator and the argument."""

import pytest
import torch

import fake
from fake.cache.recipe import Apart
from fake.dispatch.refusals import functional_of_in_place
from fake.kernels.dtypes import refusal
from fake.kernels.overlaps import may_overlap
from fake.kernels.trials import trial_of
from fake.mode import ENGINE

aten = torch.ops.aten
ones, zeros = torch.ones, torch.zeros
long = torch.int64


def row() -> torch.Tensor:
    """Three elements that are one."""
    return ones(1).expand(3)


def index(*values: int) -> torch.Tensor:
    return zeros(len(values), dtype=long)


REFUSED_BY_KERNELS = {
    "an index of floats": lambda: torch.nn.functional.embedding(ones(2), ones(4, 3)),
    "dtypes that must agree": lambda: torch.mm(ones(2, 3), ones(3, 2, dtype=long)),
    "also of empty tensors": lambda: torch.mm(ones(0, 3), ones(3, 2, dtype=long)),
    "in a composite operator": lambda: torch.nn.functional.linear(ones(3, 2), ones(4, 2, dtype=long)),
    "a dtype without a kernel": lambda: torch.lgamma(ones(2, dtype=torch.complex64)),
    "a promoted dtype without a kernel": lambda: torch.remainder(ones(2), 1j),
    "a number that promotes": lambda: torch.bitwise_and(ones(2, dtype=long), 2.5),
    "writing twice": lambda: row().add_(1),
    "writing a product twice": lambda: ones(1, 1).expand(3, 3).addmm_(ones(3, 3), ones(3, 3)),
    "writing twice to out": lambda: torch.add(ones(3), 1, out=row()),
    "random numbers written twice": lambda: row().normal_(),
    "out of indices of another dtype": lambda: torch.max(ones(2, 2), 0, out=(ones(2), ones(2))),
    "out of a matrix of another dtype": lambda: torch.linalg.inv(torch.eye(2), out=torch.eye(2, dtype=long)),
    "samples without a kernel": lambda: torch.grid_sampler_2d(
        ones(1, 1, 2, 2, dtype=long), ones(1, 2, 2, 2), 0, 0, False
    ),
}

REFUSED = {
    "an index that is none": lambda: ones(3).gather(0, ones(3)),
    "out of another dtype": lambda: torch.mm(ones(2, 2), ones(2, 2), out=ones(2, 2, dtype=torch.float64)),
    "in place, a result that cannot be cast": lambda: ones(2, dtype=long).add_(ones(2)),
    "in place, a result of another shape": lambda: ones(3).bitwise_and_(ones(2, 3)),
    "in place, an index of another size": lambda: ones(3, 3).index_reduce_(0, index(0), ones(2, 3), "amax"),
    "a stride out of bounds": lambda: ones(4).as_strided((3,), (2,)),
    "an index into nothing": lambda: zeros(3, 0).gather(1, zeros(3, 1, dtype=long)),
    "values that do not fit indices": lambda: ones(4).index_put((index(0, 1),), ones(3)),
    "too many indices": lambda: ones(4)[index(0), index(0)],
    "a mask of another shape": lambda: ones(4).index_put((ones(3) > 0,), ones(())),
    "a slice of another size": lambda: ones(4).slice_scatter(ones(3), 0, 0, 2),
    "a diagonal of another size": lambda: ones(4, 4).diagonal_scatter(ones(3)),
    "a number out of range": lambda: torch.full((2,), 300, dtype=torch.uint8),
    "a complex number for a real result": lambda: torch.addmm(ones(2, 2), ones(2, 2), ones(2, 2), alpha=1j),
    "no boundaries": lambda: torch.bucketize(ones(2), ones(2, 2)),
    "the extreme of nothing": lambda: zeros(0).max(),
    "a difference of flags": lambda: ones(2).bool() - ones(2).bool(),
    "a deviation of integers": lambda: ones(2, dtype=long).std(),
    "a dimension that is not there": lambda: ones(2).sort(3),
    "a stride to the front": lambda: torch.empty_strided((2, 2), (-2, 1)),
    "in place, an index into nothing": lambda: zeros(0, 3).scatter_(0, zeros(1, 3, dtype=long), 1.0),
    "in place, a product of another rank": lambda: ones(1, 2, 2).addmm_(ones(2, 2), ones(2, 2)),
    "samples of nothing": lambda: torch.grid_sampler_2d(ones(1, 1, 2, 0), ones(1, 2, 2, 2), 0, 0, False),
    "samples of another rank": lambda: torch.grid_sampler_3d(ones(1, 1, 2, 2), ones(1, 2, 2, 2), 0, 0, False),
    "no channels to normalize": lambda: torch.native_batch_norm(ones(3), *[None] * 4, True, 0.1, 1e-5),
    "a sparse product of dtypes": lambda: torch.sparse.sampled_addmm(
        torch.eye(2).to_sparse_csr(), ones(2, 2), torch.eye(2, dtype=torch.float64)
    ),
    "an order of complex numbers": lambda: torch.aminmax(ones((), dtype=torch.complex64), dim=0),
    "out of complex numbers of another size": lambda: torch.complex(
        ones(2), ones(2), out=ones(2, dtype=torch.complex128)
    ),
    "targets of another size": lambda: torch.nn.functional.nll_loss(
        ones(1, 2, 3, 3), zeros(1, 3, 2, dtype=long)
    ),
    "blocks that do not fill an image": lambda: torch.pixel_unshuffle(ones(1, 1, 0, 3), 2),
    "a copy into nothing": lambda: zeros(0, 2).index_copy(0, index(0), ones(1, 2)),
    "a negative number of repeats": lambda: ones(2, 3).repeat(-1, 2),
    "a second dimension of a scalar": lambda: ones(()).cummax(1),
    "a huge dimension of a scalar": lambda: ones(()).cummin(2**31),
    "no pivots on the CPU": lambda: torch.linalg.lu_factor(torch.eye(2), pivot=False),
    "no pivots on the CPU, in three parts": lambda: torch.linalg.lu(torch.eye(2), pivot=False),
    "a convolution with nothing": lambda: torch.conv1d(ones(1, 1, 4), ones(1, 1, 0)),
    "a dilated convolution of integers, after a plain one": lambda: [
        torch.conv1d(ones(1, 1, 4, dtype=torch.int32), ones(1, 1, 2, dtype=torch.int32), dilation=dilation)
        for dilation in (1, 2)
    ],
}


def assert_refused_as_in_eager(call):
    with pytest.raises(Exception) as expected:
        call()
    with fake.FakeTensorMode(), pytest.raises(expected.type):
        call()


@pytest.mark.parametrize("name", REFUSED)
def test_checks(name):
    assert_refused_as_in_eager(REFUSED[name])


@pytest.mark.parametrize("name", REFUSED_BY_KERNELS)
def test_what_kernels_refuse(name):
    assert_refused_as_in_eager(REFUSED_BY_KERNELS[name])


def test_an_error_names_operator_and_argument():
    with (
        fake.FakeTensorMode(),
        pytest.raises(
            RuntimeError, match=r"aten\.mm.*float32 \(self\), int64 \(mat2\); it takes self as int64"
        ),
    ):
        torch.mm(ones(2, 3), ones(3, 2, dtype=long))


TAKEN = {
    "nothing to roll": lambda: zeros(0, 3).roll(1, 5),
    "nothing to repeat": lambda: zeros(0, 3).repeat(-2, 1),
    "a mode that is none": lambda: torch.grid_sampler_2d(ones(1, 1, 2, 2), ones(1, 2, 2, 2), 9, 9, False),
    "a stride that is not used": lambda: torch.empty_strided((1, 2), (-5, 1)),
    "out that can hold the result": lambda: torch.add(ones(2), 1, out=ones(2, dtype=torch.float64)),
    "a target in a vector": lambda: torch.nn.functional.nll_loss(ones(3), index(1)),
    "bytes as a condition": lambda: torch.where(ones(2).bool(), ones(2), ones(2, dtype=long)),
    "a mix that promotes": lambda: torch.add(ones(2, dtype=long), ones(2, dtype=torch.complex64)),
    "an empty product": lambda: torch.mm(ones(0, 3), ones(3, 2)),
    "random integers' template": lambda: torch.rand_like(ones(2, dtype=long), dtype=torch.float32),
    "negative numbers for bytes": lambda: torch.full((2,), -1, dtype=torch.uint8),
    "clamping bytes by a float": lambda: ones(2, dtype=torch.uint8).clamp(300, 1.0),
    "the same tensor in and out": lambda: torch.add(*(x := ones(3), x), out=x),
    "filling one element": lambda: row().fill_(1),
    "out that is larger": lambda: torch.exp(zeros(2), out=zeros(0)),
    "flags as bytes": lambda: torch.all(ones(3), out=zeros((), dtype=torch.uint8)),
    "many decimals": lambda: torch.round(ones(2), decimals=100),
    "no images": lambda: torch.nn.functional.max_pool2d(zeros(0, 3, 8, 8), 2),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_eager_takes_is_taken(name):
    expected = TAKEN[name]()
    for _ in range(2):  # fresh and cached
        with fake.FakeTensorMode():
            actual = TAKEN[name]()
        assert (actual.shape, actual.dtype, actual.stride()) == (
            expected.shape,
            expected.dtype,
            expected.stride(),
        )


def test_tensors_on_another_device_are_not_judged_by_cpu_kernels():
    with fake.FakeTensorMode():
        assert torch.lgamma(ones(2, dtype=torch.complex64, device="meta")).dtype is torch.complex64
        assert ones(2, device="cuda", dtype=torch.complex64).lgamma().device.type == "cuda"


def test_decompositions_may_use_what_eager_has_no_kernel_for():
    """Inside a dispatch there is no user: torch's decomposition of batch norm copies into an expanded tensor."""
    x = ones(1, 3, 1).expand(2, 3, 4)
    stats = ones(1).expand(3), ones(1).expand(3)
    expected = aten.native_batch_norm(x, None, None, *stats, False, 0.1, 1e-5)
    with fake.FakeTensorMode() as mode:
        given = mode.from_tensor(x), tuple(mode.from_tensor(s) for s in stats)
        actual = aten.native_batch_norm(given[0], None, None, *given[1], False, 0.1, 1e-5)
    assert [t.shape for t in actual] == [t.shape for t in expected]


class TestOverlaps:
    """Two tensors on one storage have the same metadata as two that are not: no key tells them apart."""

    def test_a_cached_call_refuses_an_overlap(self):
        with fake.FakeTensorMode():
            fake.cache_clear()
            a, b, room = ones(4), ones(5)[1:], ones(5)
            for _ in range(2):
                a.add_(b)
            with pytest.raises(RuntimeError, match="single memory location"):
                room[:-1].add_(room[1:])

    def test_and_serves_others_afterwards(self):
        with fake.FakeTensorMode():
            fake.cache_clear()
            room = ones(5)
            with pytest.raises(RuntimeError, match="single memory location"):
                room[:-1].add_(room[1:])
            left, right = ones(5)[:-1], ones(5)[1:]
            assert left.add_(right) is left
            hits = fake.cache_info().hits
            assert left.add_(right) is left
            assert fake.cache_info().hits == hits + 1

    def test_equal_metadata_is_not_watched(self):
        with fake.FakeTensorMode():
            fake.cache_clear()
            a, b = ones(4), ones(4)
            a.add_(b)
            (recipe,) = ENGINE.store.new_recipes[aten.add_.Tensor].values()
            assert not isinstance(recipe, Apart)
            a.add_(a)

    def test_ranges(self):
        whole, left, right = ((2, 3), (3, 1), 0, 4), ((3,), (1,), 0, 4), ((3,), (1,), 3, 4)
        assert may_overlap(whole, left)
        assert not may_overlap(left, right)
        assert may_overlap(((3, 3), (3, 1), 0, 4), ((3, 3), (1, 3), 0, 4))
        assert not may_overlap(((3,), (2,), 0, 4), left)  # too hard to tell


def test_asking_leaves_no_trace():
    """Random numbers are drawn as if nobody had asked, modes see nothing, and tensors on another device are not judged."""
    wrong = (ones(2, 2), ones(2, 2, dtype=long))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with torch.overrides.BaseTorchFunctionMode(), torch.device("meta"), torch.autocast("cpu"):
        assert isinstance(refusal(aten.mm.default, wrong, {}), RuntimeError)
        assert refusal(aten.bernoulli.default, (ones(4),), {}) is None
    assert torch.rand(3).equal(expected)
    assert refusal(aten.mm.default, (wrong[0], wrong[1].to("meta")), {}) is None


def test_sizes_of_a_trial_are_small_and_equal_ones_stay_equal():
    big = torch.empty(50_000, 1).expand(50_000, 70_000)
    trial = trial_of(aten.mm.default, (big, big.t()), {})
    assert trial.values["self"].shape == trial.values["mat2"].shape == (8, 8)
    ints = torch.empty(50_000, 1, dtype=long).expand(50_000, 70_000)
    assert refusal(aten.mm.default, (big, ints.t()), {}) is not None
    assert refusal(aten.arange.default, (10**12,), {"dtype": torch.bool}) is not None


def test_functional_forms():
    assert functional_of_in_place(aten.index_put_.default) is aten.index_put.default
    for func in (aten.copy_.default, aten.normal_.default, aten.t_.default, aten.add.Tensor):
        assert functional_of_in_place(func) is None


MORE_WRONG_CALLS = {
    "float out of range of unsigned": lambda: torch.zeros(3, dtype=torch.uint8).index_fill(0, _place(), -3.0),
    "nothing to draw": lambda: torch.randint_like(torch.zeros(3), 5, 5),
    "too much to draw": lambda: torch.randint(0, 300, (2,), dtype=torch.uint8),
    "too little to draw": lambda: torch.randint_like(torch.zeros(3), -1, 2, dtype=torch.uint8),
    "flags to draw": lambda: torch.zeros(3, dtype=torch.bool).random_(3),
    "weights of wrong dtypes": lambda: torch.cov(torch.rand(3, 4), fweights=torch.ones(4)),
    "importances of wrong dtypes": lambda: torch.cov(torch.rand(3, 4), aweights=torch.ones(4, dtype=long)),
    "no probabilities": lambda: torch.ops.aten._ctc_loss(
        torch.rand(4, 1, 0), torch.ones(1, 2, dtype=long), [4], [1]
    ),
    "complex beta": lambda: torch.nn.functional.softplus(torch.zeros(3), 1 + 1j),
    "inverse of integers": lambda: torch.cholesky_inverse(torch.eye(2, dtype=torch.int64)),
    "distances of half": lambda: torch.nn.functional.pdist(torch.ones(3, 2, dtype=torch.half)),
    "target adds a dimension": lambda: torch.nn.functional.soft_margin_loss(torch.rand(5), torch.rand(1, 5)),
    "no rows to embed": lambda: torch.nn.functional.embedding_bag(_place()[None], torch.rand(0, 3)),
    "transposed 3D bias": lambda: torch.nn.functional.conv_transpose3d(
        torch.rand(1, 1, 3, 3, 3), torch.rand(1, 2, 2, 2, 2), torch.ones(2, dtype=torch.int64)
    ),
    "complex bias": lambda: torch.nn.functional.conv_transpose1d(
        torch.rand(1, 1, 3), torch.rand(1, 2, 2), torch.ones(2, dtype=torch.complex64)
    ),
    "targets of one sample": lambda: torch.nn.functional.multilabel_margin_loss(
        torch.rand(3), torch.zeros(1, 3, dtype=torch.int64)
    ),
    "targets of another dtype": lambda: torch.nn.functional.multilabel_margin_loss(
        torch.rand(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.uint8)
    ),
}

MORE_RIGHT_CALLS = {
    "as much as can be held": lambda: torch.randint(0, 256, (2,), dtype=torch.uint8),
    "flags of bytes": lambda: torch.where(torch.ones(3, dtype=torch.uint8), torch.rand(3, 3).t(), 1.0),
    "the default dtype": lambda: torch.randint(2**40, (2,)),
    "flags": lambda: torch.zeros(3, dtype=torch.bool).random_(2),
    "halves": lambda: torch.randint_like(torch.zeros(3), 65505, dtype=torch.half),
    "both weights": lambda: torch.cov(
        torch.rand(3, 4), fweights=torch.ones(4, dtype=long), aweights=torch.ones(4)
    ),
    "integer wraps around": lambda: torch.zeros(3, dtype=torch.uint8).index_fill(0, _place(), -3),
    "one row has no distances": lambda: torch.nn.functional.pdist(torch.ones(1, 2, dtype=torch.half)),
    "target expands": lambda: torch.nn.functional.soft_margin_loss(torch.rand(5), torch.rand(1)),
    "bias added in place": lambda: torch.nn.functional.conv_transpose1d(
        torch.rand(1, 1, 3), torch.rand(1, 2, 2), torch.ones(2, dtype=torch.int64)
    ),
    "one class": lambda: torch.nn.functional.multilabel_margin_loss(torch.rand(1), torch.tensor(0)),
}


def _place():
    return torch.tensor([0])


@pytest.mark.parametrize("name", MORE_WRONG_CALLS)
def test_checks_that_kernels_make(name):
    with pytest.raises((RuntimeError, IndexError)) as refused:
        MORE_WRONG_CALLS[name]()
    with fake.FakeTensorMode(), pytest.raises(refused.type):
        MORE_WRONG_CALLS[name]()


@pytest.mark.parametrize("name", MORE_RIGHT_CALLS)
def test_near_those_checks(name):
    expected = MORE_RIGHT_CALLS[name]()
    with fake.FakeTensorMode():
        result = MORE_RIGHT_CALLS[name]()
    assert (result.shape, result.dtype, result.stride()) == (
        expected.shape,
        expected.dtype,
        expected.stride(),
    )


def test_products_of_sparse_matrices_that_reduce():
    sparse = torch.eye(3).to_sparse_csr()
    mode = fake.FakeTensorMode()
    fake_sparse = mode.from_tensor(sparse)
    for other, reduce in (
        (torch.rand(3, 2).double(), "sum"),
        (torch.rand(4, 2), "sum"),
        (torch.rand(1, 3, 2), "sum"),
        (torch.rand(3, 2), "middle"),
    ):
        with pytest.raises(RuntimeError):
            torch.sparse.mm(sparse, other, reduce)
        with mode, pytest.raises(RuntimeError, match="_sparse_mm_reduce_impl"):
            torch.sparse.mm(fake_sparse, mode.from_tensor(other), reduce)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.addmm(torch.ones(2, 3), torch.ones(()), torch.ones(2, 3)),
        lambda: torch.multinomial(torch.ones(()), 3),
        lambda: torch.nn.functional.ctc_loss(
            torch.ones(5, 2, 3), torch.zeros((), dtype=torch.long), [5] * 2, [1] * 2
        ),
        lambda: torch.nn.functional.conv1d(torch.ones(1, 3, 4), torch.ones(()), torch.ones(3)),
    ],
)
def test_a_missing_dimension_is_an_error_of_eagers_type(call):
    with pytest.raises(RuntimeError):
        call()
    with fake.FakeTensorMode(), pytest.raises(RuntimeError, match="aten"):
        call()
