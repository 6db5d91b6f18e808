"""probe: rules derived from kernels answer like the kernels, or say that they do not know."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.probe import functional_operators, score_operator
from fake.library import custom_op, opcheck, probe
from fake.library.errors import ProbeError
from fake.library.probe import UndecidedError
from tests.fake.library.support import fresh_name

r = torch.randn


def same(rule, op, *args, **kwargs):
    """The rule, its printed source and the kernel agree."""
    real = op(*args, **kwargs)
    namespace: dict = {}
    exec(rule.source, namespace)
    for answer in (rule(*args, **kwargs), namespace["fake_kernel"](*args, **kwargs)):
        for mine, theirs in zip(
            answer if isinstance(answer, (tuple, list)) else [answer],
            real if isinstance(real, (tuple, list)) else [real],
            strict=True,
        ):
            assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
    return True


CASES = {
    "pointwise": (lambda x: x.sin(), [(r(2, 3),), (r(4),)], [(r(3, 4, 5),), (r(5, 2).t(),)]),
    "broadcast": (
        lambda x, y: x + y,
        [(r(2, 3), r(3)), (r(2, 1), r(1, 3)), (r(()), r(2))],
        [(r(4, 1, 3), r(5, 1)), (r(2, 2), r(2, 2, dtype=torch.float64))],
    ),
    "product": (lambda x, y: x @ y, [(r(2, 3), r(3, 4)), (r(5, 2, 3), r(3, 4))], [(r(7, 5), r(5, 1))]),
    "linear": (
        torch.nn.functional.linear,
        [(r(2, 3), r(4, 3), r(4)), (r(5, 2, 3), r(4, 3), r(4))],
        [(r(6, 7), r(8, 7), r(8))],
    ),
    "reduction": (
        lambda x, dim, keepdim: x.sum(dim, keepdim),
        [(r(2, 3, 4), 1, True), (r(2, 3), 0, False), (r(3), -1, False)],
        [(r(2, 3, 4), -2, False), (r(3, 4, 5), 0, True), (torch.ones(2, 3, dtype=torch.int32), 1, False)],
    ),
    "several outputs": (
        lambda x, dim: tuple(torch.max(x, dim)),
        [(r(2, 3), 1), (r(2, 3, 4), 0)],
        [(r(5, 6, 7), 2)],
    ),
    "concatenation": (
        lambda xs, dim: torch.cat(xs, dim),
        [([r(2, 3), r(2, 5)], 1), ([r(2, 3), r(4, 3), r(1, 3)], 0)],
        [([r(2, 3), r(2, 6), r(2, 1), r(2, 2)], 1)],
    ),
    "window": (
        lambda x, w, stride, padding: torch.nn.functional.conv2d(x, w, None, stride, padding),
        [(r(2, 3, 8, 9), r(4, 3, 3, 2), 2, 1), (r(1, 3, 8, 8), r(4, 3, 3, 3), 1, 0)],
        [(r(2, 3, 20, 11), r(5, 3, 3, 4), 3, 1)],
    ),
    "quotient": (lambda x: x.reshape(x.shape[0], -1, 2).sum(2), [(r(3, 4),), (r(2, 8),)], [(r(5, 12),)]),
    "new shape": (
        lambda x, sizes: x.reshape(sizes).clone(),
        [(r(2, 6), [3, 4]), (r(2, 6), [-1, 2]), (r(12), [2, 2, 3])],
        [(r(4, 5), [10, -1])],
    ),
    "column-major result": (
        lambda x: torch.linalg.inv(x),
        [(torch.eye(3),), (torch.eye(4).expand(2, 4, 4).contiguous(),)],
        [(torch.eye(5),)],
    ),
    "dtype argument": (
        lambda x, dtype: x.to(dtype, copy=True),
        [(r(2, 3), torch.float64), (r(2), torch.int32)],
        [(r(4, 2), torch.int32)],
    ),
    "comparison": (lambda x, y: x > y, [(r(2, 3), r(3)), (r(2), r(2))], [(r(4, 5), r(1, 5))]),
}


@pytest.mark.parametrize("case", CASES)
def test_rules(case):
    op, samples, others = CASES[case]
    rule = probe(op, samples)
    assert rule.decided
    for args in samples + others:
        assert same(rule, op, *args)


def test_sizes_that_depend_on_data():
    rule = probe(torch.nonzero, [(r(3, 4),), (r(5),), (r(2, 3, 4),)])
    ((shape, strides, dtype),) = rule.describe(r(6, 7))
    assert shape == (None, 2)
    assert strides is None
    assert dtype is torch.int64
    assert "new_dynamic_size()" in rule.source


@pytest.mark.slow
def test_registered_rule_works_in_the_compiler():
    @custom_op(fresh_name(), mutates_args=())
    def select(x: Tensor, mask: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy()[mask.numpy()]).clone()

    @custom_op(fresh_name(), mutates_args=())
    def outer(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return torch.outer(x, y) * scale

    rule = probe(outer, [(r(3), r(4)), ((r(5), r(2), 2.0), {})])
    rule.register()
    assert opcheck(outer, (r(3), r(4)), test_utils="ALL").ok
    compiled = torch.compile(lambda x, y: outer(x, y) + 1, backend="aot_eager", dynamic=True, fullgraph=True)
    for sizes in ((3, 4), (6, 5)):
        x, y = r(sizes[0]), r(sizes[1])
        torch.testing.assert_close(compiled(x, y), torch.outer(x, y) + 1)

    probe(select, [(r(3), torch.tensor([True, False, True]))]).register(select)
    assert opcheck(select, (r(3), torch.tensor([True, False, True]))).ok
    with FakeTensorMode(shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv()):
        (size,) = select(torch.empty(3), torch.ones(3, dtype=torch.bool)).shape
        assert isinstance(size, torch.SymInt)


def test_says_what_it_does_not_know():
    def op(x, mode="a", extra=None):
        return x.clone() if mode == "a" else x.sum() if mode == "b" else x[:1].clone()

    rule = probe(op, [(r(2, 3), "a"), (r(4), "b"), (r(4), "a"), (r(2, 3), "b")])
    assert same(rule, op, r(5, 6), "a")
    assert same(rule, op, r(5, 6), "b")
    with pytest.raises(UndecidedError, match="no sample has mode='c'") as caught:
        rule(r(5, 6), "c")
    assert "float32[5, 6]" in caught.value.call
    with pytest.raises(UndecidedError, match="extra"):
        rule(r(5, 6), "a", 3)


def test_size_that_never_varies_is_not_generalised():
    def op(x):
        if x.shape[0] != 4:
            raise ValueError
        return x.new_zeros(7)

    rule = probe(op, [(r(4),)])
    with pytest.raises(UndecidedError):
        rule(r(5, 5, 5, 5))


@pytest.mark.parametrize(
    ("op", "problem"),
    [
        (lambda x: x.t(), "memory"),
        (lambda x: x.add_(1), "memory of x"),
        (lambda x: 3, "something else than strided tensors"),
        (lambda x: x.to_sparse(), "something else than strided tensors"),
    ],
)
def test_no_rule(op, problem):
    rule = probe(op, [(torch.ones(2, 3),)])
    assert not rule.decided
    assert problem in rule.problems[0]
    assert str(rule).startswith("# No rule: ")
    with pytest.raises(UndecidedError, match=problem):
        rule(torch.ones(2, 3))


def test_bad_samples():
    with pytest.raises(ProbeError, match="at least one sample"):
        probe(torch.sin, [])
    with pytest.raises(ProbeError, match="refuses every sample"):
        probe(torch.sin, [("text",)])


def test_numbers_that_the_samples_do_not_vary_are_not_generalised():
    rule = probe(torch.tile, [(r(2, 3), (0,)), (r(3, 1, 2), (0,))])
    assert rule(r(4, 5), (0,)).shape == (4, 0)
    for args in ((r(3, 2), (1,)), (r(3, 2), (0, 2)), (r(3, 2), (2,))):
        try:
            answer = rule(*args)
        except UndecidedError:
            continue
        assert answer.shape == torch.tile(*args).shape


def test_schema_names_are_used():
    @custom_op(fresh_name(), mutates_args=())
    def op(x: Tensor, sizes: list[int], *, keep: bool = False) -> Tensor:
        return x.new_zeros(sizes)

    rule = probe(op, [(r(2), [3, 4]), ((r(2), [5]), {"keep": True})])
    assert "def fake_kernel(x, sizes, *, keep=False):" in rule.source
    assert rule(torch.empty(1), [7, 8, 9]).shape == (7, 8, 9)


#: `python -m benchmarks probe` tries all of op_db.
OPERATORS = {
    "sin", "add", "sum", "matmul", "cat", "gather", "linalg.inv", "topk", "cumsum", "where", "nn.functional.max_pool2d",
    "nn.functional.layer_norm", "index_select", "outer", "argmax",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_blind_on_torchs_operators():
    operators = functional_operators(10, lambda number, name: name in OPERATORS)
    scores = [score_operator(name, op, samples, given=8) for name, op, samples in operators]
    assert len(scores) == len(OPERATORS)
    assert [s.name for s in scores if s.wrong] == []
    assert sum(s.found for s in scores) >= 0.8 * len(scores), json.dumps(
        [s.__dict__ for s in scores], indent=1
    )
