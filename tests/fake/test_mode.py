"""Devices, views, constants, modules, subclasses and wrappers in the mode: what fake tensors are for."""

import copy
import threading
import weakref

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor

import fake
from fake import FakeCopyMode, FakeTensor, FakeTensorMode
from tests.fake.support import describe, dynamic, symbolic_mode

aten = torch.ops.aten


def test_types_are_accepted_as_torchs():
    mode = FakeTensorMode()
    with mode:
        x = torch.ones(2)
    assert isinstance(x, torch._subclasses.FakeTensor)
    assert isinstance(mode, torch._subclasses.FakeTensorMode)
    assert type(x) is FakeTensor
    assert fake.is_fake(x)
    assert fake.maybe_get_fake_mode(x) is mode
    assert repr(x) == "FakeTensor(..., size=(2,))"


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", "meta"])
def test_devices_that_need_not_exist(device):
    with FakeTensorMode():
        x = torch.randn(4, 3, device=device)
        y = (x @ x.t()).relu()
        z = torch.zeros_like(y, device="cpu")
    expected = torch.device("cuda:0") if device == "cuda" else torch.device(device)
    assert y.device == expected
    assert z.device == torch.device("cpu")
    assert y.shape == (4, 4)


def test_mixed_devices():
    with FakeTensorMode():
        on_gpu, on_cpu = torch.ones(3, device="cuda"), torch.ones(3)
        assert (on_gpu + torch.ones(())).device.type == "cuda"
        assert (on_gpu + 1).device.type == "cuda"
        assert on_cpu.copy_(on_gpu).device.type == "cpu"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"[dD]evice"):
                on_gpu + on_cpu
        assert on_cpu.type_as(on_gpu).device.type == "cuda"


def test_gradients_and_forward_derivatives():
    with FakeTensorMode():
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
        for _ in range(2):
            model(torch.randn(5, 4)).sum().backward()
        grads = [p.grad for p in model.parameters()]
        assert [tuple(g.shape) for g in grads] == [tuple(p.shape) for p in model.parameters()]
        with torch.autograd.forward_ad.dual_level():
            x = torch.randn(3)
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            primal, tangent = torch.autograd.forward_ad.unpack_dual(dual * dual)
        assert type(primal) is type(tangent) is FakeTensor
    assert all(type(g) is FakeTensor for g in grads)


def test_functional_transforms():
    with FakeTensorMode():
        x = torch.randn(5, 3)
        assert torch.func.vmap(lambda r: r.sum())(x).shape == (5,)
        assert torch.func.grad(lambda r: (r**2).sum())(x).shape == (5, 3)
        assert torch.func.hessian(lambda r: (r**3).sum())(x[0]).shape == (3, 3)


def test_views_share_their_storage_on_hits_too():
    with FakeTensorMode():
        for _ in range(2):
            x = torch.randn(4, 6)
            views = [
                x.view(24),
                x.t(),
                x[1:],
                *x.split(2),
                x.expand(2, 4, 6),
                x.view(torch.int32),
                x.detach(),
            ]
            assert {v.untyped_storage()._cdata for v in views} == {x.untyped_storage()._cdata}
            assert x.clone().untyped_storage()._cdata != x.untyped_storage()._cdata
            assert x.add_(1) is x


def test_version_counters_follow_writes_served_from_the_cache():
    with FakeTensorMode():
        x = torch.ones(3)
        versions = []
        for _ in range(3):
            x.add_(1)
            versions.append(x._version)
        assert versions == [1, 2, 3]
        y = torch.ones(3, requires_grad=True)
        z = y * 2
        z.exp().sum()
        w = z.exp()
        w.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            w.sum().backward()


def test_an_operator_outside_any_mode_runs_in_its_tensors_mode():
    mode = FakeTensorMode()
    with mode:
        x = torch.ones(3)
    for _ in range(2):
        y = x + x
        assert type(y) is FakeTensor
        assert y.fake_mode is mode
    assert torch.cat([x, x]).shape == (6,)


def test_real_tensors_in_the_mode():
    real = torch.ones(3)
    with FakeTensorMode(), pytest.raises(AssertionError, match="Please convert all Tensors"):
        real + 1
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert type(real + 1) is FakeTensor
        with pytest.raises(AssertionError, match="metadata mutating"):
            real.t_()
    with fake.unset_fake_temporarily():
        assert type(torch.ones(2)) is torch.Tensor
    assert mode.from_tensor(real) is mode.from_tensor(real)


def test_data_dependent_operators():
    with FakeTensorMode():
        x = torch.rand(10)
        for _ in range(2):
            with pytest.raises(fake.DynamicOutputShapeException):
                torch.nonzero(x)
            with pytest.raises(fake.DataDependentOutputException):
                x.sum().item()
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.rand(10)
        assert isinstance(torch.nonzero(x).shape[0], torch.SymInt)


def test_no_data_pointer():
    with FakeTensorMode():
        x = torch.ones(3) + 1
    torch.set_warn_always(True)  # some other test may have been warned
    try:
        with pytest.warns(UserWarning, match="data pointer"):
            x.data_ptr()
    finally:
        torch.set_warn_always(False)
    with torch._functorch.config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        mode = FakeTensorMode()
    for _ in range(2):
        with mode:
            y = torch.ones(3) + 1
        with pytest.raises(RuntimeError, match="data pointer"):
            y.data_ptr()


def test_unsupported_operator_names_it():
    with torch.library._scoped_library("fake_mode_test", "FRAGMENT") as library:
        library.define("nothing(Tensor x) -> Tensor")
        with FakeTensorMode():
            with pytest.raises(fake.UnsupportedOperatorException, match="nothing"):
                torch.ops.fake_mode_test.nothing(torch.ones(2))


def _without_meta_kernel(x):
    return aten._aminmax.dim(x[None], 0)[0]


def test_real_kernels_do_not_run_unless_asked_for():
    assert not FakeTensorMode().allow_fallback_kernels
    with FakeTensorMode() as mode:
        x = torch.ones(3)
        for _ in range(2):
            with pytest.raises(fake.FallbackNotAllowedError) as refused:
                _without_meta_kernel(x)
    assert isinstance(refused.value, fake.UnsupportedOperatorException)
    assert refused.value.func is aten._aminmax.dim
    for part in ("aten._aminmax.dim", "allow_fallback_kernels=True"):
        assert part in str(refused.value)
    with FakeTensorMode(allow_fallback_kernels=True):
        assert _without_meta_kernel(torch.ones(3)).shape == (3,)
    mode.allow_fallback_kernels = True
    with mode:
        assert _without_meta_kernel(x).shape == (3,)


def test_accelerated_modes_keep_torchs_setting():
    with fake.accelerate(), torch._subclasses.FakeTensorMode() as mode:
        assert mode.allow_fallback_kernels
        assert _without_meta_kernel(torch.ones(3)).shape == (3,)


def test_products_with_sparse_matrices_need_no_real_kernel():
    mode = FakeTensorMode()
    matrix = mode.from_tensor(torch.eye(3).to_sparse_csr())
    with mode:
        other = torch.ones(3, 4)
        assert torch.sparse.mm(matrix, other, "amax").shape == (3, 4)
        sampled = torch.sparse.sampled_addmm(matrix, other, other.t())
    assert sampled.layout is torch.sparse_csr
    assert sampled.shape == (3, 3)


def test_tensor_subclasses_have_their_turn():
    with FakeTensorMode():
        x = TwoTensor(torch.ones(2, 3), torch.ones(2, 3))
        y = x + 1
    assert type(y) is TwoTensor
    assert type(y.a) is FakeTensor
    converted = FakeTensorMode().from_tensor(TwoTensor(torch.ones(2), torch.ones(2)))
    assert type(converted) is TwoTensor
    assert type(converted.b) is FakeTensor


def test_parameters_stay_parameters():
    mode = FakeTensorMode()
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    converted = mode.from_tensor(parameter)
    assert isinstance(converted, torch.nn.Parameter)
    assert type(converted.grad) is FakeTensor
    assert not isinstance(mode.from_tensor(parameter.view(3)), torch.nn.Parameter)
    with mode:
        assert isinstance(torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter)


def test_deepcopy():
    mode = FakeTensorMode()
    module = torch.nn.BatchNorm2d(4)
    with FakeCopyMode(mode):
        copied = copy.deepcopy(module)
    for original, made in zip(module.state_dict().values(), copied.state_dict().values(), strict=True):
        assert type(made) is FakeTensor
        assert describe(made)["shape"] == describe(original)["shape"]
    with mode:
        again = copy.deepcopy(copied)
        assert again.weight.fake_mode is mode
        assert again.weight is not copied.weight
        x = torch.ones(3)
        x.view(3)
        y = copy.deepcopy(x)
        assert y.untyped_storage()._cdata != x.untyped_storage()._cdata
        assert y.view(3).untyped_storage()._cdata == y.untyped_storage()._cdata
        count = torch.nn.BatchNorm1d(2).num_batches_tracked
        copied = copy.deepcopy(count)
        count.add_(1)
        assert (copied.item(), count.item()) == (0, 1)
        copied.add_(torch.ones((), dtype=torch.int64).bernoulli_())
        assert copied.constant is None


def test_no_reference_cycles():
    real = torch.ones(3)
    mode = FakeTensorMode()
    with mode:
        x = mode.from_tensor(real)
        y = x.view(3) + 1
    gone = [weakref.ref(mode), weakref.ref(x)]
    del mode, x, y
    assert [ref() for ref in gone] == [None, None]


def test_converted_tensors_share_storages_as_the_real_ones_do():
    mode = FakeTensorMode()
    base = torch.ones(6)
    a, b = mode.from_tensor(base[:3]), mode.from_tensor(base.view(2, 3))
    assert a.untyped_storage()._cdata == b.untyped_storage()._cdata


def test_a_tensor_in_a_larger_storage_keeps_it():
    """As that of a slice which was saved and loaded: it is no view."""
    whole = torch.ones(3, 3)
    for part in (whole[:1].data, whole[1:2].data, torch.nn.Parameter(whole[:1].data), whole[:0].data):
        mode = FakeTensorMode()
        copied = mode.from_tensor(part)
        assert copied.untyped_storage().nbytes() == 36
        with mode:
            assert copied.as_strided((2, 2), (1, 2)).shape == (2, 2)
            assert (copied * 2).untyped_storage().nbytes() == part.numel() * 4


def test_tensors_inside_of_function_transforms_are_converted():
    """They have no storage of their own."""
    mode, seen = FakeTensorMode(), []

    def note(x):
        seen.append(mode.from_tensor(x))
        assert seen[-1].shape == x.shape
        return (x * 2).sum()

    torch.vmap(note)(torch.ones(2, 3))
    torch.func.grad(note)(torch.ones(3))
    torch.vmap(torch.func.grad(note))(torch.ones(2, 3))
    for wrapped in seen:
        while torch._C._functorch.is_functorch_wrapped_tensor(wrapped):
            wrapped = torch._C._functorch.get_unwrapped(wrapped)
        assert wrapped.fake_mode is mode


def test_functionalized_and_traced():
    mode = FakeTensorMode()
    x = mode.from_tensor(torch.ones(3))
    graph = make_fx(torch.func.functionalize(lambda x: x.clone().add_(1).view(3, 1)))(x)
    targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert "aten.add.Tensor" in targets
    assert "aten.add_.Tensor" not in targets


def test_control_flow():
    def step(x):
        return torch.cond(x.sum() > 2, lambda x: x + 1, lambda x: x - 1, (x,))

    with FakeTensorMode():
        assert step(torch.ones(3)).shape == (3,)
        carry, stacked = torch._higher_order_ops.scan(
            lambda c, x: (c + x, c * x), torch.ones(2), torch.ones(5, 2)
        )
        assert type(carry) is FakeTensor
        assert stacked.shape == (5, 2)


def test_jagged_and_sparse():
    mode = symbolic_mode()
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    converted = mode.from_tensor(nested)
    with mode:
        assert (converted * 2).shape[0] == 2
    with FakeTensorMode(), pytest.raises(fake.DynamicOutputShapeException):
        torch.eye(3).to_sparse()
    with FakeTensorMode(allow_fallback_kernels=True) as plain:
        sparse = plain.from_tensor(torch.eye(3).to_sparse())
        for _ in range(2):
            assert (sparse * 2).layout is torch.sparse_coo
            assert sparse.to_dense().shape == (3, 3)


def test_quantized_is_refused_clearly():
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(fake.UnsupportedFakeTensorException, match="quantized"):
        FakeTensorMode().from_tensor(quantized)


def test_real_tensors_travel_along_if_asked():
    real = torch.tensor([1.0, 0.0, 2.0])
    with torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True):
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode:
            x = mode.from_tensor(real)
            y = x * 2
            with fake.unset_fake_temporarily():
                assert torch.equal(y.real_tensor, torch.tensor([2.0, 0.0, 4.0]))
            assert type(y) is FakeTensor
            assert torch.nonzero(y).real_tensor.shape == (2, 1)
        with FakeTensorMode():
            branch = torch.cond(torch.ones(3).sum() > 0, torch.sin, torch.cos, (torch.ones(3),))
        assert (type(branch), branch.shape) == (FakeTensor, (3,))


def test_item_is_remembered_until_the_tensor_is_written():
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        mode.allow_scalar_outputs = True
        x = torch.rand(()).round().long()
        first, second = x.item(), x.item()
        assert first.node.expr == second.node.expr
        x.add_(1)
        assert x.item().node.expr != first.node.expr


@pytest.mark.slow
def test_modes_of_several_threads_share_the_cache():
    fake.cache_clear()
    failures = []

    def work(mode, seed):
        try:
            with mode:
                for size in range(1, 60):
                    x = torch.ones(size, 4)
                    y = (x @ torch.ones(4, seed + 1)).relu()
                    z = y.view(-1)
                    z.add_(1)
                    if (
                        y.shape != (size, seed + 1)
                        or z.untyped_storage()._cdata != y.untyped_storage()._cdata
                    ):
                        failures.append((seed, size, y))
        except Exception as error:  # noqa: BLE001  (reported by the main thread)
            failures.append((seed, error))

    shared = FakeTensorMode()
    for modes in ([FakeTensorMode() for _ in range(6)], [shared] * 6):
        threads = [threading.Thread(target=work, args=(m, i)) for i, m in enumerate(modes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_symbolic_sizes_in_and_out():
    mode = symbolic_mode()
    with mode:
        x = dynamic(mode, torch.ones(3, 4))
        rows, columns = x.shape
        for _ in range(3):
            assert (x + x).shape == (rows, columns)
            assert x.t().shape == (columns, rows)
            assert x.view(-1).shape[0] == rows * columns
            assert torch.cat([x, x]).shape[0] == 2 * rows
            assert torch.empty(rows, 2).shape == (rows, 2)
            assert x.new_zeros(columns).shape == (columns,)
