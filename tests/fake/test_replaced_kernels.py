"""Kernels registered through ``torch.library`` over torch's own: no answer from before or after may be served.

The operators are ones that no other test uses: torch goes on calling a kernel for fake tensors after it was withdrawn.
"""

import gc
import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import _scoped_library

import fake
from fake.cache.replacements import REPLACEMENTS
from fake.kernels import rule_registry
from tests.fake.support import describe, dynamic, symbolic_mode

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _empty_cache():
    fake.cache_clear()
    yield
    fake.cache_clear()
    assert not REPLACEMENTS.any_builtin


def register_fake(library, name, shape):
    torch.library.register_fake(name, lambda x, *_: x.new_empty(shape), lib=library, allow_override=True)


def test_a_fake_kernel_for_a_builtin_operator_is_used_and_withdrawn():
    with fake.FakeTensorMode():
        x = torch.ones(3)
        for shape in ((7,), (8,)):
            for _ in range(2):
                assert aten.special_bessel_j0(x).shape == (3,)
            with _scoped_library("aten", "IMPL") as library:
                register_fake(library, "aten::special_bessel_j0", shape)
                for _ in range(2):
                    assert aten.special_bessel_j0(x).shape == shape
                assert REPLACEMENTS.includes(aten.special_bessel_j0.default)
                assert not REPLACEMENTS.includes(aten.special_bessel_y0.default)
        assert aten.special_bessel_j0(x).shape == (3,)


def test_a_second_fake_kernel_takes_over_from_the_first():
    with fake.FakeTensorMode(), _scoped_library("aten", "IMPL") as library:
        x = torch.ones(3)
        for size in (5, 6, 5):
            register_fake(library, "aten::special_bessel_j1", size)
            for _ in range(2):
                assert aten.special_bessel_j1(x).shape == (size,)


def test_a_meta_kernel_is_used_and_withdrawn():
    with fake.FakeTensorMode():
        x = torch.ones(3, 3)
        for _ in range(2):
            assert aten.special_hermite_polynomial_h(x, x).shape == (3, 3)
        with _scoped_library("aten", "IMPL") as library:
            library.impl(
                "special_hermite_polynomial_h", lambda a, b: a.new_empty(5), "Meta", allow_override=True
            )
            for _ in range(2):
                assert aten.special_hermite_polynomial_h(x, x).shape == (5,)
        assert aten.special_hermite_polynomial_h(x, x).shape == (3, 3)


def test_the_cache_forgets_other_operators_too():
    """They may decompose into the one that was replaced."""
    with fake.FakeTensorMode():
        x = torch.ones(3)
        torch.exp(x)
        with _scoped_library("aten", "IMPL") as library:
            register_fake(library, "aten::special_bessel_y1", (7,))
            assert fake.cache_info().size == 0
            torch.exp(x)
        assert fake.cache_info().size == 0


def test_a_library_that_is_collected_takes_its_kernels_along():
    with fake.FakeTensorMode():
        x = torch.ones(3)
        library = torch.library.Library("aten", "IMPL")
        library.impl("special_modified_bessel_i0", lambda x: x.new_empty(4), "Meta", allow_override=True)
        assert aten.special_modified_bessel_i0(x).shape == aten.special_modified_bessel_i0(x).shape == (4,)
        del library
        gc.collect()
        assert aten.special_modified_bessel_i0(x).shape == (3,)


def test_symbolic_entries_go_too():
    mode = symbolic_mode()
    x = dynamic(mode, torch.ones(3))
    with mode:
        before = [describe(aten.special_modified_bessel_i1(x)) for _ in range(2)]
        assert before[0] == before[1]
        with _scoped_library("aten", "IMPL") as library:
            register_fake(library, "aten::special_modified_bessel_i1", (9,))
            assert aten.special_modified_bessel_i1(x).shape == (9,)


def test_accelerated_modes_notice():
    with fake.accelerate(), torch._subclasses.FakeTensorMode():
        x = torch.ones(3)
        for _ in range(2):
            assert aten.special_modified_bessel_k0(x).shape == (3,)
        with _scoped_library("aten", "IMPL") as library:
            register_fake(library, "aten::special_modified_bessel_k0", (7,))
            assert aten.special_modified_bessel_k0(x).shape == (7,)


def test_a_known_graph_is_propagated_again():
    graph = make_fx(lambda x: aten.special_modified_bessel_k1(x).cos())(torch.ones(3))
    mode = fake.FakeTensorMode()
    x = mode.from_tensor(torch.ones(3))
    run = fake.FakeTensorProp(graph, mode).propagate_dont_convert_inputs
    assert run(x).shape == run(x).shape == (3,)
    with _scoped_library("aten", "IMPL") as library:
        register_fake(library, "aten::special_modified_bessel_k1", (7,))
        assert run(x).shape == (7,)
    assert run(x).shape == (3,)


def test_the_disk_is_left_alone_meanwhile(tmp_path):
    fake.cache_clear()  # what is known already need not be written
    fake.enable_disk_cache(tmp_path)
    try:
        with fake.FakeTensorMode(), _scoped_library("aten", "IMPL") as library:
            register_fake(library, "aten::special_airy_ai", (7,))
            aten.special_airy_ai(torch.ones(3))
            assert fake.save_disk_cache() is None
        with fake.FakeTensorMode():
            aten.special_airy_ai(torch.ones(3))
        assert fake.save_disk_cache() is not None
    finally:
        fake.disable_disk_cache()


def test_kernels_of_new_operators_leave_the_cache_alone():
    with fake.FakeTensorMode():
        x = torch.ones(3)
        x.new_empty((2,)).add_(x.new_empty((2,)))
        size = fake.cache_info().size
        with _scoped_library("fake_replaced_test", "FRAGMENT") as library:
            library.define("f(Tensor x) -> Tensor")
            register_fake(library, "fake_replaced_test::f", (2,))
            assert torch.ops.fake_replaced_test.f(x).shape == (2,)
        assert fake.cache_info().size == size


BEFORE_THE_FIRST_ANSWER = """
import torch, fake
from fake.cache.replacements import PATCHES, REPLACEMENTS
from fake.seam.patches import LEDGER

torchs = torch.library.Library.impl
library = torch.library.Library("aten", "IMPL")
library.impl("special_bessel_j0", lambda x: x.new_empty(7), "Meta")
assert not any(map(LEDGER.is_in_force, PATCHES)) and torch.library.Library.impl is torchs
with fake.FakeTensorMode():
    x = torch.ones(3)
    assert all(map(LEDGER.is_in_force, PATCHES))
    assert REPLACEMENTS.includes(torch.ops.aten.special_bessel_j0.default)
    assert torch.special.bessel_j0(x).shape == (7,)
    library._destroy()
    assert not REPLACEMENTS.any_builtin
    assert torch.special.bessel_j0(x).shape == (3,)
"""


@pytest.mark.slow
def test_kernels_that_were_registered_before_the_first_answer_are_known():
    # In a process of its own: here, earlier tests have made caches keep answers.
    done = subprocess.run([sys.executable, "-c", BEFORE_THE_FIRST_ANSWER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_rule_that_is_registered_later_is_asked(monkeypatch):
    monkeypatch.setattr(rule_registry._registry, "_by_name", fake.kernels.rules())
    monkeypatch.setattr(rule_registry._registry, "_found", {})
    with fake.FakeTensorMode() as mode:
        x = torch.ones(3)
        for _ in range(2):
            assert aten.special_i1e(x).shape == (3,)

        @fake.kernels.rule("aten::special_i1e")
        def longer(mode, func, args, kwargs):
            """As ever, and twice as long for a tensor of three elements."""
            if args[0].shape != (3,):
                return NotImplemented
            with mode:
                return args[0].new_empty(6)

        for _ in range(2):
            assert aten.special_i1e(x).shape == (6,)
            assert aten.special_i1e(torch.ones(4)).shape == (4,)
    assert mode.cache_info().hits > 0


def test_what_torch_registers_with_the_first_jagged_tensor_replaces_nothing():
    rows = [torch.ones(n, 3) for n in (2, 4)]
    compiled = torch.compile(lambda rows: rows.sin().values(), backend="aot_eager")
    compiled(torch.nested.as_nested_tensor(rows, layout=torch.jagged))
    assert not REPLACEMENTS.any_builtin
