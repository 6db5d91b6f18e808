"""Threads that share one mode and the cache of the process: each gets what a thread alone gets.

Random calls, each in a random state of its thread (grad mode, inference mode, autocast), while the cache is too small for
them and other threads empty it, with hits cross-checked or not.
"""

import contextlib
import random
import sys
import threading
import warnings

import pytest
import torch

import fake
from benchmarks.conformance.observe import observe
from fake.mode import ENGINE
from tests.fake.test_cache_random import DTYPES, KINDS, NUMBERS, OPERATORS, SHAPES, Spec

STATES = {
    "plain": contextlib.nullcontext,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}
THREADS = 6


def draw(rng):
    """A call: what to run, on what, in which state."""
    shape = rng.choice(SHAPES)
    specs = [Spec(shape, rng.choice(DTYPES), rng.choice(KINDS)) for _ in range(2)]
    return (
        rng.choice(list(OPERATORS)),
        specs,
        rng.choice(NUMBERS),
        rng.choice((0, 0, 1, -1)),
        rng.choice(list(STATES)),
    )


def outcome(call):
    """What it gives, or that it is refused."""
    name, specs, number, dim, state = call
    with STATES[state]():
        a, b = (spec.make() for spec in specs)
        try:
            return observe(OPERATORS[name](a, b, number, dim), (a, b))
        except (RuntimeError, TypeError, ValueError, IndexError, OverflowError) as refused:
            return type(refused).__name__


@pytest.fixture
def crowded():
    """A cache that is always full, and threads that change places often."""
    limit, interval = ENGINE.store.limit, sys.getswitchinterval()
    fake.cache_clear()
    ENGINE.store.limit = 150
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)
    ENGINE.store.limit = limit
    fake.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("crosscheck", [False, True], ids=["hits", "cross-checked"])
@pytest.mark.parametrize("shared", [True, False], ids=["one mode", "a mode each"])
def test_random_calls(crowded, shared, crosscheck):
    rng = random.Random(7)
    calls = [draw(rng) for _ in range(250)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = fake.FakeTensorMode()
        with alone:
            expected = [outcome(call) for call in calls]
        assert len({str(e) for e in expected}) > 100
        modes = (
            [fake.FakeTensorMode()] * THREADS if shared else [fake.FakeTensorMode() for _ in range(THREADS)]
        )
        for mode in modes:
            mode.cache_crosscheck_enabled = crosscheck
        differences = []
        fake.cache_clear()

        def work(number):
            order = list(range(len(calls)))
            random.Random(number).shuffle(order)
            try:
                with modes[number]:
                    for place in order:
                        found = outcome(calls[place])
                        if found != expected[place]:
                            differences.append((calls[place], expected[place], found))
            except Exception as error:  # noqa: BLE001  (reported by the main thread)
                differences.append((number, repr(error)))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            threads[0].join(0.05)
            ENGINE.store.drop_entries()
        for thread in threads:
            thread.join()
    assert not differences
    info = fake.cache_info()
    assert info.hits > 0
    assert info.size <= ENGINE.store.limit == 150
    assert info.size == sum(len(table) for table in ENGINE.store.tables.values())


@pytest.mark.slow
def test_cross_checks_of_threads_do_not_see_each_other(crowded):
    """A wrong entry is found in each thread, whatever hits and misses the others have meanwhile."""
    found = []
    with fake.FakeTensorMode() as mode:
        x, y = torch.ones(3), torch.ones(4)
        x.sin(), y.sin()
    table = ENGINE.store.tables[torch.ops.aten.sin.default]
    first, second = list(table)
    table[first], table[second] = table[second], table[first]
    mode.cache_crosscheck_enabled = True

    def work(number):
        with mode:
            z = torch.ones(number + 2, 2)
            for size in range(200):
                z.view(2, -1), z.expand(size % 5 + 1, number + 2, 2)
                try:
                    x.sin()
                except fake.CacheCrossCheckError:
                    found.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200 * THREADS
