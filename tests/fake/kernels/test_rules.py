"""Each rule gives eager's answer, and is needed: without it torch's engine gives another one, or none."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode as TorchFakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parameter import is_lazy

import fake.kernels
from benchmarks.conformance import Verdict, make_mode, observe
from benchmarks.conformance.compare import Outcome, compare, of_error
from benchmarks.conformance.engines import active, to_fake
from fake.kernels import composites

aten = torch.ops.aten


@dataclass
class Case:
    """``call(*inputs())`` in eager and in the mode; ``rules`` are the operators whose rules it needs."""

    name: str
    rules: tuple[str, ...]
    call: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]] = field(default=tuple)
    symbolic: bool = False

    def outcome(self) -> Outcome:
        given = self.inputs()
        expected = observe((self.call(*given), given), [t for t in given if isinstance(t, torch.Tensor)])
        mode = make_mode("rules", symbolic=self.symbolic)
        given = to_fake(mode, self.inputs())
        try:
            with active(mode):
                result = self.call(*given)
        except Exception as error:  # noqa: BLE001 - any failure is an outcome
            return of_error(error)
        return compare(expected, observe((result, given), [t for t in given if isinstance(t, torch.Tensor)]))


def columns(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A column-major tensor."""
    return torch.ones(*reversed(shape), dtype=dtype).permute(*reversed(range(len(shape)))).detach()


def expanded(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of one element, all strides 0."""
    return torch.ones((), dtype=dtype).expand(shape).detach()


def odd(*shape: int) -> torch.Tensor:
    """A tensor with gaps between its elements."""
    return torch.zeros(*shape, 2)[..., 0].detach()


def _out(call: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """``call`` with the last arguments as ``out=``, or under ``names``."""

    def with_out(*given: Any) -> Any:
        if not names:
            return call(*given[:-1], out=given[-1])
        count = len(names)
        return call(*given[:-count], **dict(zip(names, given[-count:], strict=True)))

    return with_out


def _lstm_gradients(x: torch.Tensor, *weights: torch.Tensor) -> Any:
    h = x.new_zeros(1, x.shape[1], 3)
    output, hidden, cell, workspace = aten.mkldnn_rnn_layer(
        x, *weights, h, h, False, [], 2, 3, 1, True, False, False, True
    )
    return aten.mkldnn_rnn_layer_backward(
        x, *weights, h, h, output, hidden, cell, output, hidden, cell,
        False, 2, 3, 1, True, True, False, [], False, workspace,
    )  # fmt: skip


def _layer_norm_backward(grad: torch.Tensor, x: torch.Tensor) -> Any:
    _, mean, rstd = aten.native_layer_norm(x, [3], None, None, 1e-5)
    return aten.native_layer_norm_backward(grad, x, [3], mean, rstd, None, None, [True, False, False])


def _batch_norm_backward(x: torch.Tensor, w: torch.Tensor) -> Any:
    _, mean, rstd = aten.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5)
    return aten.native_batch_norm_backward(x, x, w, None, None, mean, rstd, True, 1e-5, [True, True, True])


def _sparse_mm_reduce_backward(matrix: torch.Tensor, other: torch.Tensor) -> Any:
    product, places = aten._sparse_mm_reduce_impl(matrix, other, "sum")
    return aten._sparse_mm_reduce_impl_backward(matrix, product, other, "sum", places, [True, True])


CASES = [
    Case(
        "targets of bytes",
        ("aten::nll_loss_forward",),
        torch.nn.functional.nll_loss,
        lambda: (torch.ones(2, 3), torch.ones(2, dtype=torch.uint8)),
    ),
    Case("fft c2c", ("aten::_fft_c2c",), lambda x: torch.fft.ifft(x, dim=0), lambda: (expanded(5, 6, 7, dtype=torch.complex64),)),
    Case("fft r2c", ("aten::_fft_r2c",), torch.fft.rfft, lambda: (expanded(5, 6, 7), None, 0)),
    Case("fft c2r", ("aten::_fft_c2r",), torch.fft.irfft, lambda: (expanded(5, 6, 7, dtype=torch.complex64), None, 0)),
    Case("structured", ("aten::copysign.Tensor",), torch.copysign, lambda: (columns(10, 1, 5), columns(10, 5))),
    Case("structured, symbolic", ("aten::copysign.Tensor",), torch.copysign, lambda: (columns(10, 1, 5), columns(10, 5)), symbolic=True),
    Case("out like the result", ("aten::sort.values",), _out(torch.sort), lambda: (torch.ones(4), (odd(4), torch.zeros(4, 2, dtype=torch.long)[:, 0]))),
    Case("out of a structured operator", ("aten::linalg_qr.out",), _out(torch.linalg.qr), lambda: (torch.ones(3, 3), (torch.empty(0), torch.empty(0)))),
    Case("out row-major", ("aten::histogram.bin_ct_out",), _out(torch.histogram), lambda: (torch.ones(4), 3, (torch.empty(0), torch.empty(7)))),
    Case("out for LAPACK, empty", ("aten::ormqr.out",), _out(torch.ormqr), lambda: (torch.ones(3, 3), torch.ones(3), torch.ones(3, 3), torch.empty(0))),
    Case("out untouched", ("aten::native_batch_norm.out",), _out(aten.native_batch_norm.out, "out", "save_mean", "save_invstd"), lambda: (columns(5, 5, 5), None, None, torch.ones(5), torch.ones(5), False, 0.1, 1e-5, torch.empty(0), torch.empty(0, 2), torch.empty(0, 2))),
    Case("out, symbolic", ("aten::bucketize.Tensor_out",), _out(torch.bucketize), lambda: (torch.ones(()), torch.ones(6), torch.zeros(4, 2, dtype=torch.long)), symbolic=True),
    Case("arange out", ("aten::arange.start_out",), _out(torch.arange), lambda: (0, 0, 1, torch.empty(0, 2))),
    Case("linspace out", ("aten::linspace.out",), _out(torch.linspace), lambda: (0, 1, 0, torch.empty(0, 2))),
    Case("mse loss backward", ("aten::mse_loss_backward",), aten.mse_loss_backward, lambda: (columns(3, 4), columns(3, 4), columns(3, 4), 0)),
    Case("multi margin loss backward", ("aten::multi_margin_loss_backward",), aten.multi_margin_loss_backward, lambda: (torch.ones(()), columns(3, 4), torch.zeros(3, dtype=torch.long), 1, 1.0)),
    Case("multilabel margin loss", ("aten::multilabel_margin_loss_forward",), aten.multilabel_margin_loss_forward, lambda: (torch.ones(4), torch.zeros(4, dtype=torch.long), 0)),
    Case("histogram", ("aten::histogram.bin_ct",), torch.histogram, lambda: (torch.ones(4), 3)),
    Case("histogram with edges", ("aten::histogram.bins_tensor",), torch.histogram, lambda: (torch.ones(4), torch.arange(5.0))),
    Case("histogramdd edges", ("aten::_histogramdd_bin_edges",), aten._histogramdd_bin_edges, lambda: (torch.rand(4, 2), [3, 5])),
    Case("histogramdd counts", ("aten::_histogramdd_from_bin_cts",), aten._histogramdd_from_bin_cts, lambda: (torch.rand(4, 2), [3, 5])),
    Case("histogramdd tensors", ("aten::_histogramdd_from_bin_tensors",), lambda x, a, b: aten._histogramdd_from_bin_tensors(x, [a, b]), lambda: (torch.rand(4, 2), torch.arange(4.0), torch.arange(6.0))),
    Case("geqrf", ("aten::geqrf",), torch.geqrf, lambda: (torch.ones(2, 3, 4),)),
    Case("addbmm_", ("aten::addbmm_",), torch.Tensor.addbmm_, lambda: (torch.ones(1), torch.ones(2, 3, 4), torch.ones(2, 4, 5))),
    Case("max_unpool2d", ("aten::max_unpool2d",), aten.max_unpool2d, lambda: (torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(2, 3, 4, 4, dtype=torch.long), [8, 8])),
    Case("pointwise", ("aten::logical_and",), torch.logical_and, lambda: (columns(10, 1, 5), columns(10, 5))),
    Case("dropout backward", ("aten::native_dropout_backward",), aten.native_dropout_backward, lambda: (columns(3, 4), columns(3, 4, dtype=torch.bool), 2.0)),
    Case("fractions of bytes", ("aten::arange.start_step",), lambda: torch.arange(0, 2.5, 0.5, dtype=torch.uint8)),
    Case("norms of nothing", ("aten::linalg_vector_norm",), lambda x: torch.linalg.vector_norm(x, -1, dim=-1), lambda: (torch.ones(0, 3),)),
    Case("angle", ("aten::angle",), torch.angle, lambda: (torch.ones(2, 1, 4, dtype=torch.complex64).transpose(0, -1).detach(),)),
    Case("ldexp", ("aten::ldexp.Tensor",), torch.ldexp, lambda: (columns(10, 1, 5), columns(10, 5))),
    Case("log_sigmoid", ("aten::log_sigmoid_forward",), aten.log_sigmoid_forward, lambda: (columns(3, 4),)),
    Case("normal", ("aten::normal.Tensor_Tensor",), torch.normal, lambda: (columns(3, 4), columns(3, 4))),
    Case("batch norm", ("aten::native_batch_norm",), aten.native_batch_norm, lambda: (columns(3, 4, 5), None, None, None, None, True, 0.1, 1e-5)),
    Case("batch norm backward", ("aten::native_batch_norm_backward",), _batch_norm_backward, lambda: (columns(3, 4, 5), torch.ones(4))),
    Case("layer norm", ("aten::native_layer_norm",), lambda x: torch.nn.functional.layer_norm(x, (2,)), lambda: (torch.empty_strided((1, 2), (1, 1)),)),
    Case("group norm", ("aten::native_group_norm",), lambda x: torch.nn.functional.group_norm(x, 2), lambda: (torch.empty_strided((2, 6, 1), (6, 1, 7)),)),
    Case("batch norm, mixed", ("aten::native_batch_norm",), aten.native_batch_norm, lambda: (torch.ones(3, 4, 5).bfloat16(), None, None, torch.ones(4), torch.ones(4), True, 0.1, 1e-5)),
    Case("batch norm with update, mixed", ("aten::_batch_norm_with_update",), aten._batch_norm_with_update, lambda: (torch.ones(3, 4, 5).bfloat16(), *[torch.ones(4) for _ in range(4)], 0.1, 1e-5)),
    Case("layer norm, mixed", ("aten::native_layer_norm",), aten.native_layer_norm, lambda: (torch.ones(2, 3).half(), [3], torch.ones(3), None, 1e-5)),
    Case("group norm, mixed", ("aten::native_group_norm",), aten.native_group_norm, lambda: (torch.ones(2, 6, 3).half(), None, torch.ones(6), 2, 6, 3, 2, 1e-5)),
    Case("group norm of other sizes", ("aten::native_group_norm",), aten.native_group_norm, lambda: (torch.ones(1, 2, 6, 3), torch.ones(6), None, 2, 6, 3, 2, 1e-5)),
    Case("a mask of integers", ("aten::_unsafe_masked_index",), aten._unsafe_masked_index, lambda: (torch.ones(5), torch.ones(3, dtype=torch.int16), [torch.zeros(3, dtype=torch.long)], 0.0)),
    Case("a bag of short integers", ("aten::_embedding_bag_forward_only",), torch.nn.functional.embedding_bag, lambda: (torch.zeros(5, dtype=torch.int16), torch.ones(3, 4), torch.tensor([0, 2]))),
    Case("huber loss, mixed", ("aten::huber_loss",), torch.nn.functional.huber_loss, lambda: (torch.ones(5).half(), torch.ones(5))),
    Case("huber loss in the input's layout", ("aten::huber_loss",), aten.huber_loss, lambda: (columns(3, 4).half(), torch.ones(3, 4), 0)),
    Case("soft margin loss, mixed", ("aten::soft_margin_loss",), torch.nn.functional.soft_margin_loss, lambda: (torch.ones(5), torch.ones(5).double())),
    Case("binary cross entropy in the input's layout", ("aten::binary_cross_entropy",), aten.binary_cross_entropy, lambda: (columns(3, 4), torch.ones(3, 4), None, 0)),
    Case("dropout backward, mixed", ("aten::native_dropout_backward",), aten.native_dropout_backward, lambda: (torch.ones(3), torch.ones(3).double(), 2.0)),
    Case("like", ("aten::ones_like",), torch.ones_like, lambda: (torch.empty_strided((1, 2), (1, 1)),)),
    Case("layer norm backward", ("aten::native_layer_norm_backward",), _layer_norm_backward, lambda: (columns(2, 3), columns(2, 3))),
    Case("LSTM backward", ("aten::mkldnn_rnn_layer_backward",), _lstm_gradients, lambda: (torch.ones(2, 1, 2), torch.ones(12, 2), torch.ones(12, 3), torch.ones(12), torch.ones(12))),
    Case("replication_pad3d", ("aten::replication_pad3d",), aten.replication_pad3d, lambda: (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), [1, 1, 1, 1, 1, 1])),
    Case("reflection_pad2d backward", ("aten::reflection_pad2d_backward",), aten.reflection_pad2d_backward, lambda: (torch.ones(2, 3, 6, 7), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), [1, 1, 1, 1])),
    Case("sparse times dense", ("aten::mm",), torch.mm, lambda: (torch.eye(3).to_sparse_csr(), torch.ones(3, 4))),
    Case("sampled addmm", ("aten::sparse_sampled_addmm",), torch.sparse.sampled_addmm, lambda: (torch.eye(3).to_sparse_csr(), torch.ones(3, 4), torch.ones(4, 3))),
    Case("sparse mm reduce", ("aten::_sparse_mm_reduce_impl",), aten._sparse_mm_reduce_impl, lambda: (torch.eye(3).to_sparse_csr(), torch.ones(3, 4), "amax")),
    Case("sparse mm reduce backward", ("aten::_sparse_mm_reduce_impl_backward",), _sparse_mm_reduce_backward, lambda: (torch.eye(3).to_sparse_csr(), torch.ones(3, 4))),
    Case("a mode that is none", ("aten::grid_sampler_2d",), aten.grid_sampler_2d, lambda: (torch.ones(2, 3, 4, 5), torch.ones(2, 6, 7, 2), 9, 9, False)),
    Case("complex nan_to_num_", ("aten::nan_to_num_",), torch.nan_to_num_, lambda: (torch.ones(2, 3, dtype=torch.complex64).t(),)),
    Case("a target in a vector", ("aten::nll_loss_forward",), torch.nn.functional.nll_loss, lambda: (torch.ones(3), torch.zeros(1, dtype=torch.int64))),
    Case("nothing to roll", ("aten::roll",), torch.roll, lambda: (torch.ones(0, 3), 1, 5)),
    Case("nothing to repeat", ("aten::repeat",), lambda x: x.repeat(5, -2, 1), lambda: (torch.ones(0, 3),)),
    Case("log_sigmoid backward", ("aten::log_sigmoid_backward",), aten.log_sigmoid_backward, lambda: (expanded(2, 3, 4), columns(2, 3, 4), torch.ones(2, 3, 4))),
    Case("constant_pad_nd, symbolic", ("aten::constant_pad_nd",), lambda x: aten.constant_pad_nd(x, [0, 0, 0, 3 - x.shape[1]]), lambda: (columns(4, 5, 6),), symbolic=True),
    Case("nansum out, symbolic", ("aten::nansum.out",), _out(torch.nansum), lambda: (torch.ones(4, 5), torch.zeros(2)), symbolic=True),
    Case("softmax out, symbolic", ("aten::softmax.int_out",), lambda x, out: torch.softmax(x, 0, out=out), lambda: (torch.tensor(1.0), torch.zeros(3)), symbolic=True),
    Case("log_softmax out, symbolic", ("aten::log_softmax.int_out",), lambda x, out: torch.log_softmax(x, 0, torch.float64, out=out), lambda: (torch.tensor(1.0), torch.zeros(3, dtype=torch.float64)), symbolic=True),
    Case("transposed convolution to nothing", ("aten::convolution",), lambda x, w: torch.conv_transpose1d(x, w, padding=2), lambda: (torch.ones(2, 2, 2), torch.ones(2, 3, 3))),
    Case("transposed convolution of nothing", ("aten::convolution",), torch.conv_transpose1d, lambda: (torch.ones(0, 2, 0), torch.ones(2, 3, 1))),
    Case("transposed convolution to nothing, symbolic", ("aten::convolution",), lambda x, w: torch.conv_transpose2d(x, w, padding=2), lambda: (torch.ones(2, 2, 2, 2), torch.ones(2, 3, 3, 3)), symbolic=True),
    Case("diagonal of nothing, symbolic", ("aten::diagonal",), lambda x: x.diagonal(3), lambda: (torch.ones(4, 3),), symbolic=True),
    Case("resize_as_, symbolic", ("aten::resize_as_",), lambda x, y: x.resize_as_(y), lambda: (torch.ones(3, 5), torch.ones(7, 4)), symbolic=True),
    Case("resize_, symbolic", ("aten::resize_",), lambda x: x.resize_(7, 4), lambda: (torch.ones(3, 5),), symbolic=True),
]  # fmt: skip


LEARNED = {
    **dict.fromkeys(
        (
            "out, symbolic",
            "max_unpool2d",
            "fractions of bytes",
            "nansum out, symbolic",
            "softmax out, symbolic",
            "log_softmax out, symbolic",
            "resize_as_, symbolic",
            "resize_, symbolic",
        ),
        "2.14",
    ),
    **dict.fromkeys(
        ("histogramdd edges", "histogramdd counts", "histogramdd tensors", "complex nan_to_num_"), "2.15"
    ),
}
"""The release whose own engine gives the answer of these cases. Their rules stay for older ones and for their other cases."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_rule_gives_eagers_answer_and_nothing_else_does(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = case.outcome()
    assert outcome.verdict is Verdict.OK, outcome.detail

    find = fake.kernels.find
    monkeypatch.setattr(fake.kernels, "find", lambda func: None if func.name() in case.rules else find(func))
    torch_has_learned = torch.__version__ >= LEARNED.get(case.name, "no release")
    assert (case.outcome().verdict is Verdict.OK) == torch_has_learned


def test_operands_of_another_dtype_are_dense_before_strides_are_chosen() -> None:
    """The expanded operand, converted to float64, is row-major and comes first."""
    wide, narrow = columns(5, 6, dtype=torch.float64), columns(5, 6)
    expected = [(expanded(5, 6) - other).stride() for other in (wide, narrow)]
    assert expected == [(6, 1), (1, 5)]
    mode = make_mode("rules")
    given, wide, narrow = (mode.from_tensor(t) for t in (expanded(5, 6), wide, narrow))
    with mode:
        assert [(given - other).stride() for other in (wide, narrow)] == expected


def test_every_rule_has_a_case() -> None:
    """By function: a rule for several operators is one rule."""
    tested = {fake.kernels.find(_overload(name)) for case in CASES for name in case.rules}
    ours = [
        rule
        for rule in fake.kernels.rules().values()
        if rule.__module__.startswith("fake.kernels.") and rule.__module__ != "fake.kernels.without_meta"
    ]
    untested = {rule.__name__.removeprefix("_") for rule in ours if rule not in tested}
    # "view" gives torch's answer with fewer guards: tests/fake/symbols/test_exactness.py; "grouped_mm" has a file of
    # its own, as have those of "without_meta" and of sparse tensors ("addmm", "compressed"); "split" (torch's answer in one step: test_in_torchs_place.py), "max_pool" (no images),
    # "round_decimals" (too many), "batches", "pixel_unshuffle", "pow_by_number", "shift_by_number", "masked_fill" and "rot90" are in
    # test_edges.py, "where" is in tests/fake/test_refusals.py; kernels of a GPU ("efficient_attention_backward", "fused_gru_cell", "svd", "unique" and those
    # of CTC) are in test_cuda_without_cuda.py and the tests marked gpu; for the others see below.
    assert untested == {
        "addmm",
        "batches",
        "compressed",
        "efficient_attention_backward",
        "fused_gru_cell",
        "grouped_mm",
        "masked_fill",
        "max_pool",
        "pixel_unshuffle",
        "pow_by_number",
        "rot90",
        "round_decimals",
        "shift_by_number",
        "split",
        "svd",
        "to_sparse",
        "unique",
        "unique_consecutive",
        "use_cudnn_ctc_loss",
        "use_miopen_ctc_loss",
        "view",
        "where",
        "index",
    }


def _overload(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def test_a_dense_tensor_does_not_become_sparse_by_guessing() -> None:
    mode = make_mode("rules")
    with mode, pytest.raises(DynamicOutputShapeException):
        torch.ones(3, 4).to_sparse()


def test_unique_consecutive_counts_dimensions_from_the_back_too() -> None:
    mode = make_mode("rules", symbolic=True)
    x = mode.from_tensor(torch.ones(5, 6))
    with mode:
        front, back = torch.unique_consecutive(x, dim=1), torch.unique_consecutive(x, dim=-1)
        assert back.dim() == front.dim() == 2
        assert back.shape[0] is not None
        assert str(back.shape[0]) == str(x.shape[0])


def test_tensor_split_by_unknown_indices_is_data_dependent() -> None:
    mode = make_mode("rules")
    x = mode.from_tensor(torch.ones(6))
    with mode:
        with pytest.raises(DataDependentOutputException):
            torch.tensor_split(x, mode.from_tensor(torch.tensor([2, 4])))
        assert [t.shape for t in torch.tensor_split(x, torch.tensor(3))] == [torch.Size([2])] * 3


def test_tensor_split_by_unknown_indices_is_symbolic() -> None:
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    x, indices = mode.from_tensor(torch.ones(6)), mode.from_tensor(torch.tensor([2, 4]))
    graph = make_fx(torch.tensor_split)(x, indices)
    assert len([n for n in graph.graph.nodes if n.target is torch.ops.aten.slice.Tensor]) == 3
    assert [part.tolist() for part in graph(torch.arange(4), torch.tensor([1, 1]))] == [[0], [], [1, 2, 3]]
    with mode, pytest.raises(RuntimeError, match="has to be int64"):
        torch.tensor_split(x, indices.int())


def test_bytes_that_index_are_a_mask() -> None:
    x, mask = torch.ones(2, 4), torch.tensor([1, 0, 1, 0], dtype=torch.uint8)
    mode = fake.FakeTensorMode()
    with pytest.raises(DynamicOutputShapeException):
        mode.from_tensor(x)[:, mode.from_tensor(mask)]
    symbolic = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    picked = symbolic.from_tensor(x, static_shapes=True)[:, symbolic.from_tensor(mask, static_shapes=True)]
    assert (picked.shape[0], str(picked.shape[1])) == (2, "u0")


def test_tensor_split_of_real_tensors_is_untouched() -> None:
    x = torch.arange(6.0, requires_grad=True)
    parts = torch.tensor_split(x, torch.tensor([2, 4]))
    assert [part.tolist() for part in parts] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert parts[0]._base is x


def test_composites_of_real_tensors_and_of_torchs_mode_are_torchs(monkeypatch) -> None:
    mode = make_mode("rules")
    asked = []
    monkeypatch.setattr(
        composites, "_is_ours", lambda value: asked.append(value) is None and hasattr(value, "fake_mode")
    )
    x, indices = torch.ones(6), torch.tensor([2, 4])
    torch.tensor_split(x, indices)
    assert not asked
    with mode, pytest.raises(DataDependentOutputException):
        torch.tensor_split(mode.from_tensor(x), mode.from_tensor(indices))
    assert asked
    monkeypatch.undo()
    torchs = TorchFakeTensorMode()
    with torchs, pytest.raises(RuntimeError, match="data is not allocated"):
        torch.tensor_split(torchs.from_tensor(x), torchs.from_tensor(indices))


def test_lazy_modules_are_built_copied_and_run() -> None:
    mode = make_mode("rules")
    with mode:
        for layer in (torch.nn.LazyLinear(5), torch.nn.LazyConv2d(5, 1), torch.nn.LazyBatchNorm2d()):
            batch_norm = isinstance(layer, torch.nn.LazyBatchNorm2d)  # torch cannot copy its fake buffers
            copied = layer if batch_norm else copy.deepcopy(layer)
            assert is_lazy(copied.weight)
            result = copied(torch.ones(2, 3, 4, 4))
            result.sum().backward()
            assert isinstance(copied.weight, torch.nn.Parameter)
            assert copied.weight.fake_mode is mode
            assert copied.weight.grad.shape == copied.weight.shape
            assert is_lazy(layer.weight) != batch_norm


def test_lazy_modules_outside_a_mode_are_torchs() -> None:
    layer = torch.nn.LazyLinear(5)
    assert type(layer.weight) is torch.nn.UninitializedParameter
    assert layer(torch.ones(2, 3)).shape == (2, 5)


def test_an_out_of_the_wrong_dtype_or_device_is_refused_before_it_changes() -> None:
    mode = make_mode("rules")
    with mode:
        x, out = torch.ones(3), torch.zeros(5, dtype=torch.long)
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch.sin(x, out=out)
        assert out.shape == (5,)
        with pytest.raises(RuntimeError, match="device"):
            torch.sort(
                x, out=(torch.empty(3, device="meta"), torch.empty(3, dtype=torch.long, device="meta"))
            )


@pytest.mark.parametrize(
    ("call", "accepted"),
    [
        (lambda x, out: torch.sin(x, out=out), True),
        (lambda x, out: torch.cat([x, x[:0]], out=out), True),
        (lambda x, out: torch.bmm(x[None], x[None], out=out[None]), False),
        (lambda x, out: torch.floor(x, out=out), False),
        (lambda x, out: torch.amin(x, 0, out=out[0]), False),
    ],
)
def test_an_out_of_a_wider_dtype_is_accepted_where_eager_casts(
    call: Callable[..., Any], accepted: bool
) -> None:
    def attempt() -> bool:
        try:
            call(torch.ones(3, 3), torch.zeros(3, 3, dtype=torch.float64))
        except RuntimeError:
            return False
        return True

    assert attempt() == accepted
    with make_mode("rules"):
        assert attempt() == accepted
