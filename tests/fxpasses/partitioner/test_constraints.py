"""What AOTAutograd's contract asks beyond plain operators: effects, collectives, subgraphs, subclasses, hooks."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch._functorch._aot_autograd import graph_compile
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._higher_order_ops.scan import scan
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from tests.fxpasses.partitioner.support import compile_split
from tests.fxpasses.partitioner.test_numerics import run_twice

noted: list[float] = []


@torch.library.custom_op("fxpasses_partition_test::note", mutates_args=())
def note(x: Tensor) -> Tensor:
    noted.append(float(x.sum()))
    return x.clone()


note.register_fake(lambda x: torch.empty_like(x))
note.register_autograd(lambda ctx, grad: grad * 2)
_register_effectful_op(torch.ops.fxpasses_partition_test.note.default, _EffectType.ORDERED)


@torch.library.custom_op("fxpasses_partition_test::scale_", mutates_args=("x",))
def scale_(x: Tensor, by: float) -> None:
    x.mul_(by)


@torch.library.custom_op("fxpasses_partition_test::sine", mutates_args=())
def sine(x: Tensor) -> Tensor:
    return x.sin()


sine.register_fake(lambda x: torch.empty_like(x))
sine.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos() * torch.rand_like(grad)


class CountingGradient(torch.autograd.Function):
    """Changes an input in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.count = count
        return x.sin() * count.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.count.add_(grad.sum())
        return grad * ctx.saved_tensors[0].cos(), None


@torch.compiler.nested_compile_region
def region(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(torch.relu(x @ w) * x)


def repeated_region(x: Tensor, w: Tensor) -> Tensor:
    return region(region(x, w), w)


def branches(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda a, b: (a @ b).sin(), lambda a, b: (a @ b).cos() * 2, (x, w))


def loop(x: Tensor) -> tuple[Tensor, Tensor]:
    return scan(lambda carry, item: (carry + item.sin(), (carry * item).clone()), x[0].clone(), x)


def functionalized(x: Tensor) -> Tensor:
    y = x.sin()
    with torch.no_grad():
        copy = y.detach().clone()
        scale_(copy, 2.0)
    return y * copy * x


def custom_operator(x: Tensor) -> Tensor:
    return sine(x.exp()) * x


def data_dependent_shape(x: Tensor) -> Tensor:
    where = x.nonzero()
    return (x[where[:, 0], where[:, 1]] * 2).sin().sum()


def number_from_tensor(x: Tensor, count: Tensor) -> Tensor:
    n = count.item()
    y = torch.zeros(n, dtype=x.dtype) + x.sum()
    return y.sin().sum() + (y * n).exp().sum()


def asserted(x: Tensor) -> Tensor:
    torch._assert_async((x > -100).all())
    return (x.sin() * x).exp()


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


CASES: dict[str, tuple[Callable[..., Any], Callable[[], list[Tensor]]]] = {
    "repeated region": (repeated_region, lambda: [leaf(4, 4), leaf(4, 4)]),
    "branches": (branches, lambda: [leaf(4, 4), leaf(4, 4)]),
    "loop": (loop, lambda: [leaf(5, 3)]),
    "functionalized operator": (functionalized, lambda: [leaf(4)]),
    "custom operator": (custom_operator, lambda: [leaf(4)]),
    "data-dependent shape": (data_dependent_shape, lambda: [leaf(4, 4)]),
    "number from a tensor": (number_from_tensor, lambda: [leaf(4), torch.tensor(3)]),
    "assertion": (asserted, lambda: [leaf(4)]),
    "input changed in the backward pass": (
        CountingGradient.apply,
        lambda: [leaf(4), torch.ones(2, dtype=torch.float64)],
    ),
    "random numbers in the backward pass": (NoisyGradient.apply, lambda: [leaf(4, 4)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1.0, 0.0])
@pytest.mark.parametrize("name", CASES)
def test_construct_has_the_gradients_of_eager(name: str, budget: float) -> None:
    torch.manual_seed(0)
    function, make = CASES[name]
    inputs = make()
    expected = run_twice(function, inputs)
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        compiled, splits = compile_split(function, memory_budget=budget)
        actual = run_twice(compiled, inputs)
    torch.testing.assert_close(actual, expected)
    assert splits


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_effect_happens_once_in_each_forward_pass(budget: float) -> None:
    def function(x: Tensor) -> Tensor:
        return (note(x.sin()) * x).exp()

    inputs = [leaf(4)]
    noted.clear()
    expected = run_twice(function, inputs)
    eagerly = list(noted)
    compiled, splits = compile_split(function, memory_budget=budget)
    noted.clear()
    torch.testing.assert_close(run_twice(compiled, inputs), expected)
    assert noted == pytest.approx(eagerly)
    assert not any("with_effects" in value.source for value in splits[0].report.recomputed)


@pytest.fixture
def process_group() -> Iterator[None]:
    if dist.is_initialized():
        pytest.skip("a process group is there already")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_collective_runs_once(budget: float) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = collectives.all_gather_tensor_autograd(x @ w, 0, dist.group.WORLD)
        return y.sin() * y.exp()

    compiled, splits = compile_split(function, memory_budget=budget)
    compiled(leaf(4, 4), leaf(4, 4)).sum().backward()
    (split,) = splits
    gathered = [n for n in split.backward.graph.nodes if "all_gather" in str(n.target)]
    assert not gathered
    assert any(value.source.startswith("wait_tensor") for value in split.report.saved)


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_tensor_subclass_with_a_buffer_changed_in_place(budget: float) -> None:
    def function(x: Tensor, state: Tensor) -> Tensor:
        y = x * state.sin() @ x
        state.add_(1)
        return y.exp()

    def make() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(5)
        a, b, c, d = (torch.randn(3, 3, dtype=torch.float64, generator=generator) for _ in range(4))
        return TwoTensor(a, b).requires_grad_(), TwoTensor(c, d)

    x, state = make()
    function(x, state).sum().backward()
    mine, my_state = make()
    compiled, _ = compile_split(function, memory_budget=budget)
    compiled(mine, my_state).sum().backward()
    for part in ("a", "b"):
        torch.testing.assert_close(getattr(mine.grad, part), getattr(x.grad, part))
        torch.testing.assert_close(getattr(my_state, part), getattr(state, part))


def test_hooks_on_saved_tensors_see_what_is_saved() -> None:
    def function(x: Tensor) -> Tensor:
        return (x.sin() @ x).exp()

    x = leaf(3, 3)
    expected = x.detach().clone().requires_grad_()
    function(expected).sum().backward()
    compiled, _ = compile_split(function)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.to(torch.float32), lambda t: t.to(torch.float64)
    ):
        compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad, rtol=1e-5, atol=1e-5)


def test_buffers_that_only_the_backward_pass_holds_are_donated(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd recognizes them in our graphs: all saved activations, but no input."""
    found: list[list[int]] = []
    collect = graph_compile.collect_bw_donated_buffer_idxs

    def recorded(*args: Any, **kwargs: Any) -> list[int]:
        found.append(collect(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(graph_compile, "collect_bw_donated_buffer_idxs", recorded)
    with torch._functorch.config.patch(donated_buffer=True):
        compiled, splits = compile_split(lambda x: (x.sin() @ x).exp().tanh() + 1)
        compiled(leaf(4, 4)).sum().backward()
    kinds = [value.kind for value in splits[0].report.saved]
    assert found == [[k for k, kind in enumerate(kinds) if kind == "activation"]]
    assert found[0]


def test_inputs_overwritten_after_the_forward_pass_are_saved_as_copies() -> None:
    """At a budget of zero the batch norm runs again, on the running mean that it had the first time."""
    norm = torch.nn.BatchNorm1d(4).double().train()
    compiled, splits = compile_split(norm, memory_budget=0.0)
    compiled(leaf(5, 4)).sum().backward()
    (split,) = splits
    copies = [n for n in split.forward.graph.nodes if n.name.endswith("_before")]
    assert len(copies) == 2
    assert {n.name for n in copies} <= set(split.saved_names())
    torch.testing.assert_close(norm.num_batches_tracked, torch.tensor(1))


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_aliased_inputs_one_of_them_changed_in_place(budget: float) -> None:
    def function(x: Tensor, state: Tensor, part: Tensor) -> Tensor:
        y = x * state.exp().sum() * part.sin()
        part.mul_(0.5)
        return y.tanh() * state.sum()

    def outcome(run: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        x = torch.arange(3, dtype=torch.float64).requires_grad_()
        state = torch.arange(6, dtype=torch.float64)
        run(x, state, state[:3]).sum().backward()
        return x.grad, state

    expected = outcome(function)
    compiled, _ = compile_split(function, memory_budget=budget)
    torch.testing.assert_close(outcome(compiled), expected)


class CheckpointedBlocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Dropout(0.5)
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.sin()


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_checkpointed_batch_norm_and_dropout(budget: float) -> None:
    """Recomputed with the same random numbers and the old running mean; eager updates the mean twice, we do not."""
    torch.manual_seed(0)
    model = CheckpointedBlocks().double().train()
    mirror = copy.deepcopy(model)
    x = torch.randn(5, 4, dtype=torch.float64)
    compiled, splits = compile_split(mirror, memory_budget=budget)
    outputs = []
    for run in (model, compiled):
        torch.manual_seed(1)
        outputs.append(run(x))
        outputs[-1].sum().backward()
    torch.testing.assert_close(*outputs)
    for ours, theirs in zip(mirror.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert any(value.reason == "in a checkpointed region" for value in splits[0].report.recomputed)
