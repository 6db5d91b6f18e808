"""Symbolic sizes: cached results, guards and arithmetic are those of torch's mode without a cache."""

import itertools
import operator
import random
from typing import Any

import pytest
import torch
from functorch.compile import default_partition, make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.source import ConstantSource
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fake
from fake import FakeTensorMode
from tests.fake.support import describe, dynamic, symbolic_mode

PROGRAMS = {
    "pointwise": lambda x, y: [x + y, x * 2, (x > y), x.relu().exp(), x + 1.5],
    "views": lambda x, y: [x.view(-1), x.t(), x[1:], x[:, None], x.expand(2, *x.shape)],
    "shapes as numbers": lambda x, y: [
        x * x.shape[0],
        torch.full((x.shape[1],), x.shape[0]),
        x.new_zeros(x.shape),
        torch.add(x.shape[0], 2.0),
        torch.sub(x.shape[0], 2),
        torch.add(1, torch.sym_float(x.shape[1])),
    ],
    "reductions": lambda x, y: [x.sum(), x.mean(1), x.softmax(0), x.max(1).values],
    "matmul": lambda x, y: [x @ y.t(), torch.nn.functional.linear(x, y)],
    "joining": lambda x, y: [torch.cat([x, y]), torch.stack([x, y], 1), *x.chunk(2, 1)],
    "norm": lambda x, y: [torch.nn.functional.layer_norm(x, (x.shape[1],)), x.var(1)],
    "in place": lambda x, y: [x.clone().add_(y), x.clone().mul_(2).view(-1)],
    "a write into a part": lambda x, y: [torch.ops.aten.copy.default(x[1, 2], y.sum()), x[0, 0] + 1],
    "size questions": lambda x, y: [x if x.shape[0] > 2 else y, x.shape[0] == y.shape[0]],
}


def run(mode, program, times):
    """What the last of several runs gives, and the guards of the environment."""
    x = dynamic(mode, torch.ones(6, 4), "x")
    y = dynamic(mode, torch.ones(6, 4), "y")
    with mode:
        for _ in range(times):
            outputs = program(x, y)
    guards = sorted(str(guard.expr) for guard in mode.shape_env.guards)
    return [describe(output, (x, y)) for output in outputs], guards


def without_keys(described):
    return [
        {k: v for k, v in d.items() if k not in ("keys", "nbytes")} if isinstance(d, dict) else d
        for d in described
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_torchs_mode(name):
    expected, guards = run(TorchFakeTensorMode(shape_env=ShapeEnv()), PROGRAMS[name], 1)
    for times in (1, 2, 4):
        outputs, ours = run(symbolic_mode(), PROGRAMS[name], times)
        assert without_keys(outputs) == without_keys(expected)
        assert ours == guards


def test_hits_on_symbols():
    mode = symbolic_mode()
    x = dynamic(mode, torch.ones(6, 4))
    fake.cache_clear()
    with mode:
        for _ in range(5):
            x.relu()
    assert fake.cache_info().hits >= 4


def test_environments_do_not_share_entries():
    fake.cache_clear()
    for size in (5, 6):
        mode = symbolic_mode()
        x = dynamic(mode, torch.ones(size, 4))
        with mode:
            assert (x + 1).shape[0].node.shape_env is mode.shape_env
            assert (x + 1).shape[0].node.hint == size


def test_an_equality_found_later():
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
    x = dynamic(mode, torch.ones(6, 4), "x")
    y = dynamic(mode, torch.ones(6, 4), "y")
    with mode:
        before = [str((t * 2).shape[0]) for t in (x, y)]
        assert before[0] != before[1]
        x + y
        after = {str((t * 2).shape[0]) for t in (x, y) for _ in range(2)}
        assert len(after) == 1


def test_a_size_specialised_later():
    mode = symbolic_mode()
    x = dynamic(mode, torch.ones(6, 4))
    with mode:
        x * 2
        assert int(x.shape[0]) == 6
        for _ in range(2):
            assert str((x * 2).shape[0]) == "6"


def test_nothing_is_recorded_while_guards_are_suppressed():
    mode = symbolic_mode()
    x = dynamic(mode, torch.ones(6, 4), "x")
    y = dynamic(mode, torch.ones(6, 4, 1).squeeze(-1), "y")
    with mode:
        with mode.shape_env.suppress_guards():
            x.view(3, -1)
        silent = len(mode.shape_env.guards)
        x.view(3, -1)
        assert len(mode.shape_env.guards) > silent
    assert y.dim() == 2


def test_unbacked_sizes_are_new_each_time():
    mode = symbolic_mode()
    with mode:
        x = torch.ones(6)
        first, second = torch.nonzero(x + 0), torch.nonzero(x + 0)
        assert str(first.shape[0]) != str(second.shape[0])
        for _ in range(2):
            assert (first * 2).shape[0].node.expr == first.shape[0].node.expr


OPERATIONS = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, max, min]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


def arithmetic(seed):
    """Random arithmetic on two symbols: the expressions met, the answers, and the guards they left."""
    choose = random.Random(seed)
    environment = ShapeEnv()
    mode = TorchFakeTensorMode(shape_env=environment)
    x = mode.from_tensor(
        torch.ones(7, 5),
        source=ConstantSource("x"),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2),
    )
    pool = [*x.shape, 1, 2, 3]
    met = []
    for _ in range(40):
        left, right = choose.choice(pool), choose.choice(pool)
        operation = choose.choice(OPERATIONS)
        if operation in (operator.floordiv, operator.mod):
            right = choose.choice((2, 3))
        value = operation(left, right)
        met.append(str(value))
        pool.append(value)
        compared = choose.choice(COMPARISONS)(value, choose.choice(pool))
        met.append(str(compared))
        met.append(bool(compared))
    return met, [str(guard.expr) for guard in environment.guards]


@pytest.mark.slow
def test_lean_arithmetic_is_torchs():
    """The same expressions, answers and guards in the same order, over random programs."""
    for seed in range(12):
        expected = arithmetic(seed)
        with fake.accelerate():
            assert arithmetic(seed) == expected
        assert arithmetic(seed) == expected


def test_equal_sizes_keep_nodes_of_their_own():
    with fake.accelerate():
        mode = TorchFakeTensorMode(shape_env=ShapeEnv())
        x = dynamic(mode, torch.ones(7, 5))
        rows = x.shape[0]
        sums = [rows + 1 for _ in range(3)]
        for a, b in itertools.combinations(sums, 2):
            assert a.node is not b.node
            assert a.node.expr == b.node.expr


def test_shape_specifications_can_be_written():
    """torch writes them in an environment that lets nobody read its state."""
    specs = pytest.importorskip("torch.fx.experimental.dynamic_spec")

    def written(size):
        return [str(s) for s in (2 * size, size + 1, -size, size // 2, size % 2 == 0, size > 3, size == 4)]

    size = specs.ShapeVar("B")
    expected = written(size)
    with fake.accelerate(), FakeTensorMode(shape_env=ShapeEnv()):
        assert written(size) == written(size) == expected


def test_sizes_of_forward_values_are_not_read_from_tangents():
    """What is known before a trace, the tangents, shares no node with what the trace makes."""
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Dropout(0.5))
    seen: list[str] = []

    def partition(joint: torch.fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        seen.extend(str(node.args[0]) for node in joint.graph.nodes if "sym_size" in str(node.target))
        return default_partition(joint, inputs, **settings)

    backend = aot_autograd(
        fw_compiler=lambda gm, inputs: make_boxed_func(gm.forward),
        decompositions=select_decomp_table(),
        partition_fn=partition,
    )
    with fake.accelerate():
        compiled = torch.compile(model, backend=backend, dynamic=True)
        for batch in (2, 3):
            compiled(torch.randn(batch, 3, 8, 8)).sum().backward()
    assert seen
    assert not [name for name in seen if name.startswith("tangents")]


def test_a_sparse_operand_beside_symbolic_ones():
    """Whether an operand is row-major is a question about dense ones only."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sparse = mode.from_tensor(torch.eye(4).to_sparse_csr())
    dense = mode.from_tensor(torch.ones(4, 3))
    with mode:
        product = torch.mm(sparse, dense)
    assert len(product.shape) == 2
    assert product.shape[1] == dense.shape[1]
