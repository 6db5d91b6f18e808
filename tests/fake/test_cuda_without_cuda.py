"""Fake tensors on ``cuda`` where torch has no CUDA: what C++ code does before a dispatch mode hears of a call."""

import os
import subprocess
import sys

import pytest
import torch

import fake

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not fake.allow_cuda(),
    reason="for builds without CUDA, with a libc10 to look into",
)

CALLS = {
    "index": lambda x, device: x[0],
    "slice": lambda x, device: x[:, 1:],
    "index by a tensor": lambda x, device: x[torch.tensor([0, 1], device=device)],
    "masked fill": lambda x, device: x.masked_fill(x > 0, 1.0),
    "copy_": lambda x, device: x.copy_(x.cpu()),
    "setitem": lambda x, device: (x.__setitem__(0, 1.0), x)[1],
    "to": lambda x, device: x.cpu().to(device),
    "to, not blocking": lambda x, device: x.cpu().to(device, non_blocking=True),
    "view with a gradient": lambda x, device: x.requires_grad_().view(-1) * 2,
    "product with a gradient": lambda x, device: x.requires_grad_() @ x.t(),
    "dropout": lambda x, device: torch.nn.functional.dropout(x),
    "module": lambda x, device: torch.nn.Linear(3, 4).to(device)(x),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_on_the_cpu(name):
    expected = CALLS[name](torch.ones(2, 3), "cpu")
    with fake.FakeTensorMode():
        result = CALLS[name](torch.ones(2, 3, device="cuda"), "cuda")
        assert result.device == torch.device("cuda:0")
    assert (result.shape, result.stride(), result.requires_grad) == (
        expected.shape, expected.stride(), expected.requires_grad,
    )  # fmt: skip
    assert type(result) is fake.FakeTensor


def test_cuda_without_an_index_is_the_first():
    with fake.FakeTensorMode():
        assert torch.ones(2).cuda().device == torch.device("cuda:0")
        assert torch.ones(2).cuda("cuda:1").device == torch.device("cuda:1")
        assert torch.nn.Linear(2, 3).cuda().weight.device == torch.device("cuda:0")


@pytest.mark.slow
def test_a_graph_of_autograd_does_not_end_the_process():
    """Backward is torch's limit: its engine asks for streams of a real device. It says so; without a guard it aborts."""
    program = (
        "import torch, fake\n"
        "with fake.FakeTensorMode():\n"
        "    p = torch.ones(3, device='cuda', requires_grad=True)\n"
        "    loss = (p * 2).sum()\n"
        "    print(loss.device, loss.requires_grad)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, timeout=300
    )
    assert (done.returncode, done.stdout.strip()) == (0, "cuda:0 True"), done.stderr[-2000:]


def test_real_tensors_are_still_refused():
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        torch.ones(2, device="cuda")
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        torch.ones(2).cuda()
    assert not torch.cuda.is_available()
    assert torch.ones(2, requires_grad=True).sum().backward() is None


def test_devices_that_differ_are_refused_in_eagers_words():
    with fake.FakeTensorMode():
        x, y = torch.rand(4), torch.rand(4, device="cuda")
        with pytest.raises(RuntimeError, match=r"found.+two.+devices"):
            torch.sin(x, out=y)
        with pytest.raises(RuntimeError, match=r"found.+two.+devices"):
            x.add_(y)


def test_a_fused_cell_of_a_gpu():
    with fake.FakeTensorMode():
        cell = torch.nn.GRUCell(4, 6, device="cuda")
        state = cell(torch.empty(3, 4, device="cuda"))
    assert (state.shape, state.stride(), state.device.type) == ((3, 6), (6, 1), "cuda")


def test_cusolver_leaves_the_right_vectors_row_major():
    with fake.FakeTensorMode():
        left, _, right = torch.linalg.svd(torch.empty(5, 3, device="cuda"), full_matrices=False)
    assert (left.stride(), right.stride()) == ((1, 5), (3, 1))


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_of_attention_are_row_major_unless_they_share_a_tensor(shared):
    with fake.FakeTensorMode():
        if shared:
            q, k, v = torch.empty(2, 8, 3, 4, 16, device="cuda").unbind(2)
        else:
            q = k = v = torch.empty(2, 4, 8, 16, device="cuda").transpose(1, 2)
        out, logsumexp, seed, offset, *lengths = torch.ops.aten._efficient_attention_forward(
            q, k, v, None, None, None, None, None, 0.0, 0, True
        )
        gradients = torch.ops.aten._efficient_attention_backward(
            out, q, k, v, None, out, None, None, *lengths, logsumexp, 0.0, seed, offset, 0, False,
            shared_storage_dqdkdv=shared,
        )  # fmt: skip
    wanted = (1536, 192, 16, 1) if shared else (512, 64, 16, 1)
    assert [g.stride() for g in gradients[:3]] == [wanted] * 3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_which_library_computes_ctc_may_depend_on_lengths(dtype):
    with fake.FakeTensorMode():
        lengths = torch.empty(2, dtype=dtype, device="cuda")
        arguments = (
            torch.empty(5, 2, 7, device="cuda"),
            torch.empty(6, dtype=dtype, device="cuda"),
            lengths,
            lengths,
        )
        assert torch.ops.aten._use_miopen_ctc_loss.Tensor(*arguments, 0) is False
        assert torch.ops.aten._use_cudnn_ctc_loss.Tensor(*arguments, 1) is False
        if dtype is torch.int64:
            assert torch.ops.aten._use_cudnn_ctc_loss.Tensor(*arguments, 0) is False
        else:
            with pytest.raises(
                torch._subclasses.fake_tensor.DataDependentOutputException, match="_use_cudnn_ctc_loss"
            ):
                torch.ops.aten._use_cudnn_ctc_loss.Tensor(*arguments, 0)


def test_how_many_values_differ_is_not_known():
    with (
        fake.FakeTensorMode(),
        pytest.raises(torch._subclasses.fake_tensor.DynamicOutputShapeException, match="_unique"),
    ):
        torch.ops.aten._unique.default(torch.empty(3, device="cuda"))
