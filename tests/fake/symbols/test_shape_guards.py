"""The minimal guards: as few as possible, and exactly as strict as torch's."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._dynamo.source import LocalSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv as TorchShapeEnv

import fake


def traced(run, *shapes, **settings):
    """Run a program on fake tensors of these shapes; the environment and the inputs."""
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv(**settings))
    inputs = [mode.from_tensor(torch.zeros(s), name=n) for n, s in zip("xyz", shapes, strict=False)]
    with mode:
        run(*inputs)
    return mode.shape_env, inputs


def torchs_answer(env, inputs, tensors):
    """Whether torch's own, full guards accept the tensors."""
    names = [LocalSource(f"t{i}") for i in range(len(inputs))]
    produced = TorchShapeEnv.produce_guards(env, inputs, names, guards=list(env.guards), ignore_static=False)
    return env.evaluate_guards_expression(" and ".join(produced) or "True", tensors)


PROGRAMS = {
    "nothing": (lambda x: x, [(4, 6)]),
    "divisible": (lambda x: x.view(-1, 4), [(4, 6)]),
    "equal": (lambda x, y: x + y, [(4, 6), (4, 6)]),
    "broadcast": (lambda x, y: x + y, [(4, 6), (1, 6)]),
    "product": (lambda x, y: x @ y, [(4, 6), (6, 3)]),
    "flatten": (lambda x: x.flatten().view(2, -1), [(4, 6)]),
    "branch": (lambda x: x.sum() if x.shape[0] > x.shape[1] - 3 else x, [(4, 6)]),
    "constant": (lambda x: x.view(4, -1), [(4, 6)]),
    "cat": (lambda x, y: torch.cat([x, y]) + 1, [(4, 6), (3, 6)]),
    "twice": (lambda x, y: torch.cat([x, x]) + y, [(4, 6), (8, 6)]),
    "narrow": (lambda x: x[1:3, -2:], [(4, 6)]),
    "halves": (lambda x: x.view(2, -1, x.shape[1]), [(4, 6)]),
    "many": (
        lambda x: [x.shape[0] % 8 == 0, x.shape[0] % 4 == 0, x.shape[0] > 2, x.shape[0] > 1, x.shape[0] >= 8],
        [(8, 6)],
    ),
    "chain": (lambda x, y, z: [x.shape[0] > y.shape[0], y.shape[0] > z.shape[0], x.shape[0] > z.shape[0]], [(7,), (5,), (3,)]),
}  # fmt: skip


@pytest.mark.parametrize("duck", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_they_accept_exactly_what_torchs_full_set_accepts(name, duck):
    run, shapes = PROGRAMS[name]
    env, inputs = traced(lambda *a: [bool(v) if isinstance(v, torch.SymBool) else v for v in _list(run(*a))], *shapes, duck_shape=duck)  # fmt: skip
    accepts = env.guards.compile()
    rank = sum(map(len, shapes))
    verdicts = set()
    for sizes in itertools.product(range(1, 9), repeat=min(rank, 3)):
        sizes = (
            [*sizes, *(size for shape in shapes for size in shape)][:rank]
            if rank <= 3
            else _spread(sizes, shapes)
        )
        it = iter(sizes)
        tensors = [torch.zeros([next(it) for _ in shape]) for shape in shapes]
        verdict = accepts(*tensors)
        assert verdict == torchs_answer(env, inputs, tensors), [t.shape for t in tensors]
        verdicts.add(verdict)
    assert accepts(*(torch.zeros(shape) for shape in shapes)), "the example itself"
    assert False in verdicts, "sizes of 1 are never accepted by a graph for more"


def _list(value):
    return value if isinstance(value, list) else [value]


def _spread(sizes, shapes):
    """Three numbers over more dimensions: the same one where the examples have the same one."""
    numbers = {}
    for shape in shapes:
        for size in shape:
            numbers.setdefault(size, sizes[len(numbers) % 3])
    return [numbers[size] if size != 1 else 1 for shape in shapes for size in shape]


@pytest.mark.parametrize("duck", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_they_are_never_more_than_torchs(name, duck):
    run, shapes = PROGRAMS[name]
    env, inputs = traced(lambda *a: [bool(v) if isinstance(v, torch.SymBool) else v for v in _list(run(*a))], *shapes, duck_shape=duck)  # fmt: skip
    theirs = TorchShapeEnv.produce_guards(env, inputs, list("xyz"[: len(inputs)]), guards=list(env.guards))
    ours = env.produce_guards(inputs, list("xyz"[: len(inputs)]))
    assert len(ours) <= len(theirs)
    free = [guard for guard in env.guards.minimal() if guard.kind != "specialized"]
    assert len(free) <= len(theirs)


def test_what_is_implied_is_dropped():
    run, shapes = PROGRAMS["many"]
    env, _ = traced(lambda x: list(map(bool, run(x))), *shapes)
    assert len(env.guards) > 1
    told = [str(guard) for guard in env.guards.minimal() if guard.kind != "layout"]
    assert told == ["x.size(0) % 8 == 0", "8 <= x.size(0)", "2 <= x.size(1)"]


def test_a_middle_term_is_enough_for_both_ends():
    run, shapes = PROGRAMS["chain"]
    env, _ = traced(lambda *a: list(map(bool, run(*a))), *shapes, duck_shape=False)
    relations = [str(guard) for guard in env.guards.minimal() if guard.kind == "relation"]
    assert relations == ["x.size(0) > y.size(0)", "y.size(0) > z.size(0)"]


def test_two_questions_about_one_order_are_one_guard():
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv(duck_shape=False))
    x, mask = (mode.from_tensor(torch.zeros(n, 3), name=name) for n, name in ((6, "x"), (8, "mask")))
    if x.shape[0] <= mask.shape[0] and x.shape[0] != mask.shape[0]:
        guards = mode.shape_env.guards.minimal()
    assert "x.size(0) < mask.size(0)" in map(str, guards)
    (strict,) = (guard for guard in guards if guard.kind == "relation")
    assert len(strict.reasons) == 2
    accepts = guards.compile()
    for rows in range(2, 9):
        assert accepts(torch.zeros(rows, 3), torch.zeros(5, 3)) == (rows < 5)


def test_two_equivalent_guards_do_not_drop_each_other():
    env, _ = traced(
        lambda x: [bool(2 * x.shape[0] > 2 * x.shape[1]), bool(x.shape[0] >= x.shape[1] + 1)], (6, 4)
    )
    relations = [str(guard) for guard in env.guards.minimal() if guard.kind == "relation"]
    assert relations == ["x.size(0) > x.size(1)"]


def test_the_function_checks_layout_and_constant_sizes():
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    mode.from_tensor(torch.zeros(6, 4), name="x", dims={0: "dynamic"})
    guards = mode.shape_env.guards.minimal()
    accepts = guards.compile()
    assert accepts.inputs == ("x",)
    assert accepts(torch.zeros(9, 4))
    assert not accepts(torch.zeros(9, 5))
    assert not accepts(torch.zeros(4, 9).t())
    assert not accepts(torch.zeros(9))
    assert not accepts(torch.zeros(9, 4, 1))
    for other in (9, "x", None):
        with pytest.raises(fake.ArgumentTypeError, match=r"guards: x is .*pass a tensor"):
            accepts(other)
    assert guards.compile(static=False)(torch.zeros(9, 4))
    assert "def accepts(x):" in accepts.code
    assert [guard.expression for guard in guards.statics][:1] == ["x.size(1) == 4"]


def test_inputs_that_are_numbers():
    env = fake.ShapeEnv()
    number = env.create_unspecified_symint_and_symbol(
        7, LocalSource("n"), torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC
    )
    assert number > 4
    accepts = env.guards.compile()
    assert accepts.inputs == ("n",)
    assert accepts(5)
    assert not accepts(4)


comparisons = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
terms = st.sampled_from(
    ["a", "b", "a + b", "a * b", "2 * a", "a - b", "a // 2", "b % 3", "3", "5", "a + 2 * b"]
)


@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(terms, comparisons, terms), min_size=1, max_size=4),
    st.integers(2, 7),
    st.integers(2, 7),
)
def test_random_programs_are_guarded_exactly(conditions, first, second):
    check_random_program(conditions, first, second)


def check_random_program(conditions, first, second):
    """A program that branches on random conditions takes the same branches for exactly the sizes accepted."""

    def branches(a, b):
        return [
            bool(eval(f"({left}) {relation} ({right})", {"a": a, "b": b}))
            for left, relation, right in conditions
        ]

    taken = []
    env, inputs = traced(lambda x: taken.extend(branches(*x.shape)), (first, second), duck_shape=False)
    accepts = env.guards.compile()
    for a, b in itertools.product(range(2, 9), repeat=2):
        tensors = [torch.zeros(a, b)]
        verdict = accepts(*tensors)
        assert verdict == (branches(a, b) == taken), (
            conditions,
            (first, second),
            (a, b),
            str(env.guards.minimal()),
        )
        assert verdict == torchs_answer(env, inputs, tensors)


def test_inequalities_at_the_end_of_a_range_raise_it():
    """And with the least values known, what was asked of the product of two quotients follows."""
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv(duck_shape=False))
    x = mode.from_tensor(torch.zeros(16, 24), name="x")
    height, width = x.shape[0] // 4, x.shape[1] // 4
    for condition in (height >= 1, width >= 1, height != 1, width != 1, height * width != 1):
        assert condition
    assert height % (height * width) != 0
    guards = mode.shape_env.guards.minimal()
    assert [str(g) for g in guards if g.kind != "layout"] == ["8 <= x.size(0)", "8 <= x.size(1)"]
    accepts = guards.compile()
    for rows in range(2, 12):
        for columns in range(2, 12):
            assert accepts(torch.zeros(rows, columns)) == (rows >= 8 and columns >= 8)


def test_a_raised_range_begins_at_a_multiple():
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    x = mode.from_tensor(torch.zeros(12), name="x")
    assert x.shape[0] % 3 == 0
    assert x.shape[0] != 3
    assert [str(g) for g in mode.shape_env.guards.minimal()] == ["x.size(0) % 3 == 0", "6 <= x.size(0)"]
    (raised,) = [g for g in mode.shape_env.guards.explain() if g.kind == "range"]
    assert [condition for condition, _, _ in raised.chain] == ["x.size(0) != 3"]


def test_a_number_read_twice_is_one_guard():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(6)

        def forward(self, x):
            return self.norm(self.norm(x))

    reports = []

    def backend(gm, inputs):
        reports.append(fake.explain(torch._guards.TracingContext.get().fake_mode.shape_env))
        return gm

    torch._dynamo.reset()
    with fake.using_shape_env():
        torch.compile(Twice(), backend=backend, dynamic=True)(torch.zeros(4, 6))
    (eps,) = [guard for guard in reports[0] if guard.expression.endswith("norm.eps == 1e-05")]
    assert "take it as a tensor" in eps.avoid


QUOTIENTS = {
    "int((2 - a) / 2)": lambda x: int((2 - x.shape[0]) / 2),
    "int(b / (-a // 3))": lambda x: int(x.shape[1] / (-x.shape[0] // 3)),
    "int((a - b) / (b - 9))": lambda x: int((x.shape[0] - x.shape[1]) / (x.shape[1] - 9)),
    "int(b / a)": lambda x: int(x.shape[1] / x.shape[0]),
}


@pytest.mark.parametrize("text", QUOTIENTS)
def test_a_quotient_that_may_be_negative_is_truncated_and_not_floored(text):
    quotient = QUOTIENTS[text]
    for example in [(3, 4), (4, 3), (5, 5), (7, 2)]:
        env, _ = traced(lambda x: x.new_zeros(quotient(x) + 9), example, duck_shape=False)
        accepts = env.guards.compile()
        for sizes in itertools.product(range(2, 9), repeat=2):
            other = torch.zeros(sizes)
            assert accepts(other) == (quotient(other) == quotient(torch.zeros(example))), (example, sizes)
