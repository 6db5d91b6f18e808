"""Calls at the edges of dtypes and sizes: what eager takes the mode takes, with eager's layout; what it refuses is refused."""

import pytest
import torch
import torch.nn.functional as F

import fake

NUMBERS = [
    True,
    2,
    -1,
    128,
    300,
    65504,
    65505,
    1e5,
    2**31,
    2**40,
    2**63 - 1,
    -(2**63),
    3.4e38,
    1e39,
    1e308,
    1j,
    2 + 0j,
]
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.complex32,
    torch.complex64,
]


def zeros(dtype, *sizes):
    return torch.zeros(sizes or (3,), dtype=dtype)


def attention(query, mask):
    return F.scaled_dot_product_attention(
        torch.ones(query), torch.ones(2, 5, 4), torch.ones(2, 5, 4), torch.ones(mask)
    )


WITH_A_NUMBER = {
    "where": lambda d, n: torch.where(zeros(torch.bool), zeros(d), n),
    "where, first": lambda d, n: torch.where(zeros(torch.bool), n, zeros(d)),
    "scalar_tensor": lambda d, n: torch.scalar_tensor(n, dtype=d),
    "full": lambda d, n: torch.full((2,), n, dtype=d),
    "full_like": lambda d, n: torch.full_like(zeros(d), n),
    "clamp": lambda d, n: torch.clamp(zeros(d), max=n),
    "clamp_min": lambda d, n: zeros(d).clamp_min(n),
    "fill_": lambda d, n: zeros(d).fill_(n),
    "masked_fill": lambda d, n: zeros(d).masked_fill(zeros(torch.bool), n),
    "index_fill": lambda d, n: zeros(d).index_fill(0, zeros(torch.int64), n),
    "lerp": lambda d, n: torch.lerp(zeros(d), zeros(d), n),
    "lerp_": lambda d, n: zeros(d).lerp_(zeros(d), n),
    "addcmul": lambda d, n: torch.addcmul(zeros(d), zeros(d), zeros(d), value=n),
    "add": lambda d, n: torch.add(zeros(d), zeros(d), alpha=n),
    "sub": lambda d, n: torch.sub(zeros(d), zeros(d), alpha=n),
    "addmm": lambda d, n: torch.addmm(zeros(d, 2, 2), zeros(d, 2, 2), zeros(d, 2, 2), beta=n),
    "baddbmm": lambda d, n: torch.baddbmm(zeros(d, 1, 2, 2), zeros(d, 1, 2, 2), zeros(d, 1, 2, 2), alpha=n),
}


def outcome(call):
    try:
        made = call()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return "refused"
    made = made if isinstance(made, tuple) else (made,)
    return [(t.shape, t.stride(), t.dtype) for t in made]


@pytest.mark.parametrize("name", WITH_A_NUMBER)
def test_numbers_at_the_edge_of_a_dtype(name):
    call, seen = WITH_A_NUMBER[name], set()
    for dtype in [d for d in DTYPES if "lerp" not in name or d.is_floating_point or d.is_complex]:
        for number in (*NUMBERS, 2**63):
            expected = outcome(lambda: call(dtype, number))  # noqa: B023 - called at once
            with fake.FakeTensorMode():
                assert outcome(lambda: call(dtype, number)) == expected, (dtype, number)  # noqa: B023
            seen.add(expected == "refused")
    assert seen == {True, False}


ACCEPTED = {
    "a truth value to the power of one": lambda: zeros(torch.bool) ** True,
    "in place": lambda: zeros(torch.bool).pow_(False),
    "in other strides": lambda: zeros(torch.bool, 2, 3).t() ** True,
    "a pool over no images": lambda: F.max_pool2d(zeros(torch.float32, 0, 3, 4, 4), 2, return_indices=True),
    "digits beyond all numbers": lambda: zeros(torch.float32, 4, 3).t().round(decimals=400),
    "a truth value shifted": lambda: zeros(torch.bool) << 2,
    "to the right": lambda: zeros(torch.bool, 2, 3).t() >> 1,
    "no labels": lambda: F.cross_entropy(zeros(torch.float32, 0, 3), zeros(torch.int64, 0)),
    "no labels, summed": lambda: F.nll_loss(zeros(torch.half, 0, 3), zeros(torch.int64, 0), reduction="sum"),
    "a number that decides the dtype": lambda: tuple(torch.full((2,), n) for n in (1 + 0j, 2, True, 0.5)),
    "a complex number in a mask": lambda: zeros(torch.bool).masked_fill(zeros(torch.bool), 2j),
    "a complex tensor in a mask": lambda: zeros(torch.half).masked_fill(
        zeros(torch.bool), torch.ones((), dtype=torch.complex32)
    ),
    "places in the rest of the storage": lambda: torch.ones(3, 3)[:1].as_strided_scatter(
        torch.ones(2, 2), (2, 2), (1, 2)
    ),
    "places in a copy of one row": lambda: (
        torch.ones(3).expand(3, 3).as_strided_scatter(torch.ones(2, 2), (2, 2), (1, 2))
    ),
    "no places that are one": lambda: torch.ones(3, 3).as_strided_scatter(torch.ones(2, 0), (2, 0), (0, 1)),
    "something added to nothing": lambda: zeros(torch.float32, 5, 0).index_add(
        -1, zeros(torch.int64, 5), torch.ones(5, 5)
    ),
    "in place to nothing": lambda: zeros(torch.float32, 5, 0).index_add_(
        -1, zeros(torch.int64, 5), torch.ones(5, 5)
    ),
    "no normal integers": lambda: torch.randn_like(zeros(torch.int32, 5, 0).t()),
    "no normal integers of a dtype": lambda: torch.randn_like(zeros(torch.half, 0), dtype=torch.bool),
    "bounds that are cut": lambda: F.hardtanh(zeros(torch.uint8), -0.5, 0.5),
    "means and deviations of two dtypes": lambda: torch.normal(zeros(torch.half), torch.ones(3)),
    "no labels, smoothed": lambda: F.cross_entropy(
        zeros(torch.float32, 0, 3), zeros(torch.int64, 0), label_smoothing=0.1
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_eager_takes(name):
    expected = outcome(ACCEPTED[name])
    assert expected != "refused"
    with fake.FakeTensorMode():
        assert outcome(ACCEPTED[name]) == expected


FLOATING = {
    "hardtanh": lambda d, n: torch.ops.aten.hardtanh(zeros(d), -1, n),
    "leaky_relu": lambda d, n: torch.ops.aten.leaky_relu(zeros(d), n),
    "softshrink": lambda d, n: torch.ops.aten.softshrink(zeros(d), n),
    "clamp": lambda d, n: torch.ops.aten.clamp(zeros(d), None, n),
    "index_add": lambda d, n: zeros(d).index_add(0, zeros(torch.int64), zeros(d), alpha=n),
    "histc": lambda d, n: torch.ops.aten.histc(zeros(d), 3, -1, n),
    "uniform_": lambda d, n: zeros(d).uniform_(0, n),
    "uniform_ from": lambda d, n: zeros(d).uniform_(n, 1),
    "linspace": lambda d, n: torch.ops.aten.linspace(0, n, 3, dtype=d),
    "logspace, one step": lambda d, n: torch.ops.aten.logspace(n, 1, 1, dtype=d),
}
"""What the numbers may be besides; ``clamp`` takes a complex one for a tensor of real numbers only."""


@pytest.mark.parametrize("name", FLOATING)
def test_numbers_that_are_not_finite_or_out_of_order(name):
    call, seen = FLOATING[name], set()
    for dtype in (
        (torch.float32, torch.int64) if name in ("clamp", "index_add", "linspace") else (torch.float32,)
    ):
        for number in (
            0,
            -1,
            0.5,
            2 + 0j,
            2 + 1j,
            1e39,
            float("inf"),
            float("-inf"),
            float("nan"),
            2**40,
            100,
        ):
            expected = outcome(lambda: call(dtype, number))  # noqa: B023 - called at once
            with fake.FakeTensorMode():
                assert outcome(lambda: call(dtype, number)) == expected, (dtype, number)  # noqa: B023
            seen.add(expected == "refused")
    assert seen == {True, False}


REFUSED = {
    "no dilation": lambda: F.conv3d(torch.ones(1, 1, 4, 4, 4), torch.ones(1, 1, 1, 1, 1), dilation=0),
    "no groups": lambda: torch.native_group_norm(torch.ones(1, 4, 2), None, None, 1, 4, 2, 0, 1e-5),
    "other channels": lambda: torch.native_group_norm(torch.ones(1, 4, 2), None, None, 1, -4, 2, 1, 1e-5),
    "no samples": lambda: torch.multinomial(torch.ones(3), 0),
    "negative padding": lambda: F.unfold(torch.ones(1, 1, 4, 4), 2, padding=-1),
    "no factor": lambda: F.pixel_shuffle(torch.ones(1, 4, 2, 2), 0),
    "no dimension": lambda: torch.mvlgamma(torch.ones(3), 0),
    "more than the default dtype holds": lambda: torch.full((2,), 1e300),
    "more than an integer holds": lambda: torch.full((2,), 2**63),
    "dropout below zero": lambda: F.scaled_dot_product_attention(
        *[torch.ones(1, 1, 2, 8)] * 3, dropout_p=-0.1
    ),
    "another dtype on the way": lambda: torch.ops.aten._softmax(zeros(torch.half), 0, True),
    "gradients of another dtype": lambda: torch.ops.aten._softmax_backward_data(
        torch.ones(3), zeros(torch.half), 0, torch.float32
    ),
    "no bins": lambda: torch.histogramdd(torch.ones(4, 2), [0, 3]),
    "a range from right to left": lambda: torch.histogramdd(
        torch.ones(4, 2), [1, 1], range=[1.0, 0.0, 0.0, 1.0]
    ),
    "segments without a name": lambda: torch.segment_reduce(torch.ones(5), "bad", lengths=torch.tensor([5])),
    "segments across": lambda: torch.segment_reduce(
        torch.ones(2, 5), "max", lengths=torch.tensor([[5], [5]])
    ),
    "segments of integers": lambda: torch.segment_reduce(torch.arange(5), "sum", lengths=torch.tensor([5])),
    "segments of some length": lambda: torch.segment_reduce(
        torch.ones(1), "sum", lengths=torch.tensor([1.0])
    ),
    "no segments": lambda: torch.segment_reduce(torch.ones(0), "sum", lengths=zeros(torch.int64, 0)),
    "values of one dimension more": lambda: zeros(torch.float32, 5, 5).index_put(
        (zeros(torch.int64, 2),), torch.ones(1, 2, 5)
    ),
    "masked values of one dimension more": lambda: torch.ops.aten._unsafe_masked_index_put_accumulate(
        torch.ones(5), zeros(torch.bool, 1, 2), [zeros(torch.int64, 2)], torch.ones(2)
    ),
    "places that are one": lambda: torch.ones(3, 3).as_strided_scatter(torch.ones(2, 2), (2, 2), (1, 0)),
    "weights of one dimension more": lambda: F.binary_cross_entropy(
        torch.ones(3), torch.ones(3), torch.ones(1, 3)
    ),
    "positive weights of one dimension more": lambda: F.binary_cross_entropy_with_logits(
        torch.ones(3), torch.ones(3), pos_weight=torch.ones(1, 3)
    ),
    "a running mean that is no vector": lambda: F.batch_norm(
        torch.ones(2, 3), torch.ones(1, 3), torch.ones(3), training=True
    ),
    "fewer factors than reflectors": lambda: torch.ormqr(torch.ones(3, 3), torch.ones(2), torch.ones(3, 3)),
    "samples for another dimension": lambda: F.fractional_max_pool2d(
        torch.ones(1, 1, 8, 8), 2, 4, _random_samples=torch.zeros(1, 1, 3)
    ),
    "samples without a batch": lambda: F.fractional_max_pool3d(
        torch.ones(1, 1, 8, 8, 8), 2, 4, _random_samples=torch.zeros(1, 3)
    ),
    "a boundary that is a number": lambda: torch.searchsorted(torch.ones(()), torch.ones(3)),
    "targets of another dtype, backwards": lambda: torch.ops.aten.huber_loss_backward(
        torch.ones(3), torch.ones(3), zeros(torch.half), 0, 1.0
    ),
    "half precision beside pivots": lambda: torch.linalg.lu_solve(
        zeros(torch.half, 3, 3), torch.ones(3, dtype=torch.int32), zeros(torch.half, 3, 1)
    ),
    "half precision beside labels": lambda: F.multi_margin_loss(
        zeros(torch.half, 3, 5), zeros(torch.int64), weight=zeros(torch.half, 5)
    ),
    "a complex boundary": lambda: torch.bucketize(2 + 0j, torch.ones(3)),
    "groups of other numbers of channels": lambda: torch.native_group_norm(
        torch.ones(1, 4, 3), None, None, 1, 4, 3, 3, 1e-5
    ),
    "a mask of more queries": lambda: attention((2, 1, 4), (3, 5)),
    "a mask of more dimensions": lambda: attention((2, 3, 4), (1, 1, 1, 1, 5)),
    "rows of integers to pool": lambda: F.max_pool1d(zeros(torch.int64, 1, 4), 2),
    "matrices of sixteen bits to scale": lambda: torch._scaled_mm(
        zeros(torch.bfloat16, 4, 16), zeros(torch.float8_e4m3fn, 16, 16).t(), torch.ones(()), torch.ones(())
    ),
    "a dimension to narrow that is not there": lambda: torch.narrow_copy(torch.ones(3), 1, 0, 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses(name):
    assert outcome(REFUSED[name]) == "refused"
    with fake.FakeTensorMode():
        assert outcome(REFUSED[name]) == "refused"


ENDS_THE_PROCESS = {
    "'offsets' has no elements": lambda: F.embedding_bag(
        zeros(torch.int64), torch.ones(5, 5), zeros(torch.int64, 0), mode="max"
    ),
    "'LU_pivots' has 0 elements": lambda: torch.lu_unpack(torch.ones(3, 5), zeros(torch.int32, 0)),
    "'running_mean' has 0 elements": lambda: torch.native_batch_norm(
        torch.ones(2, 3, 4), None, None, torch.ones(0), torch.ones(3), True, 0.1, 1e-5
    ),
}


@pytest.mark.parametrize("message", ENDS_THE_PROCESS)
def test_what_ends_the_process_in_eager_is_refused(message):
    """And so would asking eager's kernel."""
    with fake.FakeTensorMode(), pytest.raises(RuntimeError, match=message):
        ENDS_THE_PROCESS[message]()


def image_loss(change):
    image = change(torch.ones(2, 3, 4, 4)).requires_grad_()
    loss = F.nll_loss(image, torch.zeros(2, *image.shape[2:], dtype=torch.int64))
    return torch.autograd.grad(loss, image)


OF_NOTHING = {
    "factors of two dtypes": lambda: torch.bmm(zeros(torch.half, 2, 0, 3), torch.ones(2, 3, 4)),
    "factors without a common size": lambda: zeros(torch.int64, 2, 3, 0) @ torch.ones(2, 0, 4),
    "factors and a sum of another dtype": lambda: torch.baddbmm(
        torch.ones(4), torch.ones(2, 3, 0), zeros(torch.float64, 2, 0, 4)
    ),
    "images to shuffle": lambda: F.pixel_unshuffle(torch.ones(0, 1, 6, 6), 3),
    "images to shuffle back": lambda: F.pixel_shuffle(torch.ones(0, 9, 2, 2), 3),
    "weights of a norm": lambda: torch.native_batch_norm(
        torch.ones(2, 3, 4), torch.ones(0), None, torch.ones(3), torch.ones(3), True, 0.1, 1e-5
    ),
    "bias of a norm": lambda: torch.native_batch_norm(
        torch.ones(2, 3, 4), torch.ones(3), torch.ones(0), torch.ones(3), torch.ones(3), False, 0.1, 1e-5
    ),
    "a mask for one query": lambda: attention((2, 1, 4), (1, 5)),
    "a mask for all batches": lambda: attention((3, 4), (2, 3, 5)),
}


@pytest.mark.parametrize("name", OF_NOTHING)
def test_what_eager_takes_of_nothing(name):
    expected = outcome(OF_NOTHING[name])
    assert expected != "refused"
    with fake.FakeTensorMode():
        assert outcome(OF_NOTHING[name]) == expected


AS_IN_EAGER = {
    "a mask of one dimension more": lambda: attention((2, 3, 4), (1, 1, 1, 5)),
    "groups with gaps": lambda: torch.native_group_norm(torch.ones(1, 2, 4).mT, None, None, 1, 4, 2, 2, 1e-5),
    "wide exponents": lambda: torch.frexp(torch.ones(3), out=(torch.ones(3), zeros(torch.int64))),
    "a bound below all": lambda: zeros(torch.uint8).clamp(max=-1),
    "labels of a channels-last image": lambda: image_loss(lambda x: x.to(memory_format=torch.channels_last)),
    "labels of an image with gaps": lambda: image_loss(lambda x: x[..., ::2].mT),
    "labels of an image": lambda: image_loss(lambda x: x[:, :, 1:]),
    "a volume like a channels-last image": lambda: F.max_pool3d(
        torch.ones(2, 5, 6, 3).permute(0, 3, 1, 2), 2
    ),
    "a volume": lambda: F.max_pool3d(torch.ones(2, 3, 5, 6), 2),
}
"""What some releases of torch refuse, or some layouts."""


@pytest.mark.parametrize("name", AS_IN_EAGER)
def test_what_some_releases_refuse(name):
    expected = outcome(AS_IN_EAGER[name])
    with fake.FakeTensorMode():
        assert outcome(AS_IN_EAGER[name]) == expected


VIEWS = {
    "view": lambda x: x.view(1, *x.shape),
    "flatten": lambda x: x.flatten(),
    "ravel": torch.ravel,
    "unflatten": lambda x: x.unflatten(-1, (1, -1, 1)),
    "unfold": lambda x: x.unfold(-1, 1, 1),
    "einsum": lambda x: torch.einsum("...i,ij->...j", x, torch.ones(x.shape[-1], 2)),
    "kron": lambda x: torch.kron(x, x),
    "rot90": torch.rot90,
    "back": lambda x: torch.rot90(x, 3, (1, 0)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_strides_where_a_size_is_one(name):
    """They say nothing, and are eager's all the same."""
    for shape, stride in (
        ((1, 3), (7, 1)),
        ((1, 1), (12, 12)),
        ((2, 1, 3), (3, 0, 1)),
        ((1, 2, 1), (1, 1, 2)),
    ):
        expected = outcome(lambda: VIEWS[name](torch.empty_strided(shape, stride)))  # noqa: B023 - called at once
        assert expected != "refused"
        with fake.FakeTensorMode():
            assert outcome(lambda: VIEWS[name](torch.empty_strided(shape, stride))) == expected, shape  # noqa: B023


def test_the_second_operand_of_rsub_decides_strides():
    """It is the first of the subtraction."""

    def call():
        return torch.rsub(torch.ones(3, 4).T, torch.ones(4, 3), alpha=2.5)

    with fake.FakeTensorMode():
        assert call().stride() == (3, 1)
    assert call().stride() == (3, 1)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_batch_norm_with_one_of_weight_and_bias(name):
    def call():
        given = [torch.ones(3) if name == "weight" else None, torch.ones(3) if name == "bias" else None]
        return torch.ops.aten._batch_norm_with_update(
            torch.ones(2, 3), *given, torch.zeros(3), torch.ones(3), 0.1, 1e-5
        )

    expected = outcome(call)
    assert expected != "refused"
    with fake.FakeTensorMode():
        assert outcome(call) == expected


ONE_EACH = {
    "legit": lambda x, *given: torch.ops.aten._native_batch_norm_legit(x, *given, True, 0.1, 1e-5),
    "native": lambda x, *given: torch.native_batch_norm(x, *given, True, 0.1, 1e-5),
    "with update": lambda x, *given: torch.ops.aten._batch_norm_with_update(x, *given, 0.1, 1e-5),
}


@pytest.mark.parametrize("name", ONE_EACH)
def test_batch_norm_of_one_element_for_each_channel(name):
    def call():
        return ONE_EACH[name](torch.ones(1, 3), None, None, torch.zeros(3), torch.ones(3))

    expected = outcome(call)
    assert expected != "refused"
    with fake.FakeTensorMode():
        assert outcome(call) == expected


KEEP_STRIDES = {
    "ones_like": torch.ones_like,
    "another dtype": lambda x: torch.zeros_like(x, dtype=torch.int64),
    "row-major": lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
    "randn_like": torch.randn_like,
    "flip": lambda x: x.flip(0),
    "sort": lambda x: tuple(x.sort(-1)),
    "nan_to_num": torch.nan_to_num,
    "relu": torch.relu,
    "masked_fill": lambda x: x.masked_fill(torch.ones_like(x, dtype=torch.bool), 1.0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
}


@pytest.mark.parametrize("name", KEEP_STRIDES)
def test_strides_of_sizes_of_one(name):
    for shape, strides in (
        ((1, 2), (1, 1)),
        ((2, 1), (1, 7)),
        ((2, 1, 3), (3, 9, 1)),
        ((2, 1, 3), (1, 9, 2)),
        ((2, 3), (1, 4)),
    ):

        def call():
            return KEEP_STRIDES[name](torch.empty_strided(shape, strides).fill_(1.0))  # noqa: B023 - called at once

        expected = outcome(call)
        assert expected != "refused"
        with fake.FakeTensorMode():
            assert outcome(call) == expected, (shape, strides)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((1, 3, 2, 2), (1, 1, 6, 3)),
        ((1, 3, 2, 2), (12, 4, 2, 1)),
        ((2, 3, 2, 2), (12, 1, 6, 3)),
        ((2, 1, 3, 3), (9, 1, 3, 1)),
        ((2, 3, 2, 2), (1, 2, 12, 6)),
        ((2, 4, 1, 1), (4, 1, 4, 4)),
        ((1, 2, 2, 3, 2), (1, 1, 12, 4, 2)),
        ((2, 3, 4), (1, 2, 6)),
        ((1, 2, 3, 1, 1), (7, 1, 2, 1, 1)),
        ((3, 2, 1, 3), (6, 1, 2, 2)),
        ((2, 3, 2, 1), (6, 1, 3, 12)),
    ],
)
def test_batch_norm_where_sizes_leave_strides_open(shape, stride, training):
    channels = shape[1]

    def call(wide=1):
        x = torch.empty_strided(shape, stride)
        mean, variance = zeros(torch.float32, channels * wide)[::wide], torch.ones(channels)
        x.requires_grad_()
        y = F.batch_norm(x, mean, variance, None, None, training)
        incoming = (
            torch.ones_like(y),
            torch.ones_like(x),
            torch.ones(()).expand(y.shape),
            torch.empty(y.shape),
        )
        return (y, *(torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in incoming))

    for wide in (1, 2):
        expected = outcome(lambda: call(wide))  # noqa: B023 - called at once
        assert expected != "refused"
        with fake.FakeTensorMode():
            assert outcome(lambda: call(wide)) == expected  # noqa: B023
