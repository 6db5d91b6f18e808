"""Adversarial: two calls that differ in exactly one thing that matters must not share an entry."""

import contextlib

import pytest
import torch

import fake
from tests.fake.support import assert_cache_tells_apart, describe

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _empty_cache():
    fake.cache_clear()
    yield
    fake.cache_clear()


@pytest.fixture
def mode():
    with fake.FakeTensorMode() as mode:
        yield mode


def test_default_dtype(mode):
    x = torch.ones(3, dtype=torch.int32)

    def add(dtype):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return x + 1.0
        finally:
            torch.set_default_dtype(before)

    assert_cache_tells_apart(lambda: add(torch.float32), lambda: add(torch.float64))


def test_default_device(mode):
    def make(device):
        torch.set_default_device(device)
        try:
            return torch.empty(3)
        finally:
            torch.set_default_device(None)

    assert_cache_tells_apart(lambda: make("cpu"), lambda: make("cuda"))


def test_inference_mode(mode):
    x = torch.ones(3)

    def add(enabled):
        with torch.inference_mode(enabled):
            return x + x

    assert_cache_tells_apart(lambda: add(True), lambda: add(False))


def test_an_inference_tensor_is_not_a_normal_one(mode):
    with torch.inference_mode():
        inference = torch.ones(3, 4)
    normal = torch.ones(3, 4)
    assert_cache_tells_apart(lambda: inference.view(12), lambda: normal.view(12))


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), (0, 0.0), (2, 2.0), (1.0, 1 + 0j)], ids=str)
def test_type_of_a_constant(mode, one, other):
    x = torch.ones(3, dtype=torch.bool)
    assert_cache_tells_apart(lambda: aten.mul(x, one), lambda: aten.mul(x, other))


def test_type_of_a_keyword_constant(mode):
    x, y = torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64)
    assert_cache_tells_apart(lambda: aten.add(x, y, alpha=1), lambda: aten.add(x, y, alpha=1.0))


def test_value_of_a_constant(mode):
    x = torch.ones(4, 6)
    assert_cache_tells_apart(lambda: x.sum(0), lambda: x.sum(1))
    assert_cache_tells_apart(lambda: x.sum(0, keepdim=True), lambda: x.sum(0, keepdim=False))


def test_keyword_or_position_name_the_same_argument(mode):
    x = torch.ones(4, 6)
    assert_cache_tells_apart(
        lambda: aten.sum.dim_IntList(x, [0], keepdim=True),
        lambda: aten.sum.dim_IntList(x, [0], keepdim=False),
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: torch.ones(4, 3), lambda: torch.ones(4, 2)),
        (lambda: torch.ones(4, 3), lambda: torch.ones(4, 3, dtype=torch.float16)),
        (lambda: torch.ones(4, 3), lambda: torch.ones(4, 3, device="cuda")),
        (lambda: torch.ones(4, 3), lambda: torch.ones(3, 4).t()),
        (
            lambda: torch.ones(2, 3, 4, 5),
            lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        ),
    ],
    ids=["shape", "dtype", "device", "stride", "memory format"],
)
def test_metadata_of_the_input(mode, one, other):
    a, b = one(), other()
    assert_cache_tells_apart(lambda: a * 2, lambda: b * 2)


def test_stride_of_a_broadcast_input(mode):
    a, b = torch.ones(4, 3), torch.ones(1, 3).expand(4, 3)
    assert_cache_tells_apart(lambda: a.view(2, 2, 3), lambda: b.view(2, 2, 3))


def test_storage_offset_of_a_view(mode):
    whole = torch.ones(8)
    a, b = whole[:4], whole[4:]
    assert_cache_tells_apart(lambda: a.view(2, 2), lambda: b.view(2, 2))


def test_storage_size_where_an_operator_checks_it(mode):
    small, large = torch.empty(4), torch.empty(100)[:4]
    assert_cache_tells_apart(lambda: small.as_strided((50,), (1,)), lambda: large.as_strided((50,), (1,)))


def test_storage_that_grows_under_a_view(mode):
    base = torch.empty(10)
    view = base[:4]
    key = mode._cache_key(aten.as_strided.default, [view, (4,), (1,)], {})
    base.resize_(100)
    assert mode._cache_key(aten.as_strided.default, [view, (4,), (1,)], {}) != key


def test_conjugate_bit(mode):
    x = torch.randn(3, dtype=torch.complex64)
    y = torch.randn(3, dtype=torch.complex64)
    torch._C._set_conj(y, True)
    assert_cache_tells_apart(lambda: x.view(3, 1), lambda: y.view(3, 1))


def test_conjugate_bit_flipped_in_place(mode):
    x = torch.randn(3, dtype=torch.complex64)
    before = describe(x.view(3, 1))
    torch._C._set_conj(x, True)
    assert describe(x.view(3, 1))["conj"]
    torch._C._set_conj(x, False)
    assert describe(x.view(3, 1)) == before


def test_negative_bit(mode):
    x, y = torch.randn(3), torch.randn(3)
    torch._C._set_neg(y, True)
    assert_cache_tells_apart(lambda: x.view(3, 1), lambda: y.view(3, 1))


def test_requires_grad_is_in_the_key(mode):
    x = torch.randn(3)
    y = torch.randn(3, requires_grad=True)
    assert mode._cache_key(aten.sin.default, [x], {}) != mode._cache_key(aten.sin.default, [y], {})


@pytest.mark.parametrize(
    "change",
    [
        torch.no_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch._dispatch.python.enable_python_dispatcher(),
        lambda: _deterministic(),
        torch.inference_mode,
    ],
    ids=["grad mode", "autocast", "python dispatcher", "deterministic", "inference mode"],
)
def test_thread_state_is_in_the_key(mode, change):
    import torch._dispatch.python

    x = torch.randn(3)
    outside = mode._cache_key(aten.sin.default, [x], {})
    with change():
        inside = mode._cache_key(aten.sin.default, [x], {})
    assert inside != outside
    assert mode._cache_key(aten.sin.default, [x], {}) == outside


@contextlib.contextmanager
def _deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_autocast_inside_a_decomposition(mode):
    x, w = torch.randn(2, 3), torch.randn(4, 3)

    def linear(enabled):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            return torch.nn.functional.linear(x, w)

    assert_cache_tells_apart(lambda: linear(True), lambda: linear(False))


def test_autocast_dtype(mode):
    x, w = torch.randn(2, 3), torch.randn(4, 3)

    def linear(dtype):
        with torch.autocast("cpu", dtype=dtype):
            return torch.nn.functional.linear(x, w)

    assert_cache_tells_apart(lambda: linear(torch.bfloat16), lambda: linear(torch.float16))


def test_settings_of_the_mode():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    tokens = set()
    for settings in (
        {},
        {"allow_fallback_kernels": True},
        {"shape_env": ShapeEnv()},
        {"shape_env": ShapeEnv(duck_shape=False)},
        {"shape_env": ShapeEnv(), "static_shapes": True},
    ):
        mode = fake.FakeTensorMode(**settings)
        with mode:
            tokens.add(mode._cache_key(aten.sin.default, [torch.ones(3)], {}))
    assert len(tokens) == 5


def test_a_setting_changed_later(mode):
    x = torch.ones(3)
    before = mode._cache_key(aten.sin.default, [x], {})
    mode.allow_fallback_kernels = not mode.allow_fallback_kernels
    assert mode._cache_key(aten.sin.default, [x], {}) != before


def test_a_fallback_answer_is_not_given_to_a_mode_that_forbids_it():
    def histogram(mode):
        with mode:
            return torch.histogram(torch.ones(4), 3)

    class Forbids(fake.FakeTensorMode):
        def can_run_unsafe_fallback(self, func):
            return False

    allowed = fake.FakeTensorMode(allow_fallback_kernels=True)
    forbidden = fake.FakeTensorMode(allow_fallback_kernels=False)
    if describe(histogram(allowed)[0]) is None:
        pytest.skip("no fallback")
    with contextlib.suppress(fake.UnsupportedOperatorException):
        cold = describe(histogram(forbidden)[0])
        fake.cache_clear()
        assert describe(histogram(forbidden)[0]) == cold


def test_resize_is_seen(mode):
    x = torch.ones(4)
    assert (x + 1).shape == (4,)
    x.resize_(2, 3)
    assert (x + 1).shape == (2, 3)


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        (lambda x: x.unsqueeze_(0), (1, 2, 3)),
        (lambda x: x.t_(), (3, 2)),
        (lambda x: x.transpose_(0, 1), (3, 2)),
        (lambda x: x.set_(torch.ones(5)), (5,)),
        (lambda x: x.as_strided_((6,), (1,)), (6,)),
        (lambda x: setattr(x, "data", torch.ones(7)), (7,)),
        (lambda x: torch.add(torch.ones(4), 1, out=x.resize_(0)), (4,)),
        (lambda x: x.resize_as_(torch.ones(9)), (9,)),
    ],
    ids=["unsqueeze_", "t_", "transpose_", "set_", "as_strided_", ".data", "out=", "resize_as_"],
)
def test_metadata_changed_in_place_is_seen(mode, change, shape):
    x = torch.ones(2, 3)
    assert (x * 2).shape == (2, 3)
    change(x)
    assert x.shape == shape
    assert (x * 2).shape == shape
    assert x.as_strided((1,), (1,)).untyped_storage()._cdata == x.untyped_storage()._cdata


def test_views_follow_a_replaced_storage(mode):
    x = torch.ones(4)
    x.view(2, 2)
    x.data = torch.ones(4)
    y = x.view(2, 2)
    assert y.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_a_constant_is_not_served_as_an_unknown_value(mode):
    known, unknown = torch.tensor(3.0), torch.ones(())
    (unknown + 1)
    assert (known + 1).item() == 4.0


def test_tensors_of_another_mode_are_refused_after_a_hit(mode):
    x = torch.ones(3)
    (x + x)
    with fake.FakeTensorMode():
        other = torch.ones(3)
    with pytest.raises(AssertionError, match="Mixing fake modes"):
        x + other


def test_real_tensors_are_refused_after_a_hit():
    real = torch.ones(3)
    with fake.FakeTensorMode():
        x = torch.ones(3)
        (x + x)
        with pytest.raises(AssertionError, match="Please convert all Tensors"):
            x + real


def test_two_arguments_over_one_storage(mode):
    """Which argument a view shares its storage with must not be guessed from one lucky observation."""
    base = torch.ones(6)
    a, b = base[:3], base[3:]
    for x, y in ((a, b), (torch.ones(6)[:3], torch.ones(6)[3:])):
        out = x.view_as(y)
        assert out.untyped_storage()._cdata == x.untyped_storage()._cdata
        out = torch.ops.aten.where.self(x > 0, x, y)
        assert out.untyped_storage()._cdata not in (x.untyped_storage()._cdata, y.untyped_storage()._cdata)


def test_kernel_registered_again_is_used():
    with torch.library._scoped_library("fake_cache_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        op = torch.ops.fake_cache_test.twice.default
        torch.library.register_fake("fake_cache_test::twice", lambda x: x.new_empty(x.shape), lib=library)
        for cached in (False, True):
            with fake.FakeTensorMode(cache_custom_ops=cached):
                x = torch.ones(3)
                for _ in range(3):
                    assert op(x).shape == (3,)
        torch.library.register_fake(
            "fake_cache_test::twice", lambda x: x.new_empty(2 * x.shape[0]), lib=library, allow_override=True
        )
        for cached in (False, True):
            with fake.FakeTensorMode(cache_custom_ops=cached):
                x = torch.ones(3)
                for _ in range(3):
                    assert op(x).shape == (6,)


def test_custom_operators_are_not_cached_unless_asked_for():
    state = {"size": 3}
    with torch.library._scoped_library("fake_cache_test", "FRAGMENT") as library:
        library.define("impure(Tensor x) -> Tensor")
        torch.library.register_fake(
            "fake_cache_test::impure", lambda x: x.new_empty(state["size"]), lib=library
        )
        with fake.FakeTensorMode():
            x = torch.ones(3)
            for size in (3, 4, 5):
                state["size"] = size
                assert torch.ops.fake_cache_test.impure(x).shape == (size,)
        assert fake.cache_info().bypasses["non-builtin"] == 3


SYMBOLIC_CALLS = {
    "float": lambda x, number, flag: aten.native_dropout(x, number, True)[0],
    "keyword": lambda x, number, flag: aten.linalg_matrix_rank(x, tol=number),
    "number": lambda x, number, flag: aten.leaky_relu(x, number),
    "list": lambda x, number, flag: aten.upsample_nearest2d.vec(x[None, None], None, [number, number]),
    "flag": lambda x, number, flag: aten.sum.dim_IntList(x, [0], flag),
}


@pytest.mark.parametrize("call", SYMBOLIC_CALLS)
def test_symbolic_floats_and_flags_stay_out_of_the_tables_of_the_process(call):
    """They belong to one shape environment; two of them must never be compared."""
    for _ in range(2):
        mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
        x = mode.from_tensor(torch.zeros(8, 6), name="x")
        number, flag = torch.sym_float(x.shape[0]) * 0.5, x.shape[0] > 3
        with mode:
            result = SYMBOLIC_CALLS[call](x, number, flag)
        assert isinstance(result, fake.FakeTensor)
