"""Adversarial: calls that differ in one thing, in many states of the process, in random order, against one cache."""

import contextlib
import random
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fake
from benchmarks.conformance._torch import op_db
from benchmarks.conformance.subjects import entry_name, pick, seed
from tests.fake.ways import STATES, copied, outcome, reached, ways

aten = torch.ops.aten

ENTRIES = (
    "sum", "cat", "clamp", "nn.functional.max_unpool1d", "native_layer_norm", "full_like", "as_strided", "index_put",
    "nn.functional.conv2d", "split", "view_as_complex", "nn.functional.scaled_dot_product_attention", "arange",
)  # fmt: skip
CALLS_EACH = 40


def _calls(name: str) -> list:
    """Ways to write the ATen calls that an entry's samples reach, in random order, with a state for each."""
    (entry,) = (entry for entry in op_db() if entry_name(entry) == name)
    seed()
    found: dict = {}
    for dtype in {torch.float32, torch.complex64} & entry.supported_dtypes("cpu"):
        for _, sample in pick(list(entry.sample_inputs("cpu", dtype)), 2):
            for call in reached(lambda s=sample: entry.op(s.input, *s.args, **s.kwargs)):
                found.setdefault(call[0], call)
    chance = random.Random(name)
    others = [(way, "plain") for call in found.values() for way in ways(call)]
    others = chance.sample(others, min(CALLS_EACH, len(others)))
    jobs = [*others, *[(way, chance.choice(list(STATES))) for way, _ in others[:20]]]
    chance.shuffle(jobs)
    return jobs


def _faked(mode, call):
    func, args, kwargs = call
    args, kwargs = copied((args, kwargs))
    convert = torch.utils._pytree.tree_map_only
    return func, *convert(torch.Tensor, mode.from_tensor, (args, kwargs))


def _compare(calls, accelerated):
    """Each call with a full cache, again, and without a cache; returns how many gave a result."""
    kind = FakeTensorMode if accelerated else fake.FakeTensorMode
    with warnings.catch_warnings(), fake.accelerate() if accelerated else contextlib.nullcontext():
        warnings.simplefilter("ignore")
        cached, fresh = kind(), kind()
        fresh.cache_enabled = False
        compared = 0
        for call, state in calls:
            seen = []
            for mode in (cached, cached, fresh):
                given = _faked(mode, call)
                with mode:
                    seen.append(outcome(given, state))
            assert seen[0] == seen[2], f"{state}: {call}"
            assert seen[1] == seen[2], f"{state}, again: {call}"
            compared += not isinstance(seen[2], type)
        return compared


@pytest.mark.parametrize(
    ("name", "accelerated"), [*((name, False) for name in ENTRIES), *((name, True) for name in ENTRIES[::3])]
)
def test_calls_that_differ_in_one_thing(name, accelerated):
    assert _compare(_calls(name), accelerated) > 4


def _sensitive_calls() -> list:
    """Calls whose answers depend on the state of the process, or on the type of one number."""
    whole, real = torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 4)
    places = torch.zeros(1, 2, 3, 3, dtype=torch.int64)
    grad = torch.ones(3, 4, requires_grad=True)
    numbers = (1, 1.0, True, 1j, 2**40)
    return [
        *((aten.add.Tensor, (x, n), {}) for n in numbers for x in (whole, real, grad)),
        *((aten.mul.Scalar, (x, n), {}) for n in numbers for x in (whole, real)),
        *((aten.full.default, ([2], n), {}) for n in numbers),
        *((aten.scalar_tensor.default, (n,), {}) for n in numbers),
        *((aten.arange.default, (n,), {}) for n in numbers[:3]),
        *((aten.sum.dim_IntList, (x, [0]), {}) for x in (whole, real, grad)),
        *((aten.sum.dim_IntList, (real, dims), {}) for dims in ([1], [0, 1], [], None)),
        *((aten.clamp.default, (whole, low, high), {}) for low in (None, 0, 0.5) for high in (None, 1, 1.5)),
        (aten.max_unpool2d.default, (torch.ones(1, 2, 3, 3), places, [6, 6]), {}),
        (aten.empty.memory_format, ([2, 3],), {}),
        (aten.linear.default, (real, real), {}),
        (aten.matmul.default, (real, real.t()), {}),
        (aten.view.default, (grad, [12]), {}),
        (aten.reshape.default, (grad, [12]), {}),
        (aten.div.Tensor, (whole, whole), {}),
        (aten.true_divide.Tensor, (whole, whole), {}),
        (aten.mean.default, (whole,), {"dtype": None}),
        (aten.sqrt.default, (whole,), {}),
        (aten.index_put.default, (real, [torch.zeros(1, dtype=torch.int64)], torch.ones(4)), {}),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("backwards", "accelerated"), [(False, False), (True, False), (True, True)])
def test_calls_in_all_states_of_the_process(backwards, accelerated):
    """Each state comes before each other one, for each call, in one of the two orders."""
    calls = [(call, state) for call in _sensitive_calls() for state in STATES]
    random.Random(0).shuffle(calls)
    assert _compare(calls[::-1] if backwards else calls, accelerated) > 400


def test_deterministic_algorithms_that_only_warn():
    mode = fake.FakeTensorMode()
    x, places = torch.ones(1, 2, 4), torch.zeros(1, 2, 4, dtype=torch.int64)

    def unpool(warn_only):
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        try:
            with mode:
                return torch.nn.functional.max_unpool1d(mode.from_tensor(x), mode.from_tensor(places), 2)
        finally:
            torch.use_deterministic_algorithms(False)

    with pytest.warns(UserWarning, match="deterministic"):
        assert unpool(True).shape == (1, 2, 8)
    with pytest.raises(RuntimeError, match="deterministic"):
        unpool(False)
