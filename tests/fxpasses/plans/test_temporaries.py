"""Tensors that only kernels see are made once, and what operators return is looked at once."""

import ast
import types

import pytest
import torch

from fxpasses.plans._torch import prelude
from fxpasses.plans.tensors.temporaries import check_once, pool_temporaries

FILL = "fill = getattr(_kernels['0'], 'fill')"
HEAD = "def call(args):\n    x, n = args\n    args.clear()\n"


def _made(*lines, head=HEAD, checks=False):
    """The function ``call`` of these lines, and how many statements stand before it."""
    tree = ast.parse(FILL + "\n" + head + "".join(f"    {line}\n" for line in lines))
    before = check_once(tree.body, fixed=True) if checks else pool_temporaries(tree.body)
    tree.body = [*tree.body[:1], *before, *tree.body[1:]]
    kernels = types.SimpleNamespace(fill=lambda x, out: out.copy_(x * 2))
    known = prelude() | {"_kernels": {"0": kernels}, "extern_kernels": torch, "operator": lambda x: x}
    exec(ast.unparse(ast.fix_missing_locations(tree)), known)
    return known, len(before)


MADE = "a = empty_strided_cpu((2, 3), (3, 1), torch.float32)"
RESULT = ("out = empty_strided_cpu((2, 2), (2, 1), torch.float32)", "b = reinterpret_tensor(a, (3, 2), (1, 3), 0)",
          "extern_kernels.mm(reinterpret_tensor(a, (2, 3), (3, 1), 0), b, out=out)", "return (out,)")  # fmt: skip


def test_tensors_that_only_kernels_see_are_made_once():
    known, before = _made(MADE, "fill(x, a)", *RESULT)
    assert before == 2
    x = torch.randn(2, 3)
    outs = []
    for scale in (1, 2):
        with torch.inference_mode(scale == 1):  # which comes first is of no account
            outs.append(known["call"]([x * scale, 3])[0])
        (pool,) = (value for name, value in known.items() if name.startswith("pool_"))
        assert len(pool) == 1
    for scale, out in zip((1, 2), outs, strict=True):
        torch.testing.assert_close(out, (2 * scale * x) @ (2 * scale * x).t())
    a = pool[0][0]
    assert not a.is_inference()
    pool.clear()  # as another call takes it at the same time
    known["call"]([x, 3])
    assert len(pool) == 1
    assert pool[0][0] is not a


@pytest.mark.parametrize("lines", [
    (MADE, "fill(x, a)", "return (a,)"),
    (MADE, "fill(x, a)", "b = a", "return (reinterpret_tensor(b, (3,), (1,), 0),)"),
    (MADE, "fill(x, a)", "b = reinterpret_tensor(a, (n,), (1,), 0)", "return (b,)"),
    (MADE, "fill(x, a)", "c = operator(a)", "return (c,)"),
    (MADE, "c = extern_kernels.mul(x, 2, out=a)", "return (c,)"),
    (MADE, "if n:", "    fill(x, a)", "c = [a]", "return c"),
    ("a = x", MADE, "fill(x, a)", "return (x,)"),
    ("a = empty_strided_cpu((2, n), (3, 1), torch.float32)", "fill(x, a)", "return (x,)"),
    ("a = empty_strided_cpu((128, 129), (129, 1), torch.uint8)", "fill(x[0, 0], a)", "return (x,)"),
    (MADE, "fill(x, a)", "if n:", "    return (x,)", "return (x,)"),
])  # fmt: skip
def test_tensors_that_others_may_see_are_made_in_each_call(lines):
    known, before = _made(*lines)
    assert before == 0
    assert len(known["call"]([torch.randn(2, 3), 3])) == 1


def test_results_of_operators_are_looked_at_in_the_first_call():
    lines = (
        "assert_size_stride(x, (1, 1), (9, 9), 'input')", "assert_size_stride(x, (2, 3), (3, 1), 'operator')",
        "assert_size_stride(x, (n, 3), (3, 1), 'operator')", "return (x,)",
    )  # fmt: skip
    known, before = _made(*lines, checks=True)
    assert before == 1
    for wrong in range(2):  # a first call that fails is none
        with pytest.raises(AssertionError):
            known["call"]([torch.zeros(4 + wrong, 3), 4 + wrong])
    known["call"]([torch.zeros(2, 3), 2])
    known["call"]([torch.zeros(4, 3), 4])
    with pytest.raises(AssertionError):
        known["call"]([torch.zeros(4, 3), 3])
    tree = ast.parse(HEAD + "".join(f"    {line}\n" for line in lines))
    assert check_once(tree.body, fixed=False) == []
    assert "'input'" not in ast.unparse(tree)
    assert ast.unparse(tree).count("assert_size_stride") == 2
