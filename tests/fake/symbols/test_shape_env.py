"""``fake.ShapeEnv`` answers as torch's does, for every kind of symbol."""

from __future__ import annotations

import copy

import pytest
import sympy
import torch
from torch._dynamo.source import LocalSource
from torch.fx.experimental import symbolic_shapes as torch_shapes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic

import fake
from fake.errors import ContractError, ShapeEnvError

ENVIRONMENTS = [torch_shapes.ShapeEnv, fake.ShapeEnv]


def modes(**settings):
    """The same mode over torch's environment and over ours."""
    return [fake.FakeTensorMode(shape_env=kind(**settings)) for kind in ENVIRONMENTS]


def shapes_of(*tensors):
    return [(tuple(map(str, t.shape)), tuple(map(str, t.stride())), str(t.storage_offset())) for t in tensors]


def same_in_both(run, **settings):
    """``run(mode)`` gives the same over both environments; returns that."""
    theirs, ours = (run(mode) for mode in modes(**settings))
    assert ours == theirs
    return ours


def test_it_is_one_of_torchs():
    assert issubclass(fake.ShapeEnv, torch_shapes.ShapeEnv)
    assert fake.ShapeEnv(duck_shape=False, specialize_zero_one=False).settings == (
        torch_shapes.ShapeEnv(duck_shape=False, specialize_zero_one=False).settings
    )


@pytest.mark.parametrize("duck", [True, False])
def test_duck_shaping_gives_equal_sizes_one_symbol(duck):
    def run(mode):
        x = mode.from_tensor(torch.zeros(4, 5), source=LocalSource("x"))
        y = mode.from_tensor(torch.zeros(5, 4), source=LocalSource("y"))
        return shapes_of(x, y), str(x.shape[0]) == str(y.shape[1])

    assert same_in_both(run, duck_shape=duck)[1] is duck


def test_sizes_of_zero_and_one_are_constants():
    def run(mode):
        return shapes_of(mode.from_tensor(torch.zeros(0, 1, 5), source=LocalSource("x")))

    ((shape, *_),) = same_in_both(run)
    assert shape[:2] == ("0", "1")
    assert not shape[2].isdigit()


def test_without_specialization_a_size_may_be_one():
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv(specialize_zero_one=False))
    x = mode.from_tensor(torch.zeros(1, 5), name="x")
    assert isinstance(x.shape[0], torch.SymInt)
    assert fake.facts_of(x.shape[0]).min == 0


def test_each_dimension_has_its_policy():
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    x = mode.from_tensor(
        torch.zeros(4, 4, 4, 4, 4), name="x", dims={0: "auto", 1: "auto", 2: "dynamic", 3: "unbacked"}
    )
    auto, also_auto, dynamic, unbacked, static = x.shape
    assert str(auto) == str(also_auto) != str(dynamic)
    assert static == 4
    assert isinstance(static, int)
    facts = fake.facts_of(unbacked)
    assert facts.unbacked
    assert facts.size_like


def test_static_shapes_make_plain_sizes():
    def run(mode):
        return shapes_of(mode.from_tensor(torch.zeros(4, 5), static_shapes=True))

    ((shape, *_),) = same_in_both(run)
    assert shape == ("4", "5")


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({3: "dynamic"}, r"dims\[3\]"),
        ({0: "often"}, "one of static, auto, dynamic, unbacked"),
        ({"0": "dynamic"}, "no dimension"),
        (["dynamic"], "must map dimensions"),
        ({0: 7}, "not 7"),
    ],
)
def test_wrong_policies_are_refused(dims, message):
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    with pytest.raises(ContractError, match=message):
        mode.from_tensor(torch.zeros(4, 5), name="x", dims=dims)
    assert not mode.shape_env.var_to_sources, "nothing was made before the refusal"


def test_arithmetic_comparisons_and_hints_agree_with_torch():
    def run(mode):
        x = mode.from_tensor(torch.zeros(6, 5), source=LocalSource("x"))
        a, b = x.shape
        values = [
            a + b, a - b, a * b, a // 2, a % 4, -a, 2 * a + 3 * b, a // b, max(a, 3), torch.sym_max(a, b),
            torch.sym_min(a, b), torch.sym_int(a / 2), torch.sym_float(a), a**2, abs(b - a),
        ]  # fmt: skip
        return [(str(v), v.node.hint) for v in values if not isinstance(v, int)], str(mode.shape_env.guards)

    same_in_both(run)


def test_ranges_divisibility_and_equalities_are_learnt():
    def run(mode):
        env = mode.shape_env
        x = mode.from_tensor(torch.zeros(8, 6, 8), source=LocalSource("x"))
        y = mode.from_tensor(torch.zeros(16, 12), source=LocalSource("y"))
        a, b, _ = x.shape
        c, d = y.shape
        assert a % 4 == 0
        assert b > 3
        assert c == 2 * a
        assert d < 100
        known = [
            torch_shapes.statically_known_true(condition)
            for condition in (
                a % 4 == 0,
                a % 2 == 0,
                a > 1,
                b >= 4,
                b >= 5,
                c == 2 * a,
                c % 8 == 0,
                d <= 99,
                d == 5,
            )
        ]
        return known, str(env.replace(c.node.expr)), str(env.replacements), str(env.divisible)

    known, *_ = same_in_both(run)
    assert known == [True, False, True, True, False, True, False, True, False]


def test_equal_sizes_become_one_through_a_chain():
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv(duck_shape=False))
    tensors = [mode.from_tensor(torch.zeros(5), name=name) for name in "xyz"]
    with mode:
        tensors[0] + tensors[1]
        tensors[1] + tensors[2]
    first, *others = (t.shape[0].node.expr for t in tensors)
    assert all(other == first for other in others)


def test_floats_and_booleans():
    def run(mode):
        env = mode.shape_env
        source = LocalSource("f")
        symbol = env.create_unspecified_symbol(2.5, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        number = env.create_symfloatnode(symbol, hint=2.5, source=source)
        doubled = number * 2
        answer = bool(doubled > 4.0)
        unbacked = env.create_unbacked_symfloat()
        flag = env.create_unbacked_symbool()
        return [
            str(doubled.node.expr), doubled.node.hint, answer, str([g.expr for g in env.guards]),
            type(unbacked).__name__, type(flag).__name__, torch_shapes.guard_or_false(flag),
            torch_shapes.guard_or_true(unbacked > 1.0),
        ]  # fmt: skip

    results = same_in_both(run)
    assert results[-2:] == [False, True]


def test_a_float_guard_is_kept_and_told():
    env = fake.ShapeEnv()
    source = LocalSource("f")
    symbol = env.create_unspecified_symbol(2.5, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    number = env.create_symfloatnode(symbol, hint=2.5, source=source)
    assert number > 2.0
    guards = env.guards.minimal()
    assert [guard.expression for guard in guards] == ["f > 2.0"]
    accepts = guards.compile()
    assert accepts(3.0)
    assert not accepts(1.0)


def test_nested_integers():
    def run(mode):
        nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged)
        made = mode.from_tensor(nested, source=LocalSource("x"))
        return [str(s) for s in made.shape], torch_shapes.is_nested_int(made.shape[1])

    same_in_both(run)


def test_a_copied_environment_explains_itself():
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    x = mode.from_tensor(torch.zeros(6, 5), name="x")
    assert x.shape[0] > x.shape[1]
    copied = copy.deepcopy(mode.shape_env)
    assert copied.guards is not mode.shape_env.guards
    assert copied.guards.shape_env is copied
    assert str(copied.guards.minimal()) == str(mode.shape_env.guards.minimal())


def test_suppressed_guards_leave_no_trace():
    env = fake.ShapeEnv()
    x = fake.FakeTensorMode(shape_env=env).from_tensor(torch.zeros(6, 5), name="x")
    before = str(env.guards.minimal())
    with env.suppress_guards():
        assert x.shape[0] > x.shape[1]
    assert str(env.guards.minimal()) == before
    assert all(guard.kind in ("layout", "range") for guard in env.guards.minimal())


def test_adoption_keeps_symbols_and_goes_both_ways():
    theirs = torch_shapes.ShapeEnv()
    mode = fake.FakeTensorMode(shape_env=theirs)
    x = mode.from_tensor(torch.zeros(6, 5), source=LocalSource("x"))
    assert x.shape[0] > 3
    ours = fake.ShapeEnv.adopt(theirs)
    assert ours is theirs, "one object: whoever holds the environment sees the same guards"
    assert isinstance(theirs, fake.ShapeEnv)
    assert x.shape[0] % 2 == 0
    assert len(theirs.guards) == 2
    assert theirs.replace(x.shape[0].node.expr) == x.shape[0].node.expr
    assert "x.size(0) % 2 == 0" in str(ours.guards.minimal())
    produced = theirs.produce_guards([x], [LocalSource("x")])
    assert any("% 2" in guard for guard in produced)
    assert fake.ShapeEnv.adopt(ours) is ours


def test_only_torchs_own_environment_is_adopted():
    class Other(torch_shapes.ShapeEnv):
        pass

    with pytest.raises(ShapeEnvError, match="Other"):
        fake.ShapeEnv.adopt(Other())
    with pytest.raises(ShapeEnvError, match="events"):
        fake.ShapeEnv.adopt(torch_shapes.ShapeEnv(should_record_events=True))


def test_make_fx_traces_with_it():
    def f(x, y):
        return (x.reshape(-1, 2) @ y).sum(0)

    graphs = []
    for mode in modes():
        x = mode.from_tensor(torch.zeros(4, 6), source=LocalSource("x"))
        y = mode.from_tensor(torch.zeros(2, 3), source=LocalSource("y"))
        with mode:
            graphs.append(make_fx(f, tracing_mode="real")(x, y))
    assert graphs[0].code == graphs[1].code
    assert torch.equal(graphs[1](torch.ones(4, 6), torch.ones(2, 3)), f(torch.ones(4, 6), torch.ones(2, 3)))


def test_export_works_with_it():
    class Model(torch.nn.Module):
        def forward(self, x):
            return x.flatten(1).sum(0)

    batch = torch.export.Dim("batch", min=2, max=100)
    with fake.using_shape_env():
        program = torch.export.export(Model(), (torch.ones(4, 3, 2),), dynamic_shapes={"x": {0: batch}})
    assert torch.equal(program.module()(torch.ones(7, 3, 2)), torch.full((6,), 7.0))
    with fake.using_shape_env(), pytest.raises(Exception, match=r"batch|size"):
        torch.export.export(
            _OnlyFour(),
            (torch.ones(4, 3),),
            dynamic_shapes={"x": {0: torch.export.Dim("batch", min=2, max=100)}},
        )


class _OnlyFour(torch.nn.Module):
    def forward(self, x):
        return x.view(4, -1) + x.shape[0]


def test_a_replaced_symbol_is_simplified_in_old_expressions():
    env = fake.ShapeEnv(duck_shape=False)
    mode = fake.FakeTensorMode(shape_env=env)
    x, y = (mode.from_tensor(torch.zeros(6), name=name) for name in "xy")
    total = x.shape[0] + y.shape[0]
    with mode:
        x + y
    assert total.node.expr == 2 * x.shape[0].node.expr
    assert env.simplify(sympy.Mod(total.node.expr, 2)) == 0
