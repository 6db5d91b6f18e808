"""A job that is launched again compiles nothing, and its ranks compare what the plans send as they do what they compile."""

import pytest

from tests.fxpasses.distributed.processes import job

pytestmark = pytest.mark.slow

CASES = (
    "tp", "sp", "gathered", "gathered, no gradients", "gathered, sizes", "read", "read, over tp", "read, bfloat16", "fsdp", "ddp", "steps of tp", "steps of gathered", "groups", "sizes", "sums", "in turn", "sharded results", "sharded results, no gradients",
)  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def launches(directory):
    return [job("second_launch.py", str(directory), "nothing", *CASES) for _ in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_compiled(case, launches):
    for before, after in zip(*launches, strict=True):
        agrees, graphs, *_ = before[case]
        assert agrees
        assert graphs > 0
        agrees, graphs, used, refused = after[case]
        assert agrees
        assert graphs == 0, refused
        assert used > 0


def test_a_rank_without_plans_compiles(directory, launches):
    found = job("second_launch.py", str(directory), "no plans", "sums", "read")
    assert all(agrees for rank in found for agrees, *_ in rank.values())
    assert [graphs for rank in found for _, graphs, *_ in rank.values()] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("difference", "case", "said"),
    [("swap", "sums", "do not fit together"), ("order", "in turn", "do not fit together")],
)
def test_a_rank_that_differs_is_named(difference, case, said, directory, launches):
    for rank in job("second_launch.py", str(directory), difference, case):
        assert said in rank[case]
        assert "rank 0" in rank[case]
        assert "rank 1" in rank[case]
