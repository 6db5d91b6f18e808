"""The fast path against the dispatcher: the same values, metadata, errors and side effects in every state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fake.library import custom_op, impl
from fake.library.errors import KernelReturnError, OutputAliasError
from tests.fake.library.fast_call_scenarios import OPS, SCENARIOS, describe, log, make_pair, make_scale, t
from tests.fake.library.support import CountingDispatcher, fresh_name


def observe(scenario, call) -> tuple[Any, list[str]]:
    torch.manual_seed(0)
    log.clear()
    try:
        result = describe(scenario(call))
    except (Exception, SystemError) as error:  # noqa: BLE001  errors are results here
        message = str(error).split("\n")[0]
        result = (type(error).__name__, message[:60])
    return result, list(log)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.filterwarnings("ignore")
def test_same_as_dispatcher(name):
    op_name, scenario = SCENARIOS[name]
    op = OPS[op_name]
    op.fast_call.refresh()
    expected = observe(scenario, op._opoverload)
    for _ in range(2):  # the first call learns the kernel, the second the tensors
        op(
            *[t() for _ in range(2 if op_name == "add_into" else 1)],
            *{"join": [[]], "pair": [True]}.get(op_name, []),
        )
        assert observe(scenario, op) == expected


@pytest.mark.parametrize(
    ("op_name", "args"),
    [
        ("scale", lambda: (t(), 3.0)),
        ("scale", lambda: (t(grad=True), 3.0)),
        ("scale", lambda: (torch.nn.Parameter(t()),)),
        ("add_into", lambda: (t(), t(), 3)),
        ("join", lambda: (t(), [t()], t(1, 2, 3, 4), [1])),
        ("keyword", lambda: (t(grad=True),)),
        ("pair", lambda: (t(grad=True), True)),
    ],
)
def test_fast_path_is_taken(op_name, args):
    op = OPS[op_name]
    op(*args())
    with CountingDispatcher(op) as dispatcher:
        op(*args())
    assert dispatcher.count == 0


def test_each_kind_of_tensor_is_tested_for_itself():
    op = OPS["add_into"]
    x = t()
    for _ in range(3):
        for out, added in ((t(), x), (t().double(), x.double()), (t().reshape(1, -1), x), (x, x)):
            expected = out + 3 * added
            with CountingDispatcher(op) as dispatcher:
                op(out, added, 3)
            assert dispatcher.count == 0
            assert torch.equal(out, expected)


def test_other_registrations_do_not_end_the_fast_path():
    op = OPS["scale"]
    op(t())
    make_scale()  # registers kernels of another operator
    op(t())
    with CountingDispatcher(op) as dispatcher:
        op(t())
    assert dispatcher.count == 0


def test_foreign_kernel_is_seen():
    op = make_pair()
    op(t(), True)
    lib = torch.library.Library(op.qualname.split("::")[0], "FRAGMENT")
    lib.impl(op.qualname.split("::")[1], lambda x, flag: (x * 10, x * 20), "CPU")
    assert torch.equal(op(t(), True)[0], t() * 10)
    del lib
    assert torch.equal(op(t(), True)[0], t().sin())


def test_kernel_replaced_and_disabled():
    op = make_scale()
    assert torch.equal(op(t()), t() * 2)
    op.register_kernel("cpu", lambda x, by=2.0: x * 100)
    assert torch.equal(op(t()), t() * 100)
    with op.set_kernel_enabled("cpu", enabled=False):
        assert torch.equal(op(t()), t() * 2)
    assert torch.equal(op(t()), t() * 100)


def test_autograd_formula_replaced():
    op = make_scale()
    op.register_autograd(lambda ctx, grad: (grad * 7, None))
    x = t(grad=True)
    op(x).sum().backward()
    assert torch.equal(x.grad, t(7, 7))


def test_no_formula():
    @custom_op(fresh_name(), mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.detach().clone()

    for call in (op, op._opoverload):
        out = call(t(grad=True))
        assert out.requires_grad
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            out.sum().backward()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("alias", ["same", "view", "two outputs"])
def test_aliasing_output(alias, grad):
    returns = tuple[Tensor, Tensor] if alias == "two outputs" else Tensor

    def kernel(x):
        if alias == "same":
            return x
        return x.view(-1) if alias == "view" else (x.clone(),) * 2

    kernel.__annotations__ = {"x": Tensor, "return": returns}
    op = custom_op(fresh_name(), kernel, mutates_args=())
    for call in (op._opoverload, op, op):
        with pytest.raises(RuntimeError, match="may not alias"):
            call(t(grad=grad))
    with pytest.raises(OutputAliasError):
        op(t(grad=grad))


@pytest.mark.parametrize("result", [5, (torch.ones(1),), [torch.ones(1)], "text"], ids=repr)
def test_wrong_return_type(result):
    @custom_op(fresh_name(), mutates_args=())
    def op(x: Tensor) -> Tensor:
        return result if x.sum() > 100 else x.clone()

    op(t())
    for call in (op._opoverload, op):
        with pytest.raises(KernelReturnError, match="Unable to cast"):
            call(t(200))


@pytest.mark.parametrize("result", [torch.ones(1), [torch.ones(1), 3], None], ids=repr)
def test_wrong_list(result):
    @custom_op(fresh_name(), mutates_args=())
    def op(x: Tensor) -> list[Tensor]:
        return result

    for call in (op, op._opoverload, op):
        with pytest.raises(KernelReturnError, match=r"Unable to cast .*List"):
            call(t())


def test_lists_among_several_outputs():
    @custom_op(fresh_name(), mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        return x.clone(), [x + 1, x + 2] if x.sum() < 100 else x.clone()

    for call in (op, op._opoverload, op):
        one, (two, three) = call(t())
        assert torch.equal(one + 1, two)
        assert torch.equal(one + 2, three)
        with pytest.raises(KernelReturnError, match="Unable to cast"):
            call(t(200))


def test_wrong_number_of_outputs():
    # The dispatcher alone would corrupt its stack.
    @custom_op(fresh_name(), mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), x.clone(), x.clone()

    for call in (op._opoverload, op, op):
        with pytest.raises(KernelReturnError, match="returned 3 outputs, the schema has 2"):
            call(t())


def test_none_for_a_tensor():
    @custom_op(fresh_name(), mutates_args=())
    def op(x: Tensor) -> Tensor:
        return None

    assert op._opoverload(t()) is None
    assert op(t()) is None
    assert op(t()) is None


def test_exception_in_kernel_restores_dispatch_state():
    @custom_op(fresh_name(), mutates_args=())
    def op(x: Tensor) -> Tensor:
        if x.numel() == 1:
            raise ZeroDivisionError
        return x.clone()

    op(t())
    before = torch._C._dispatch_tls_local_exclude_set()
    for grad in (False, True):
        with pytest.raises(ZeroDivisionError) as caught:
            op(t(1, grad=grad))
        assert caught.traceback
        assert torch._C._dispatch_tls_local_exclude_set() == before


def test_argument_given_twice():
    # Python itself notices this on the fast path, the dispatcher's parser on the other.
    for call, error in ((OPS["scale"], TypeError), (OPS["scale"]._opoverload, RuntimeError)):
        with pytest.raises(error):
            call(t(), 1.0, by=2.0)


def test_impl_through_the_module_function_is_seen():
    op = make_scale()
    op(t())
    impl(op.qualname, "cpu", lambda x, by=2.0: x * 50)
    assert torch.equal(op(t()), t() * 50)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda():
    op = make_scale()
    for grad in (False, True):
        x = t(grad=grad).cuda()
        op(x)
        with CountingDispatcher(op) as dispatcher:
            assert torch.equal(op(x), op._opoverload(x))
        assert dispatcher.count == 0
    with pytest.raises(RuntimeError):
        OPS["add_into"](t(), t().cuda())
