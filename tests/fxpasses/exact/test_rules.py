"""Rules against float64, and against the algebra that they are there for."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from benchmarks.conformance._torch import op_db
from fxpasses.exact.arithmetic import Arithmetic
from fxpasses.exact.dual import Dual
from fxpasses.exact.fields import LEVELS, field
from fxpasses.exact.float_constants import residues_of_number, unrounded
from fxpasses.exact.machine import Machine, UnsupportedCall
from fxpasses.exact.rules import RULES, rule

aten = torch.ops.aten
numbers = st.lists(st.integers(-1000, 1000).map(lambda n: n / 64), min_size=3, max_size=3)


def dual(values):
    return Arithmetic(field(0)).dual(torch.tensor(values, dtype=torch.float64))


def same(a: Dual, b: Dual, levels=range(LEVELS)) -> bool:
    return all(torch.equal(a.residues[k], b.residues[k]) for k in levels)


@given(numbers, numbers, numbers)
@settings(max_examples=40, deadline=None)
def test_sums_and_products_are_those_of_fractions(a, b, c):
    m = Arithmetic(field(0))
    x, y, z = dual(a), dual(b), dual(c)
    assert same(m.mul(m.add(x, y), z), m.add(m.mul(x, z), m.mul(y, z)))
    exact = torch.tensor([(i + j) * k for i, j, k in zip(a, b, c, strict=True)], dtype=torch.float64)
    assert same(m.mul(m.add(x, y), z), m.dual(exact))  # few bits: float64 is exact here


@given(numbers, numbers)
@settings(max_examples=40, deadline=None)
def test_exponentials_and_logarithms_keep_their_laws_where_levels_allow(a, b):
    m = Arithmetic(field(1))
    x, y = dual(a), dual(b)
    x, y = (Dual(v.witness / 16, m.field.encode(v.witness / 16), v.dtype) for v in (x, y))
    assert same(m.exp(m.add(x, y)), m.mul(m.exp(x), m.exp(y)), range(LEVELS - 1))
    assert same(m.log(m.exp(x)), x, range(1, LEVELS))
    product = m.log(m.mul(m.exp(x), m.exp(y)))
    assert same(product, m.add(x, y), range(1, LEVELS))


@given(numbers.filter(lambda v: all(v)))
@settings(max_examples=40, deadline=None)
def test_quotients_and_roots(a):
    m = Arithmetic(field(0))
    x = dual(a)
    assert same(m.mul(x, m.reciprocal(x)), m.dual(torch.ones(3)))
    squared = m.mul(x, x)
    assert same(m.mul(m.sqrt(squared), m.sqrt(squared)), squared)


@given(numbers.filter(lambda v: all(v)), numbers.filter(lambda v: all(v)))
@settings(max_examples=40, deadline=None)
def test_squares_of_roots(a, b):
    """Of any number, which is a square in some fields alone; the witness of the root of a negative one is NaN, and the residues of its square are zeros."""
    m = Arithmetic(field(0))
    m.squares_roots = True
    x, y = (dual([abs(n) for n in numbers]) for numbers in (a, b))
    root, other = m.sqrt(x), m.sqrt(y)
    for square in (
        m.mul(root, root),
        m.mul(root, m.sqrt(x)),
        m.integer_power(root, 2),
        m.integer_power(m.neg(root), 2),
    ):
        assert same(square, x)
    assert same(m.integer_power(m.mul(root, other), 2), m.mul(x, y))
    assert same(m.integer_power(m.div(m.mul(root, 3), other), 2), m.div(m.mul(x, 9), y))
    assert same(m.integer_power(m.reciprocal(root), -4), m.mul(x, x))
    chosen = m.select(torch.tensor([True, False, True]), root, y)
    assert same(m.integer_power(chosen, 2), m.select(torch.tensor([True, False, True]), x, m.mul(y, y)))
    assert same(m.integer_power(root.map(lambda t: t.flip(0)), 2), x.map(lambda t: t.flip(0)))
    negative = m.sqrt(m.neg(x))
    assert not any(r.any() for r in m.mul(negative, negative).residues)


@pytest.mark.parametrize(
    ("number", "fraction"),
    [(0.1, (1, 10)), (1e-6, (1, 10**6)), (1 / 3, (1, 3)), (-2.5, (-5, 2)), (7, (7, 1))],
)
def test_floats_of_a_graph_are_read_as_what_they_mean(number, fraction):
    for p, r in zip(field(0).primes, residues_of_number(field(0), type(number), number), strict=True):
        assert r * fraction[1] % p == fraction[0] % p


def test_logarithms_of_constants_agree_with_the_field():
    chain = field(0)
    two = [torch.tensor([2]) for _ in range(LEVELS)]
    assert residues_of_number(chain, float, math.log(2))[1:] == tuple(
        int(chain.log(k, two[k])) for k in range(LEVELS - 1)
    )


def _calls():
    """One small call of each operator of ``op_db`` that has a rule: the name, the function, its arguments."""
    packets = {str(packet).removeprefix("aten.") for packet in RULES}
    for info in op_db():
        if info.name in packets or info.aten_name in packets:
            yield pytest.param(info, id=info.full_name)


@pytest.mark.parametrize("number", [1e-6, 0.1, -0.1, 0.044715, 1 / 3, 1e-12, 8**-0.5, -(3**-0.5), math.pi])
def test_a_number_that_torch_rounded_to_float32_is_what_it_was(number):
    assert unrounded(torch.tensor(number).item()) == number
    assert unrounded(number) == number


@pytest.mark.parametrize(
    "number", [2.0**-20, 0.5, 3.0, 0.1015625, 1e300, math.inf, -math.inf, 0.7071067811865476]
)
def test_any_other_number_is_what_it_is(number):
    assert unrounded(number) == number
    assert math.isnan(unrounded(math.nan))


@pytest.mark.parametrize("info", list(_calls()))
def test_witnesses_are_what_float64_computes(info):
    """Rules as they are called: each sample is traced to ATen, and each call of an operator with a rule is compared."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten, tree_map

    compared = 0

    class Compare(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal compared
            kwargs = kwargs or {}
            if (
                func.overloadpacket not in RULES
                or func._schema.is_mutable
                or func._schema.name.endswith("_like")
            ):
                return func(*args, **kwargs)
            machine = Machine(field(0), 0)

            def lifted(value):
                is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
                return machine.arithmetic.dual(value) if is_float else value

            given_args, given_kwargs = tree_map(lifted, (tuple(args), kwargs))
            expected = func(*args, **kwargs)
            try:
                found = machine.call(func, given_args, given_kwargs)
            except UnsupportedCall:
                return expected
            leaves = tree_flatten(found, is_leaf=lambda x: isinstance(x, Dual))[0]
            for value, wanted in zip(leaves, tree_flatten(expected)[0], strict=True):
                if isinstance(value, Dual):
                    assert value.shape == wanted.shape, func
                    assert value.dtype in (wanted.dtype, None), (func, value.dtype, wanted.dtype)
                    if "empty" not in func._schema.name:
                        torch.testing.assert_close(
                            value.witness, wanted.double(), rtol=1e-9, atol=1e-9, equal_nan=True
                        )
                    compared += 1
            return expected

    for number, sample in enumerate(info.sample_inputs("cpu", torch.float64)):
        if number == 6:
            break
        with torch.no_grad(), Compare():
            info.op(sample.input, *sample.args, **sample.kwargs)
    if not compared:
        pytest.skip("its samples give no float result, or its calls are opaque")


def test_a_rule_is_given_once():
    with pytest.raises(ValueError, match="has an exact rule already"):
        rule(aten.add)(lambda m, op, *args: None)


def test_an_operator_without_rule_and_decomposition_is_a_function_of_its_arguments():
    machine = Machine(field(0), 0)
    x = machine.arithmetic.dual(torch.randn(4, 4, dtype=torch.float64))
    same_again = Dual(x.witness.clone(), [r.clone() for r in x.residues], x.dtype)
    first, again = (machine.call(aten.linalg_det.default, (v,), {}) for v in (x, same_again))
    other = machine.call(aten.linalg_det.default, (machine.arithmetic.mul(x, 2),), {})
    assert same(first, again)
    assert not same(first, other)
    assert machine.opaque


def test_what_changes_its_arguments_is_refused():
    machine = Machine(field(0), 0)
    with pytest.raises(UnsupportedCall, match="in place"):
        machine.call(aten.add_.Tensor, (machine.arithmetic.dual(torch.ones(2)), 1), {})
