"""Walks that go on over what a plan reads without making all of it again: they say what a walk from the start would say."""

import weakref

import pytest
import torch

from fxpasses.plans.errors import NoPlan
from fxpasses.plans.walks import reusable_walks
from fxpasses.plans.walks.reads import walk_reads
from fxpasses.plans.walks.reusable_walks import ReusableWalks
from fxpasses.plans.walks.walk import Walk

READS = [(__name__, name) for name in ("HELD", "OTHER", "helper")]
HELD, OTHER = [1, {"a": 2}], "text"


class Given:
    """What a request brings; a class whose objects compare by content is walked over whole."""

    def __init__(self, content=None):
        self.content = content

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return 1


class Another(Given):
    pass


def helper(value):
    return Given(value), Another


def _same(old, new):
    pass


def _refer_to_the_old(old, new):
    HELD.append(old)


def _refer_to_the_new(old, new):
    HELD.append(new)


def _change_a_global(old, new):
    HELD[1]["a"] = 3


def _change_the_class(old, new):
    Given.limit = 3


def _fill(old, new):
    new.content = [1]


def _share(old, new):
    old.content = new.content = HELD


def _be_of_another_class(old, new):
    new.__class__ = Another


def _hold_tensors(old, new):
    old.content, new.content = torch.ones(2), torch.ones(2)


def _hold_a_global_tensor(old, new):
    HELD[0] = torch.ones(2)
    old.content, new.content = torch.ones(2), HELD[0].view(2)


def _refer_weakly(old, new):
    HELD[0] = weakref.ref(old)


def _refer_weakly_to_the_new(old, new):
    HELD[0] = weakref.ref(new)


def _share_what_is_kept(old, new):
    old.content = new.content = Another
    HELD.append(Another)


BEFORE = [
    _same,
    _refer_to_the_old,
    _share,
    _hold_tensors,
    _hold_a_global_tensor,
    _refer_weakly,
    _share_what_is_kept,
]
BETWEEN = [
    _same, _refer_to_the_new, _change_a_global, _change_the_class, _fill, _share, _be_of_another_class, _refer_weakly_to_the_new,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    HELD[:] = [1, {"a": 2}]
    vars(Given).get("limit") and delattr(Given, "limit")


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("before", BEFORE)
def test_it_says_what_a_walk_from_the_start_says(before, between):
    model, walked = torch.nn.Linear(2, 2), ReusableWalks()
    old, new = Given(), Given()
    before(old, new)
    try:
        walk, digest = walked.walk_call(model, [old])
        said = walk_reads(walk.fork(), READS)
    except NoPlan:
        return  # of that there is no plan
    assert walked.continue_over_reads("plan", READS, said, walk, digest) is not None
    between(old, new)
    fresh, wanted = Walk(leaves_open=True), None
    try:
        wanted = fresh.walk_call(model, [new])
        now = walk_reads(fresh, READS)
    except NoPlan:
        now = None
    if now is None:
        with pytest.raises(NoPlan):
            _again(walked, model, new, said)
        return
    walk, digest, gone_on = _again(walked, model, new, said)
    assert digest == wanted
    assert (gone_on is not None) == (now == said)
    if gone_on is not None:
        assert vars(gone_on)["_numbers"] == vars(fresh)["_numbers"]
        assert [*map(id, gone_on.tensors)] == [*map(id, fresh.tensors)]
        assert gone_on.codes == fresh.codes
        assert gone_on.watch.holds()
        HELD.append("more")
        assert not (walk.watch.holds() and gone_on.watch.holds())


def _again(walked, model, new, said):
    walk, digest = walked.walk_call(model, [new])
    return walk, digest, walked.continue_over_reads("plan", READS, said, walk, digest)


def test_nothing_is_walked_over_twice(monkeypatch):
    model, walked = torch.nn.Linear(2, 2), ReusableWalks()
    walk, digest = walked.walk_call(model, [Given()])
    said = walk_reads(walk.fork(), READS)
    assert walked.continue_over_reads("plan", READS, said, walk, digest) is not None
    walks = []
    monkeypatch.setattr(
        reusable_walks,
        "walk_reads",
        lambda walk, reads, *expected: walks.append(reads) or walk_reads(walk, reads, *expected),
    )
    seen = vars(Walk)["add"]
    monkeypatch.setattr(
        Walk, "add", lambda self, label, value: walks.append(label) or seen(self, label, value)
    )
    walk, digest = walked.walk_call(model, [Given()])
    assert walked.continue_over_reads("plan", READS, said, walk, digest) is not None
    assert walks == ["object 0", []]


def test_a_model_that_changes_is_walked_over_again():
    model, walked, given = torch.nn.Linear(2, 2), ReusableWalks(), Given()
    _, before = walked.walk_call(model, [given])
    model.scale = 2
    _, after = walked.walk_call(model, [Given()])
    assert before[0] != after[0] == Walk(leaves_open=True).walk_call(model, [])[0]
    model.given = given
    walk = Walk(leaves_open=True)
    assert walked.walk_call(model, [given])[1] == walk.walk_call(model, [given])
