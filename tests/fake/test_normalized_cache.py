"""Symbolic results found for other symbols: a hit gives what a dispatch gives, and leaves the same guards."""

import itertools
import os
import random
import threading

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves

import fake
from fake import FakeTensorMode
from fake.cache.evaluations import record_evaluations
from fake.mode import ENGINE
from tests.fake.support import describe

F = torch.nn.functional

STEPS = {
    "add": lambda x, y, w: x + y,
    "mul number": lambda x, y, w: x * 2,
    "relu": lambda x, y, w: x.relu(),
    "compare": lambda x, y, w: torch.where(x > y, x, y),
    "mm": lambda x, y, w: x @ w,
    "matmul transposed": lambda x, y, w: x @ y.t(),
    "flat": lambda x, y, w: x.reshape(-1),
    "even": lambda x, y, w: x.reshape(-1, 2),
    "halves": lambda x, y, w: x.view(x.shape[0] // 2, -1),
    "slice": lambda x, y, w: x[1:-1],
    "beyond": lambda x, y, w: x[:, 2:100],
    "cat": lambda x, y, w: torch.cat([x, y], 1),
    "cat rows": lambda x, y, w: torch.cat([x, y], 0),
    "chunk": lambda x, y, w: x.chunk(2, 1),
    "layer_norm": lambda x, y, w: F.layer_norm(x, (x.shape[1],)),
    "softmax": lambda x, y, w: x.softmax(1),
    "sum": lambda x, y, w: x.sum(0),
    "expand": lambda x, y, w: x[None].expand(y.shape[0], *x.shape),
    "broadcast": lambda x, y, w: x[:, None] + y,
    "full": lambda x, y, w: x.new_full((x.shape[1], x.shape[0] + 1), 3),
    "size as number": lambda x, y, w: x * x.shape[0],
    "pool": lambda x, y, w: F.avg_pool1d(x, 2),
    "pad": lambda x, y, w: F.pad(x, (1, 2)),
    "index": lambda x, y, w: x[torch.arange(x.shape[0])],
    "in place": lambda x, y, w: x.clone().add_(y),
    "squeeze": lambda x, y, w: x.unsqueeze(0).squeeze(0),
    "linear": lambda x, y, w: F.linear(x, y),
    "flip": lambda x, y, w: x.flip(0),
    "tril": lambda x, y, w: x.tril(),
    "strided": lambda x, y, w: x.as_strided((x.shape[0], 1), (x.shape[1], 1)),
    "var": lambda x, y, w: torch.var_mean(x, 1),
}


def inputs(mode, sizes, ranges=None):
    """``x [a, b]``, ``y [c, d]``, ``w [e, f]``, all sizes symbolic unless they are 0 or 1."""
    made = []
    for name, size in zip("xyw", sizes, strict=True):
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
        made.append(
            mode.from_tensor(torch.empty(size), source=ConstantSource(name), symbolic_context=context)
        )
    for number, low, high in ranges or ():
        torch._check(made[number].shape[0] >= low)
        torch._check(made[number].shape[0] <= high)
    return made


def run(names, sizes, *, duck_shape=True, ranges=None, suppress=False, before=()):
    """Everything that a program leaves: results or errors, and the state of the environment."""
    environment = ShapeEnv(duck_shape=duck_shape)
    mode = FakeTensorMode(shape_env=environment)
    tensors = inputs(mode, sizes, ranges)
    seen = []
    with mode:
        for question in before:
            bool(question(*tensors))
        for name in names:
            try:
                if suppress:
                    with environment.suppress_guards():
                        value = STEPS[name](*tensors)
                else:
                    value = STEPS[name](*tensors)
            except Exception as error:  # noqa: BLE001  (the type of the error is the outcome)
                seen.append(type(error).__name__)
                continue
            seen.append([describe(leaf, tuple(tensors)) for leaf in tree_leaves(value)])
            hints = [[getattr(s, "node", s) for s in leaf.shape] for leaf in tree_leaves(value)]
            seen.append([[getattr(s, "hint", s) for s in shape] for shape in hints])
    return {
        "seen": seen,
        "guards": [str(guard.expr) for guard in environment.guards],
        "replacements": {str(k): str(v) for k, v in environment.replacements.items()},
        "divisible": sorted(map(str, environment.divisible)),
        "ranges": {str(k): str(v) for k, v in environment.var_to_range.items()},
        "axioms": sorted(f"{k}: {v}" for k, v in environment.axioms.items()),
    }


class counting:
    """How many calls were served from entries of other symbols."""

    def __enter__(self):
        self.served = 0
        self.original = ENGINE.symbolic.normalized.find

        def find(*args):
            found = self.original(*args)
            self.served += found is not None
            return found

        ENGINE.symbolic.normalized.find = find
        return self

    def __exit__(self, *_):
        del ENGINE.symbolic.normalized.find


SIZES = {
    "as before": [(6, 4), (6, 4), (4, 6)],
    "other hints": [(10, 12), (10, 12), (12, 10)],
    "odd": [(9, 7), (9, 7), (7, 3)],
    "square": [(8, 8), (8, 8), (8, 8)],
    "a one": [(6, 1), (6, 4), (4, 1)],
    "a zero": [(0, 4), (6, 4), (4, 6)],
    "unequal": [(6, 4), (5, 4), (4, 2)],
    "large": [(300, 200), (300, 200), (200, 5)],
}


def check(names, kept_for, sizes, **options):
    """A program on an empty cache, and on one that was filled by the same program on other sizes."""
    fake.cache_clear()
    expected = run(names, sizes, **options)
    fake.cache_clear()
    run(names, kept_for)
    with counting() as counted:
        found = run(names, sizes, **options)
    assert found == expected
    return counted.served


@pytest.mark.parametrize("name", STEPS)
def test_one_operator_on_other_sizes(name):
    for number, sizes in enumerate(SIZES.values()):
        check([name], SIZES["as before"], sizes, duck_shape=bool(number % 2))


@pytest.mark.slow
def test_most_operators_are_served():
    served = {name: check([name], SIZES["as before"], SIZES["other hints"]) for name in STEPS}
    unserved = {name for name, count in served.items() if not count}
    assert unserved == {"size as number"}  # a number with a symbol where a tensor may stand has no key


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed):
    choose = random.Random(seed)
    names = choose.choices(list(STEPS), k=8)
    kept_for, sizes = choose.choices(list(SIZES.values()), k=2)
    check(names, kept_for, sizes, duck_shape=choose.random() < 0.5)


FACTS = {
    "a range": {"ranges": [(0, 3, 50)], "duck_shape": False},
    "divisible": {"before": [lambda x, y, w: x.shape[0] % 2 == 0]},
    "an order": {"before": [lambda x, y, w: x.shape[0] > x.shape[1]], "duck_shape": False},
    "an equality": {"before": [lambda x, y, w: x.shape[1] == y.shape[1]], "duck_shape": False},
    "a value": {"before": [lambda x, y, w: x.shape[0] == 6], "duck_shape": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("fact", FACTS)
def test_what_is_known_is_part_of_the_key(fact):
    for name in list(STEPS)[:: 1 if fact == "divisible" else 3]:
        check([name], SIZES["as before"], SIZES["as before"], **FACTS[fact])


def test_suppressed_guards():
    for name in list(STEPS)[::4]:
        check([name], SIZES["as before"], SIZES["odd"], suppress=True)
    fake.cache_clear()
    run(["even"], SIZES["as before"], suppress=True)
    with counting() as counted:
        assert run(["even"], SIZES["as before"])["guards"]
    assert not counted.served


def test_unbacked_sizes_are_dispatched():
    def program():
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode:
            rows = torch.nonzero(torch.ones(6) + 0)
            found = rows * 2
            torch._check(rows.shape[0] >= 3)
            again = rows.view(-1)
        asserts = [str(a.expr) for group in mode.shape_env.deferred_runtime_asserts.values() for a in group]
        return [describe(t) for t in (rows, found, again)], asserts

    fake.cache_clear()
    expected = program()
    with counting() as counted:
        assert program() == expected
    assert not counted.served


def test_facts_about_unbacked_sizes_end_an_entry():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake.cache_clear()
    with mode:
        rows = torch.nonzero(torch.ones(6) + 0)
        rows * 2
        rows * 2
        misses = fake.cache_info().misses
        rows * 2
        assert fake.cache_info().misses == misses
        torch._check(rows.shape[0] == 4)
        assert tuple((rows * 2).shape) == (4, 1)


def test_two_ways_of_one_operator_are_both_kept():
    """Where the hints decide, both outcomes are kept and each call finds its own."""
    fake.cache_clear()
    program = ["halves"]
    for sizes in (SIZES["as before"], SIZES["odd"]):
        run(program, sizes)
    for sizes in (SIZES["other hints"], [(7, 4), (7, 4), (4, 7)]):
        expected = run(program, sizes)
        assert expected == run(program, sizes)


def test_a_replaced_kernel_ends_all_entries():
    """torch goes on calling the replacement after its library is gone: the operator must be used by no other test."""

    def program():
        mode = FakeTensorMode(shape_env=ShapeEnv())
        x, _, _ = inputs(mode, SIZES["as before"])
        with mode:
            torch.special.bessel_j1(x), x + 1

    fake.cache_clear()
    program()
    assert ENGINE.symbolic.normalized.size
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("special_bessel_j1", lambda x: x.new_empty((3,)), "Meta", allow_override=True)
        assert not ENGINE.symbolic.normalized.size
        program()
        assert not ENGINE.symbolic.normalized.size


def test_the_number_of_entries_is_limited():
    fake.cache_clear()
    normalized = ENGINE.symbolic.normalized
    limit, normalized.limit = normalized.limit, 8
    try:
        for number in range(40):
            mode = FakeTensorMode(shape_env=ShapeEnv())
            x, _, _ = inputs(mode, SIZES["as before"])
            with mode:
                x * (number + 0.5)
        assert normalized.size <= 8
    finally:
        normalized.limit = limit


def test_an_environment_that_is_frozen_leaves_no_entry():
    """Its facts may be withdrawn (``patch_source_specialization``), so nothing is kept of what it answers."""
    fake.cache_clear()
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    x, _, _ = inputs(mode, SIZES["as before"])
    with mode:
        environment.freeze()
        x.reshape(-1, 2)
        assert not ENGINE.symbolic.normalized.size
        environment.frozen = False
        x.reshape(-1, 2)
        assert ENGINE.symbolic.normalized.size


def test_remembered_answers_do_not_outlive_a_specialisation():
    """Inside ``patch_source_specialization`` more is known; nothing of it is remembered on the nodes."""

    def program(mode_class):
        environment = ShapeEnv()
        mode = mode_class(shape_env=environment)
        x, _, _ = inputs(mode, SIZES["as before"])
        rows = x.shape[0]
        source = environment.var_to_sources[rows.node.expr][0]
        with environment.patch_source_specialization(source, lambda size: size == 6):
            answers = [bool(rows == 6), bool(rows * 2 > 11), str(rows + 1)]
        answers += [bool(rows == 6), bool(rows * 2 > 11), str(rows + 1), bool(rows * 2 > 10)]
        return answers, [str(guard.expr) for guard in environment.guards]

    assert program(FakeTensorMode) == program(TorchFakeTensorMode)


def test_a_hint_that_is_read_is_a_question():
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    x, _, _ = inputs(mode, SIZES["as before"])
    with record_evaluations(environment) as evaluations:
        x.shape[0] * 2 + 1
        assert not evaluations.expressions
        assert (x.shape[0] * 2).node.hint == 12
    assert [(kind, answer) for kind, _, _, answer in evaluations.expressions] == [("look", 12)]


def test_layouts_that_depend_on_hints():
    """Strides in an order that only the hints tell: what was found at some hints serves no others."""

    def program(sizes):
        mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
        x, y, _ = inputs(mode, [(sizes[0], sizes[1]), (sizes[1], sizes[0]), (2, 2)])
        with mode:
            permuted = x.repeat(3, 1).as_strided(
                (sizes[0], sizes[1], 3), (1, x.shape[0], x.shape[0] * x.shape[1])
            )
            return [describe(t) for t in (permuted + 1, x + y.t(), x.t() * y)]

    for first, second in itertools.permutations([(6, 4), (4, 6), (5, 5)], 2):
        fake.cache_clear()
        expected = program(second)
        fake.cache_clear()
        program(first)
        assert program(second) == expected


@pytest.mark.parametrize("served", [False, True])
def test_guards_name_the_line_that_asked(served):
    """Not one of this package, though its frames stand in between."""
    fake.cache_clear()
    for size in (6, 10) if served else (6,):
        environment = ShapeEnv()
        mode = FakeTensorMode(shape_env=environment)
        x, _, _ = inputs(mode, [(size, 4), (6, 4), (4, 6)])
        with mode:
            x.view(-1, 2)
            bool(x.shape[0] > 5)
    files = [guard.sloc.framework_loc.filename for guard in environment.guards]
    assert len(files) >= 2
    package = os.path.dirname(fake.__file__)
    kernels = os.path.join(package, "kernels")
    assert not any(
        file.startswith((package, "<fake handler")) and not file.startswith(kernels) for file in files
    )
    assert files[-1] == __file__


def test_sizes_that_may_be_empty_are_kept_at_their_hints():
    """Row-major strides of a size that is zero at other hints: the layout there is not taken from here."""

    def program(rows):
        mode = FakeTensorMode(shape_env=ShapeEnv())
        x, _, _ = inputs(mode, [(rows, 4), (6, 4), (4, 6)])
        with mode:
            part = x.new_empty((3, x.shape[0] - 6, 2))
            return [describe(t) for t in (part + 1, part.sum(0), part * part)]

    for first, second in itertools.permutations((6, 8, 9), 2):
        fake.cache_clear()
        expected = program(second)
        fake.cache_clear()
        program(first)
        assert program(second) == expected


def test_threads_in_environments_of_their_own():
    fake.cache_clear()
    expected = {name: run(names, SIZES[name]) for name, names in THREADS.items()}
    fake.cache_clear()
    found: dict[str, list] = {name: [] for name in THREADS}

    def work(name):
        for _ in range(4):
            found[name].append(run(THREADS[name], SIZES[name]))

    workers = [threading.Thread(target=work, args=(name,)) for name in THREADS]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for name, runs in found.items():
        assert runs == [expected[name]] * 4


THREADS = {
    "as before": ["add", "mm", "even", "slice"],
    "other hints": ["even", "add", "cat", "mm"],
    "odd": ["slice", "even", "mm", "softmax"],
}
