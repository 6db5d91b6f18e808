"""The ledger of patches: counted, undone in any order of users, safe in threads and finalizers; importing changes nothing."""

import threading
import types

import pytest

from fake.seam.patches import Edit, Ledger, Patch, PatchConflictError, ThreadPatch, When, always


@pytest.fixture
def torchs():
    return types.SimpleNamespace(f=lambda: "torch's f", g=lambda: "torch's g")


def patch(owner, name, make, **options):
    return Patch(
        owner, name, make, **{"when": When.COMPILATION, "versions": None, "lost": "a test", **options}
    )


def test_users_are_counted_and_the_last_one_puts_torch_back(torchs):
    ledger, before = Ledger(), dict(vars(torchs))
    f, g, h = ledger.add(
        patch(torchs, "f", lambda original: lambda: f"ours before {original()}"),
        patch(torchs, "g", always("ours")),
        patch(torchs, "h", always("new"), adds=True),
    )
    assert vars(torchs) == before
    ledger.enter(f, g, h)
    with ledger.in_force(f):
        assert (torchs.f(), torchs.g, torchs.h) == ("ours before torch's f", "ours", "new")
        assert f.torchs() == "torch's f"
        ledger.leave(f, g, h)
        assert torchs.f() == "ours before torch's f"
        assert ledger.is_in_force(f)
        assert not ledger.is_in_force(g)
        assert torchs.g() == "torch's g"
    assert vars(torchs) == before


def test_what_does_not_fit_is_passed_over_and_says_why(torchs):
    ledger, before = Ledger(), dict(vars(torchs))
    entries = ledger.add(
        patch(torchs, "f", always(1), versions=((1, 0),)),
        patch(torchs, "g", always(1), unfit=lambda: "g is another one"),
        patch(torchs, "gone", always(1)),
        patch("no.such.module", "f", always(1)),
    )
    with ledger.in_force(*entries):
        assert vars(torchs) == before
    assert [entry.problem()[:23] for entry in entries] == [
        "it is known to fit torc",
        "g is another one",
        "this release of torch h",
        "",
    ]


def test_an_attribute_that_others_replaced_is_not_lost(torchs):
    ledger = Ledger()
    f, g = ledger.add(patch(torchs, "f", always("ours")), patch(torchs, "g", always("ours")))
    torchs_f = torchs.f
    ledger.enter(f, g)
    torchs.f = theirs = object()
    with pytest.raises(PatchConflictError, match="f was replaced by something else"):
        ledger.leave(f, g, strict=True)
    assert torchs.g == "ours"
    ledger.leave(f, g)
    assert torchs.f is theirs
    torchs.f = "ours"  # they undid theirs
    with ledger.in_force(f):
        assert torchs.f == "ours"
    assert torchs.f is torchs_f


def test_if_one_entry_fails_none_is_in_force(torchs):
    ledger, before = Ledger(), dict(vars(torchs))
    entries = ledger.add(patch(torchs, "f", always(1)), patch(torchs, "g", lambda original: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        ledger.enter(*entries)
    assert vars(torchs) == before
    assert not any(map(ledger.is_in_force, entries))


def test_one_place_has_one_entry(torchs):
    ledger = Ledger()
    ledger.add(patch(torchs, "f", always(1)))
    with pytest.raises(ValueError, match="on the ledger of patches already"):
        ledger.add(patch(torchs, "f", always(2)))
    with pytest.raises(ValueError, match="add it first"):
        ledger.enter(patch(torchs, "g", always(1)))


def test_a_finalizer_may_come_in_while_users_are_counted():
    ledger, events = Ledger(), []

    def do():
        events.append("on")
        ledger.leave_from_finalizer(edit)  # as the garbage collector would, in the middle
        return lambda: events.append("off")

    (edit,) = ledger.add(Edit("something", do, when=When.MODE, versions=None, lost="a test"))
    ledger.enter(edit)
    assert events == ["on", "off"]
    assert not ledger.is_in_force(edit)


def test_a_thread_has_its_own_function_and_others_have_torchs():
    class Torchs:
        def method(self):
            return "torch's"

        @classmethod
        def of_class(cls):
            return f"torch's {cls.__name__}"

    ledger, seen, inside, done = Ledger(), [], threading.Event(), threading.Event()
    common = {"when": When.COMPILATION, "versions": None, "lost": "a test"}
    method, of_class = ledger.add(
        ThreadPatch(Torchs, "method", **common), ThreadPatch(Torchs, "of_class", **common)
    )

    def other():
        inside.wait(10)
        seen.append((Torchs().method(), Torchs.of_class()))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with ledger.using((method, lambda self: "ours"), (of_class, lambda: "ours, too")):
        assert (Torchs().method(), Torchs.of_class()) == ("ours", "ours, too")
        with ledger.using((method, lambda self: f"inner, not {method.torchs(self)}")):
            assert Torchs().method() == "inner, not torch's"
        assert Torchs().method() == "ours"
        inside.set()
        assert done.wait(10)
    thread.join()
    assert seen == [("torch's", "torch's Torchs")]
    assert isinstance(vars(Torchs)["of_class"], classmethod)
