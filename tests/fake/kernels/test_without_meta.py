"""Operators that no entry of ``op_db`` reaches and no meta kernel answers: the same as eager, in all layouts."""

import pytest
import torch

import fake
from benchmarks.conformance.compare import Verdict, compare
from benchmarks.conformance.observe import observe

aten = torch.ops.aten

LAYOUTS = {
    "row-major": lambda: torch.rand(4, 6, 3),
    "column-major": lambda: torch.rand(3, 6, 4).permute(2, 1, 0),
    "gaps": lambda: torch.rand(8, 6, 3)[::2],
    "expanded": lambda: torch.rand(1, 6, 3).expand(4, 6, 3),
    "inner dimensions swapped": lambda: torch.rand(4, 3, 6).transpose(1, 2),
}


def qparams(count, dtype=torch.int32):
    return torch.ones(count), torch.zeros(count, dtype=dtype)


CALLS = {
    "fake_quantize": lambda x: aten.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 0, -128, 127),
    "fake_quantize channels": lambda x: aten.fake_quantize_per_channel_affine_cachemask(
        x, *qparams(6), 1, -128, 127
    ),
    "fake_quantize tensors": lambda x: aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
        x, *qparams(1), torch.ones(1, dtype=torch.int64), -128, 127
    ),
    "learnable": lambda x: aten._fake_quantize_learnable_per_tensor_affine(
        x, *qparams(1, torch.float32), -128, 127, 1.0
    ),
    "learnable channels": lambda x: aten._fake_quantize_learnable_per_channel_affine(
        x, *qparams(6, torch.float32), 1, -128, 127, 1.0
    ),
    "learnable backward": lambda x: aten._fake_quantize_learnable_per_tensor_affine_backward(
        torch.rand(4, 6, 3), x, *qparams(1, torch.float32), -128, 127, 1.0
    ),
    "learnable channels backward": lambda x: aten._fake_quantize_learnable_per_channel_affine_backward(
        torch.rand(4, 6, 3), x, *qparams(6, torch.float32), 1, -128, 127, 1.0
    ),
    "ctc": lambda x: aten._ctc_loss(x, _targets(x), [4] * 6, [1, 2] * 3),
    "ctc, targets in a row": lambda x: aten._ctc_loss(x, _targets(x).view(-1)[:9], [4] * 6, [1, 2] * 3),
    "ctc backward": lambda x: aten._ctc_loss_backward(
        torch.ones(6), x, _targets(x), [4] * 6, [1] * 6, *aten._ctc_loss(x, _targets(x), [4] * 6, [1] * 6), 0
    ),
    "dirichlet": lambda x: aten._sample_dirichlet(x),
    "dirichlet_grad": lambda x: aten._dirichlet_grad(x, x, x),
    "standard_gamma_grad": lambda x: aten._standard_gamma_grad(x, x),
    "binomial": lambda x: aten.binomial(x, x),
    "aminmax": lambda x: aten._aminmax(x),
    "masked_softmax": lambda x: aten._masked_softmax(
        x[None], torch.zeros(1, 4, 6, 3, dtype=torch.bool), 3, 2
    ),
    "masked_softmax backward": lambda x: aten._masked_softmax_backward(
        x, x, torch.zeros(4, 6, 3, dtype=torch.bool)
    ),
    "glu_jvp": lambda x: aten.glu_jvp(x[:, :3], x, x, 1),
    "glu_backward_jvp": lambda x: aten.glu_backward_jvp(x, x[:, :3], x, x[:, :3], x, 1),
    "logcumsumexp": lambda x: aten._logcumsumexp(x, 0),
    "batch_norm_update_stats": lambda x: aten.batch_norm_update_stats(x, torch.zeros(6), torch.ones(6), 0.1),
    "linear combination": lambda x: aten._compute_linear_combination(x, torch.rand(5, 4)),
    "add_relu": lambda x: aten._add_relu(x, 1),
    "slow_conv2d": lambda x: aten._slow_conv2d_forward(
        x[None], torch.rand(2, 4, 2, 2), [2, 2], None, [1, 1], [0, 0]
    ),
    "dilated2d": lambda x: aten.slow_conv_dilated2d(
        x[None], torch.rand(2, 4, 2, 2), [2, 2], None, [1, 1], [0, 0], [2, 1]
    ),
    "slow_conv3d": lambda x: aten.slow_conv3d_forward(
        x[None, None], torch.rand(2, 1, 2, 2, 2), [2, 2, 2], None, [2, 1, 1], [0, 1, 0]
    ),
    "dilated3d": lambda x: aten.slow_conv_dilated3d(
        x[None, None], torch.rand(2, 1, 2, 2, 2), [2, 2, 2], None, [1, 1, 1], [0, 0, 0]
    ),
    "transposed3d": lambda x: aten.slow_conv_transpose3d(
        x[None, None], torch.rand(1, 2, 2, 2, 2), [2, 2, 2], None
    ),
}


def _targets(x):
    return torch.ones(6, 2, dtype=torch.int64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_as_eager(name, layout):
    x = LAYOUTS[layout]()
    expected = observe(CALLS[name](x), (x,))
    with fake.FakeTensorMode() as mode:
        y = mode.from_tensor(x)
        for _ in range(2):
            assert compare(expected, observe(CALLS[name](y), (y,))).verdict is Verdict.OK


FUSED = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, fused=True),
    "adam, tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), fused=True, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, fused=True),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers(name):
    def train():
        layer = torch.nn.Linear(4, 3)
        optimizer = FUSED[name](layer.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return [(k, v.shape, v.dtype) for state in optimizer.state.values() for k, v in state.items()]

    with fake.FakeTensorMode():
        actual = train()
    assert actual == train()


def test_quantization_aware_training():
    def train():
        layer = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
        layer.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
        prepared = torch.ao.quantization.prepare_qat(layer.train())
        prepared(torch.ones(2, 4)).sum().backward()
        return [(n, p.shape, p.grad.stride()) for n, p in prepared.named_parameters()]

    with fake.FakeTensorMode():
        actual = train()
    assert actual == train()


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["one sequence", "two"])
def test_ctc_loss_with_lengths_that_are_numbers(batch, reduction, zero_infinity):
    def train():
        x = torch.rand(10, *batch, 5).requires_grad_()
        targets = torch.ones(*batch, 3, dtype=torch.int64)
        lengths = [10] * (batch or (1,))[0], [3] * (batch or (1,))[0]
        loss = torch.nn.functional.ctc_loss(
            x.log_softmax(-1), targets, *lengths, reduction=reduction, zero_infinity=zero_infinity
        )
        loss.sum().backward()
        return loss.shape, loss.stride(), loss.dtype, type(loss.grad_fn), x.grad.shape, x.grad.stride()

    expected = train()
    with fake.FakeTensorMode():
        assert train() == expected
        with torch.inference_mode():
            x, targets = torch.rand(10, 2, 5).log_softmax(-1), torch.ones(2, 3, dtype=torch.int64)
            assert torch.nn.functional.ctc_loss(x, targets, [10, 9], [3, 1]).shape == ()


@pytest.mark.parametrize(
    ("input_lengths", "target_lengths"),
    [([4] * 5, [1] * 6), ([5] * 6, [1] * 6), ([4] * 6, [3] * 6), ([4] * 6, [-1] * 6)],
)
def test_ctc_refuses_lengths_that_do_not_fit(input_lengths, target_lengths):
    x = torch.rand(4, 6, 3)
    with pytest.raises(RuntimeError):
        aten._ctc_loss(x, _targets(x), input_lengths, target_lengths)
    with fake.FakeTensorMode(), pytest.raises(RuntimeError, match="_ctc_loss"):
        aten._ctc_loss(torch.rand(4, 6, 3), _targets(x), input_lengths, target_lengths)
