"""Library, define, impl and the register functions on operators that exist."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fake import library
from fake.library import Library, define, impl, registry, scoped_library
from tests.fake.library.support import NAMESPACE, fresh_name, overload_of

x = torch.tensor([0.5, 1.0])


def numpy_sin(x):
    return torch.from_numpy(np.sin(x.detach().cpu().numpy()))


@pytest.fixture
def lib():
    with scoped_library(NAMESPACE, "FRAGMENT") as found:
        yield found


@pytest.fixture
def name(lib):
    qualname = fresh_name()
    define(qualname, "(Tensor x) -> Tensor", lib=lib)
    return qualname


def close(left, right):
    torch.testing.assert_close(left, right)


@pytest.mark.parametrize(
    "types", ["cpu", "CPU", "default", ["cpu"], ["cpu", "cuda"], "CompositeExplicitAutograd"]
)
@pytest.mark.parametrize("decorator", [False, True])
def test_impl(lib, name, types, decorator):
    if decorator:
        assert impl(name, types, lib=lib)(numpy_sin) is numpy_sin
    else:
        impl(name, types, numpy_sin, lib=lib)
    close(overload_of(name)(x), x.sin())


def test_older_forms(lib):
    @define(lib, "legacy_one(Tensor x) -> Tensor")
    def one(x):
        return numpy_sin(x)

    lib.define("legacy_two(Tensor x) -> Tensor")

    @impl(lib, "legacy_two", "CPU")
    def two(x):
        return numpy_sin(x)

    close(overload_of(f"{NAMESPACE}::legacy_one")(x), x.sin())
    close(overload_of(f"{NAMESPACE}::legacy_two")(x), x.sin())
    close(two(x), one(x))


@pytest.mark.parametrize("tags", [torch.Tag.pointwise, (torch.Tag.pointwise,), [torch.Tag.pointwise]])
def test_tags(lib, tags):
    name = fresh_name()
    define(name, "(Tensor x) -> Tensor", lib=lib, tags=tags)
    assert torch.Tag.pointwise in overload_of(name).tags


def test_overloads(lib):
    lib.define("many(Tensor x) -> Tensor")
    lib.define("many.two(Tensor x, Tensor y) -> Tensor")
    lib.impl("many", lambda x: x + 1, "CPU")
    lib.impl("many.two", lambda x, y: x + y, "CPU")
    packet = getattr(torch.ops, NAMESPACE).many
    close(packet(x), x + 1)
    close(packet(x, x), x + x)
    library.register_fake(f"{NAMESPACE}::many.two", lambda x, y: torch.empty_like(x), lib=lib)
    assert packet.two(torch.empty(3, device="meta"), torch.empty(3, device="meta")).shape == (3,)


def test_with_keyset_and_fallthrough(lib, name):
    seen = []

    def kernel(keyset, x):
        seen.append(keyset)
        return x + 1

    lib.impl(name.split("::")[1], kernel, "CPU", with_keyset=True)
    lib.impl(name.split("::")[1], library.fallthrough_kernel, "AutogradCPU")
    close(overload_of(name)(x.clone().requires_grad_()).detach(), x + 1)
    assert seen[0].has(torch._C.DispatchKey.CPU)
    with pytest.raises(NotImplementedError):
        library.fallthrough_kernel()


def test_fallback_needs_the_global_namespace(lib):
    with pytest.raises(RuntimeError, match="global namespace"):
        lib.fallback(lambda op, *args: None, "CPU")


def test_bad_alias_analysis_and_kernel(lib):
    with pytest.raises(RuntimeError, match="alias_analysis"):
        lib.define("bad(Tensor x) -> Tensor", "PURE_FUNCTION")
    with pytest.raises(TypeError, match="callable"):
        lib.impl("bad", 3, "CPU")


def test_library_keeps_its_operators_alive():
    def register():
        lib = Library(NAMESPACE, "FRAGMENT")
        lib.define("from_a_function(Tensor x) -> Tensor")
        lib.impl("from_a_function", numpy_sin, "CPU")
        lib._register_fake("from_a_function", torch.empty_like)

    register()
    gc.collect()
    op = overload_of(f"{NAMESPACE}::from_a_function")
    close(op(x), x.sin())
    assert op(torch.empty(3, device="meta")).shape == (3,)


def test_destroyed_library_takes_its_operators_along():
    lib = Library(NAMESPACE, "FRAGMENT")
    lib.define("short_lived(Tensor x) -> Tensor")
    assert hasattr(getattr(torch.ops, NAMESPACE), "short_lived")
    lib._destroy()
    assert not hasattr(getattr(torch.ops, NAMESPACE), "short_lived")
    assert lib.m is None


def test_kernel_library_lives_as_long_as_it_is_held(name):
    lib = Library(NAMESPACE, "IMPL", "CPU")
    lib.impl(name.split("::")[1], lambda x: x * 5)
    close(overload_of(name)(x), x * 5)
    del lib
    with pytest.raises(NotImplementedError):
        overload_of(name)(x)


@pytest.mark.parametrize("as_overload", [False, True])
def test_register_functions(lib, name, as_overload):
    op = overload_of(name) if as_overload else name
    library.register_kernel(op, "cpu", numpy_sin, lib=lib)
    library.register_fake(op, torch.empty_like, lib=lib)
    library.register_autograd(
        op,
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        lib=lib,
    )
    library.register_vmap(op, lambda info, in_dims, x: (overload_of(name)(x), in_dims[0]), lib=lib)
    leaf = x.clone().requires_grad_()
    overload_of(name)(leaf).sum().backward()
    close(leaf.grad, x.cos())
    close(torch.vmap(overload_of(name))(x), x.sin())
    with FakeTensorMode():
        assert overload_of(name)(torch.empty(3)).shape == (3,)
    library.register_effect(name, library.EffectType.ORDERED, lib=lib)
    assert library.get_kernel(name, "CPU") is not None


def test_register_autocast(lib, name):
    impl(name, "cpu", lambda x: x + 1, lib=lib)
    library.register_autocast(name, "cpu", torch.bfloat16, lib=lib)
    with torch.autocast("cpu"):
        assert overload_of(name)(x).dtype is torch.bfloat16


def test_register_torch_dispatch(lib, name):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    @library.register_torch_dispatch(name, Mode, lib=lib)
    def _(mode, func, types, args, kwargs):
        return args[0] * 7

    with Mode():
        close(overload_of(name)(x), x * 7)


def test_keyword_only_inputs_and_defaults(lib):
    lib.define("scaled(Tensor w, int x=2, *, int y=3, int z) -> Tensor")
    lib.impl("scaled", lambda w, x=2, *, y=3, z: w * x * y * z, "CPU")

    def setup_context(ctx, inputs, keyword_only_inputs, output):
        assert inputs[1] == 2
        assert keyword_only_inputs == {"y": 3, "z": 42}
        ctx.factor = 2 * 3 * 42

    qualname = f"{NAMESPACE}::scaled"
    library.register_autograd(
        qualname, lambda ctx, grad: (grad * ctx.factor, None), setup_context=setup_context, lib=lib
    )
    w = torch.randn(3, requires_grad=True)
    overload_of(qualname)(w, z=42).sum().backward()
    close(w.grad, torch.full_like(w, 252))


def test_duplicate_fake_kernel(lib, name):
    library.register_fake(name, torch.empty_like, lib=lib)
    with pytest.raises(RuntimeError, match=r"test_library.py:\d+"):
        library.register_fake(name, torch.empty_like, lib=lib, allow_override=False)


def test_fake_kernel_next_to_composites(lib):
    for key, refused in (("CompositeImplicitAutograd", True), ("CompositeExplicitAutograd", False)):
        name = fresh_name()
        define(name, "(Tensor x) -> Tensor", lib=lib)
        lib.impl(name.split("::")[1], lambda x: x.sin(), key)
        if refused:
            with pytest.raises(RuntimeError, match="CompositeImplicitAutograd"):
                library.register_fake(name, lambda x: x.sum(), lib=lib)
        else:
            library.register_fake(name, lambda x: x.sum(), lib=lib)
            with FakeTensorMode():
                assert overload_of(name)(torch.randn(10)).shape == ()


def test_impl_abstract_warns(name):
    with pytest.warns(FutureWarning, match="register_fake"):
        library.impl_abstract(name, lambda x: x.new_empty(5))
    assert overload_of(name)(torch.empty(3, device="meta")).shape == (5,)


def test_registry_reset_in_a_private_registry():
    private = type(registry)()
    assert private.names() == []
    assert private.find("nothing::here") is None
    assert private.destroy("nothing::here") is False
    private.reset()


def test_get_kernel_errors():
    with pytest.raises(ValueError, match="dispatch key"):
        library.get_kernel("aten::sin", "nothing")
    with pytest.raises(ValueError, match="unexpected type"):
        library.get_kernel(3, "CPU")
