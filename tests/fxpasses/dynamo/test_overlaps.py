"""Inputs that share memory with one that a graph writes to, in another way than in the call that was compiled."""

import pytest
import torch

from fxpasses import stats


def write_one(x, y):
    x.add_(1)
    return y * 2, x * y


def write_another(x, y, state):
    state.add_(1)
    return x * y + state


def memory(size=24):
    return torch.arange(float(size))


WAYS = {
    "apart": lambda: (memory()[:8], memory()[1:9]),
    "beside": lambda: parts(memory(), 0, 8),
    "overlapping": lambda: parts(memory(), 0, 1),
    "overlapping_elsewhere": lambda: parts(memory(), 3, 8),
    "overlapping_in_more": lambda: parts(memory(48), 0, 1),
    "equal": lambda: parts(memory(), 2, 2),
}


def parts(base, *begins):
    return tuple(base[begin : begin + 8] for begin in begins)


@pytest.mark.parametrize("dynamic", [False, True, None])
@pytest.mark.parametrize("first", WAYS)
def test_each_way_to_share_memory_gives_what_eager_gives(first, dynamic):
    compiled = torch.compile(
        write_one, backend="fxpasses", dynamic=dynamic, options={"compiler": "eager", "cache": "off"}
    )
    for way in (first, *WAYS, first):
        given, expected = WAYS[way](), WAYS[way]()
        torch.testing.assert_close(
            compiled(*given), write_one(*expected), msg=lambda text, w=way: f"{w}: {text}"
        )
        torch.testing.assert_close(given, expected)


def graphs_for(program, calls):
    before = stats().graphs
    compiled = torch.compile(program, backend="fxpasses", options={"compiler": "eager", "cache": "off"})
    for given in calls:
        compiled(*given)
    return stats().graphs - before


def test_parts_of_one_cache_that_do_not_overlap_are_compiled_once():
    cache = torch.zeros(8, 2, 4)
    assert graphs_for(write_one, [(layer[0], layer[1]) for layer in cache]) == 1


def scaled_by(x, y, number):
    x.add_(1)
    return y * number


def test_numbers_among_the_inputs():
    calls = [(*parts(memory(), 0, 12), number) for number in (0.1, 0.25, 0.75)]
    assert graphs_for(scaled_by, calls) == 2


def test_inputs_that_are_only_read_may_overlap_anywhere():
    data, state = memory(), torch.zeros(8)
    assert graphs_for(write_another, [(data[i:][:8], data[i + 1 :][:8], state) for i in range(4)]) == 1


def test_a_buffer_that_becomes_a_view_of_an_input():
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x):
            self.seen += 1
            return x * 2

    model = Counts()
    compiled = torch.compile(model, backend="fxpasses", options={"compiler": "eager", "cache": "off"})
    x = torch.zeros(4)
    assert compiled(x).tolist() == [0.0] * 4
    model.seen.set_(x)
    assert compiled(x).tolist() == [2.0] * 4


def test_what_is_cached_is_for_inputs_in_their_places():
    for way in ("overlapping", "overlapping_elsewhere", "apart"):
        torch._dynamo.reset()
        given, expected = WAYS[way](), WAYS[way]()
        with torch._functorch.config.patch(enable_autograd_cache=True):
            results = torch.compile(write_one, backend="fxpasses", options={"cache": "off"})(*given)
        torch.testing.assert_close((results, given), (write_one(*expected), expected))
