"""The dispatch cache itself: counters, bounds, recipes, generated keys, and hits that equal misses over op_db."""

import itertools
import logging
import warnings

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only

import fake
from benchmarks.conformance._torch import op_db
from fake import FakeTensor, FakeTensorMode
from fake.cache.cached_dispatch import Engine
from fake.cache.key import compile_key, plain_key
from fake.cache.recipe import Argument, Constant, Fresh, Sequence, View
from fake.cache.record_recipe import describe as record
from fake.dispatch.steps import dispatch
from fake.mode import ENGINE
from fake.tensors.tensor import Unkeyable
from tests.fake.support import describe

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _empty_cache():
    fake.cache_clear()
    yield
    fake.cache_clear()


def test_counters():
    with FakeTensorMode():
        x = torch.randn(4, 3)
        FakeTensorMode.cache_clear()
        assert fake.cache_info() == FakeTensorMode.cache_info()
        for number in range(3):
            x + x
            info = fake.cache_info()
            assert (info.hits, info.misses, info.size) == (number, 1, 1)
        x.unsqueeze_(0)
        torch._efficientzerotensor(3)
        torch._efficientzerotensor(3)
        (torch.tensor(1.0) + 1)
        assert fake.cache_info().bypasses == {
            "inplace view": 1,
            "dispatch_key_set mismatch": 2,
            "lift": 1,
            "constant attribute": 1,
        }


def test_disabled_cache():
    mode = FakeTensorMode()
    mode.cache_enabled = False
    with mode:
        for _ in range(2):
            assert (torch.ones(3) + 1).shape == (3,)
    info = fake.cache_info()
    assert (info.hits, info.misses) == (0, 0)
    assert info.bypasses == {"cache disabled": 4}
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        assert not FakeTensorMode().cache_enabled


def test_memory_is_bounded():
    engine = Engine(FakeTensor, dispatch, limit=100)
    mode = FakeTensorMode()
    mode._handlers = engine.handlers
    with mode:
        x = torch.ones(3)
        handler = engine.handler(aten.mul.Tensor)
    for number in range(1000):
        handler(mode, aten.mul.Tensor, (), (x, float(number)), {})
        assert engine.store.size <= 100
        assert engine.store.size == sum(map(len, engine.store.tables.values()))
    recent = engine.store.hit_count()
    handler(mode, aten.mul.Tensor, (), (x, 999.0), {})
    assert engine.store.hit_count() == recent + 1


def test_crosscheck_finds_a_wrong_entry():
    mode = FakeTensorMode()
    mode.cache_crosscheck_enabled = True
    with mode:
        x, y = torch.ones(3), torch.ones(4)
        x.sin(), y.sin()
        assert x.sin().shape == (3,)
        table = ENGINE.store.tables[aten.sin.default]
        first, second = list(table)
        table[first], table[second] = table[second], table[first]
        with pytest.raises(fake.CacheCrossCheckError, match=r"aten\.sin"):
            x.sin()


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_a_cross_check_does_not_count(symbolic):
    """Operators that call others, inside the mode and from outside, graphs and plain functions."""
    counts = []
    for crosscheck in (False, True):
        fake.cache_clear()
        mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
        mode.cache_crosscheck_enabled = crosscheck
        x = mode.from_tensor(torch.ones(6, 4))
        for _ in range(3):
            with mode:
                torch._higher_order_ops.invoke_subgraph(lambda x, y: (x + y * 2,), "graph", x, x)
                torch.nn.functional.huber_loss(x, x * 2).sin()
                aten.native_batch_norm_backward(x, x, None, None, None, x[0], x[0], True, 1e-5, [True] * 3)
            (x + 1).cos_()
        counts.append(fake.cache_info())
    assert counts[0] == counts[1]
    assert counts[0].hits > 10


def test_a_cross_check_dispatches_each_hit_once(monkeypatch):
    dispatched = []
    original = ENGINE.dispatch
    monkeypatch.setattr(
        ENGINE,
        "dispatch",
        lambda mode, func, *rest: (dispatched.append(func), original(mode, func, *rest))[1],
    )
    mode = FakeTensorMode()
    mode.cache_crosscheck_enabled = True
    x = mode.from_tensor(torch.ones(6, 4))
    for _ in range(3):
        del dispatched[:]
        x.sin()
        assert dispatched == [aten.sin.default]


def test_a_cross_check_finds_what_is_served_and_refused_otherwise(monkeypatch):
    mode = FakeTensorMode()
    mode.cache_crosscheck_enabled = True
    with mode:
        x = torch.ones(3)
        x.sin()

        def refuse(*_):
            raise ValueError("not this one")

        monkeypatch.setattr(ENGINE, "dispatch", refuse)
        with pytest.raises(fake.CacheCrossCheckError, match="fresh dispatch raises ValueError"):
            x.sin()


def test_recipes_say_what_was_seen():
    with FakeTensorMode():
        x = torch.ones(4, 6)
        out = torch.empty(4, 6)
        with fake.unset_fake_temporarily():
            cases = [
                (aten.sin.default, (x,), {}),
                (aten.t.default, (x,), {}),
                (aten.add_.Tensor, (x, 1), {}),
                (aten.split.Tensor, (x, 2), {}),
                (aten.sin.out, (x,), {"out": out}),
                (aten.native_layer_norm.default, (x, [6], None, None, 1e-5), {}),
                (aten.view.dtype, (x, torch.int32), {}),
            ]
            recipes = []
            for func, args, kwargs in cases:
                result = dispatch(x.fake_mode, func, (), args, kwargs)
                recipes.append(record(func, args, kwargs, result, FakeTensor))
    fresh, view, same, split, given, norm, bits = recipes
    assert type(fresh) is Fresh
    assert type(view) is View
    assert view.path == (0,)
    assert same == Argument((0,))
    assert type(split) is Sequence
    assert [type(item) for item in split.items] == [View, View]
    assert given == Argument(("out",))
    assert [type(item) for item in norm.items] == [Fresh] * 3
    assert not bits.same_dtype
    assert record(aten.sin.default, (), {}, None, FakeTensor) == Constant(None)
    with pytest.raises(Unkeyable, match="non-FakeTensor"):
        record(aten.sin.default, (), {}, torch.ones(2), FakeTensor)


def test_two_inputs_over_one_storage_are_not_guessed():
    with FakeTensorMode():
        x = torch.ones(6)
        y = x[:3]
        with fake.unset_fake_temporarily(), pytest.raises(Unkeyable, match="ambiguous"):
            record(
                aten.where.self, (x, y), {}, x.fake_mode.dispatch(aten.view.default, (), (x, [6])), FakeTensor
            )


def compiled(func, mode, args, kwargs):
    source, names = compile_key(func, FakeTensor)
    code = "def key_of(func, mode, args, kwargs, {}):\n    if True:\n{}    return key".format(
        ", ".join(names), source
    )
    namespace = {}
    exec(code, namespace)
    return namespace["key_of"](func, mode, args, kwargs, **names)


def key_or_refusal(build):
    try:
        return build()
    except (Unkeyable, TypeError, AttributeError):
        return None


def test_generated_keys_distinguish_what_plain_keys_do():
    """Two calls have equal generated keys exactly if they have equal plain keys."""
    mode = FakeTensorMode()
    with mode:
        x, y, wide = torch.ones(4, 3), torch.ones(3, 4), torch.ones(4, 3, dtype=torch.float64)
        z = torch.ones(4, 3, requires_grad=True)
        calls = {
            aten.add.Tensor: [
                *itertools.product((x, z, wide, x.t()), (x, y, 1, 1.0, True, 2)),
                ((x, x), {"alpha": 1}),
                ((x, x), {"alpha": 1.0}),
                ((x, x), {"alpha": 2}),
            ],
            aten.view.default: [(x, [12]), (x, (12,)), (x, [4, 3]), (x, [-1]), (y, [12])],
            aten.sum.dim_IntList: [
                (x, [0]),
                (x, [1]),
                (x, None),
                (x, [0], True),
                (x, [0], False),
                ((x, [0]), {"dtype": torch.float64}),
                ((x, [0]), {"dtype": torch.float32}),
            ],
            aten.cat.default: [([x, x],), ([x, z],), ([x],), ([x, x], 1), ([x, x], 0)],
            aten.index.Tensor: [(x, [None, y]), (x, [y, None]), (x, [y])],
            aten.empty.memory_format: [
                ([3],),
                ([4],),
                (([3],), {"dtype": torch.float16}),
                (([3],), {"device": torch.device("cuda")}),
                (([3],), {"pin_memory": False}),
            ],
            aten.clamp.default: [(x, 0, 1), (x, 0.0, 1), (x, None, 1), (x, 0, None), (x,)],
            aten.sin.out: [((x,), {"out": x}), ((x,), {"out": y}), ((wide,), {"out": x})],
            aten.div.Tensor_mode: [
                ((x, x), {"rounding_mode": "floor"}),
                ((x, x), {"rounding_mode": "trunc"}),
            ],
        }
        compared = 0
        for func, cases in calls.items():
            keys = []
            for case in cases:
                has_kwargs = len(case) == 2 and isinstance(case[0], tuple) and isinstance(case[1], dict)
                args, kwargs = case if has_kwargs else (case, {})
                keys.append(
                    (
                        plain_key(func, mode, args, kwargs),
                        key_or_refusal(lambda f=func, a=args, k=kwargs: compiled(f, mode, a, k)),
                    )
                )
            for (plain_a, fast_a), (plain_b, fast_b) in itertools.combinations(keys, 2):
                assert (plain_a == plain_b) == (fast_a == fast_b), (func, plain_a, plain_b)
                compared += 1
    assert compared > 100


SAMPLE = [op for op in op_db() if op.name not in ("nn.functional.ctc_loss",)][::6]


@pytest.mark.parametrize("op", SAMPLE, ids=lambda op: f"{op.name}-{op.variant_test_name}")
def test_hits_equal_misses(op):
    """Forward and backward of samples of every sixth operator: twice with the cache, once without."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    dtype = next((d for d in (torch.float32, torch.int64) if d in op.supported_dtypes("cpu")), None)
    if dtype is None:
        pytest.skip("neither float32 nor int64")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(
            itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=dtype.is_floating_point), 3)
        )
        for sample in samples:
            cold, *warm = [run(op, sample, enabled) for enabled in (False, True, True)]
            assert warm == [cold, cold]


def run(op, sample, cache_enabled):
    mode = FakeTensorMode()
    mode.cache_enabled = cache_enabled
    value, args, kwargs = tree_map_only(
        torch.Tensor, mode.from_tensor, (sample.input, sample.args, sample.kwargs)
    )
    inputs = tuple(tree_leaves((value, args, kwargs)))
    try:
        with mode:
            outputs = tree_leaves(op(value, *args, **kwargs))
            differentiable = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
            wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
            if differentiable and wanted:
                ones = [torch.ones_like(t) for t in differentiable]
                outputs += torch.autograd.grad(differentiable, wanted, ones, allow_unused=True)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError) as error:
        return type(error).__name__
    return [describe(output, inputs) for output in outputs]
