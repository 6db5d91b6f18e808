"""Adversarial: calls that differ in one thing, in many states of the process, in random order, against one cache."""

import contextlib
import random
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db

import fake
from fake.conformance.subjects import entry_name, pick, seed
from tests.fake.ways import STATES, copied, outcome, reached, ways

ENTRIES = (
    "add", "sum", "cat", "clamp", "nn.functional.max_unpool1d", "native_layer_norm", "empty_strided", "full_like",
    "as_strided", "index_put", "nn.functional.conv2d", "linalg.qr", "scatter_reduce.sum", "split", "view_as_complex",
    "nn.functional.scaled_dot_product_attention", "arange", "sort", "where", "nn.functional.interpolate.bilinear",
)  # fmt: skip
CALLS_EACH = 70


def _calls(name: str) -> list:
    """Ways to write the ATen calls that an entry's samples reach, in random order, with a state for each."""
    (entry,) = (entry for entry in op_db if entry_name(entry) == name)
    seed()
    found: dict = {}
    for dtype in {torch.float32, torch.complex64} & entry.supported_dtypes("cpu"):
        for _, sample in pick(list(entry.sample_inputs("cpu", dtype)), 2):
            for call in reached(lambda s=sample: entry.op(s.input, *s.args, **s.kwargs)):
                found.setdefault(call[0], call)
    chance = random.Random(name)
    jobs = [
        (way, state)
        for call in found.values()
        for way in ways(call)
        for state in ("plain", *chance.sample(sorted(STATES), 2))
    ]
    chance.shuffle(jobs)
    return jobs[:CALLS_EACH]


def _faked(mode, call):
    func, args, kwargs = call
    args, kwargs = copied((args, kwargs))
    convert = torch.utils._pytree.tree_map_only
    return func, *convert(torch.Tensor, mode.from_tensor, (args, kwargs))


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("accelerated", [False, True], ids=["", "accelerated"])
def test_the_cache_answers_as_a_fresh_dispatch(name, accelerated):
    kind = FakeTensorMode if accelerated else fake.FakeTensorMode
    with warnings.catch_warnings(), fake.accelerate() if accelerated else contextlib.nullcontext():
        warnings.simplefilter("ignore")
        cached, fresh = kind(), kind()
        fresh.cache_enabled = False
        compared = 0
        for call, state in _calls(name):
            seen = []
            for mode in (cached, cached, fresh):
                given = _faked(mode, call)
                with mode:
                    seen.append(outcome(given, state))
            assert seen[0] == seen[2], f"{state}: {call}"
            assert seen[1] == seen[2], f"{state}, again: {call}"
            compared += not isinstance(seen[2], type)
    assert compared > 20
