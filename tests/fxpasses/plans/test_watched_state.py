"""What a plan has seen is looked at again: in Python and in C, with the same answers."""

import collections
import contextvars
import copy
import shutil
import types

import pytest

from fxpasses.plans import native
from fxpasses.plans._torch import DICTS_HAVE_VERSIONS
from fxpasses.plans.files.plan_files import write_sections
from fxpasses.plans.running.runtime import load_library
from fxpasses.plans.walks.walk import Walk


class Base:
    limit = 1


class Slotted(Base):
    __slots__ = ("size",)


class Holder(Base):
    def __init__(self):
        def inner(x, by=2, *, to=3):
            return x * by + to + len(captured)

        captured = [1]
        self.function = inner
        self.list, self.set, self.deque, self.table = [1, 2], {1}, collections.deque([1]), {"a": {"b": 1}}
        self.slotted = Slotted()
        self.slotted.size = 3
        self.variable = contextvars.ContextVar("variable", default=1)


def _code(holder):
    holder.function.__code__ = holder.function.__code__.replace(co_name="other")


CHANGES = {
    "nothing": lambda h: None,
    "an attribute": lambda h: setattr(h, "more", 1),
    "an attribute removed": lambda h: delattr(h, "set"),
    "an equal value": lambda h: setattr(h, "table", {"a": {"b": 1}}),
    "all attributes": lambda h: setattr(h, "__dict__", dict(h.__dict__)),
    "its class": lambda h: setattr(h, "__class__", type("Holder", (Base,), {})),
    "an attribute of its class": lambda h: setattr(type(h), "more", 1),
    "an attribute of a base": lambda h: setattr(type(h).__mro__[1], "limit", 2),
    "an item of a list": lambda h: h.list.__setitem__(0, 5),
    "one item more": lambda h: h.list.append(3),
    "an item of a deque": lambda h: h.deque.append(3),
    "an element of a set": lambda h: h.set.add(3),
    "an entry at depth": lambda h: h.table["a"].update(b=2),
    "a slot": lambda h: setattr(h.slotted, "size", 4),
    "a variable of the context": lambda h: h.variable.set(2),
    "an empty slot": lambda h: delattr(h.slotted, "size"),
    "a closed-over object": lambda h: setattr(h.function.__closure__[0], "cell_contents", [1]),
    "an empty cell": lambda h: delattr(h.function.__closure__[0], "cell_contents"),
    "code": _code,
    "defaults": lambda h: setattr(h.function, "__defaults__", (3,)),
    "defaults by name": lambda h: h.function.__kwdefaults__.update(to=4),
    "an attribute of a function": lambda h: setattr(h.function, "more", 1),
}


@pytest.fixture(scope="module", params=["python", "c"])
def language(request, tmp_path_factory):
    before = native._module
    if request.param == "c":
        folder = tmp_path_factory.mktemp("plans")
        (folder / "sources").mkdir(0o700)
        library = native.build(shutil.which("cc") or "cc", folder)
        if library is None:
            pytest.skip("no compiler, or dictionaries without versions")
        (kept,) = (folder / "sources").iterdir()  # built once
        write_sections(kept, {"check": b"kept"})
        assert native.build.__wrapped__(shutil.which("cc") or "cc", folder) == b"kept"
        native.use_library(lambda: load_library(native.ENTRY, library, None))
    else:
        native._module = None
    yield request.param
    native._module = before


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed(language, change):
    own = {"Base": type("Base", (), {"limit": 1})}  # classes of this test's own: others see no change of them
    own["Holder"] = type("Holder", (own["Base"],), {"__init__": Holder.__init__})
    holder = own["Holder"]()
    walk = Walk()
    walk.add("holder", holder)
    assert walk.watch.holds()
    assert walk.watch.holds()
    assert (walk.watch._native_watch is not None) == (language == "c")
    CHANGES[change](holder)
    assert walk.watch.holds() == (change == "nothing")


@pytest.mark.parametrize("change", ["nothing", "an attribute", "another attribute", "its bases"])
def test_a_class_that_changes_often(language, change):
    first, second = (type(name, (), {}) for name in ("First", "Second"))
    often = type("Often", (first,), {})
    for count in range(1100):  # Python 3.13 gives a class no more than a thousand versions
        often.count = count
        assert often().count == count
    walk = Walk()
    walk.add("value", often())
    assert walk.watch.holds()
    assert walk.watch.holds()
    assert (walk.watch._native_watch is not None) == (language == "c")
    if change == "its bases":
        often.__bases__ = (second,)
    elif change != "nothing":
        setattr(often, "count" if change == "an attribute" else "more", -1)
    assert walk.watch.holds() == (change == "nothing")


def test_entries_of_a_module(language):
    module = types.ModuleType("watched")
    module.read, module.unread = 1, 1
    walk = Walk()
    walk.watch.entry(vars(module), "read")
    walk.watch.entry(vars(module), "absent")
    assert walk.watch.holds()
    module.unread = 2
    assert walk.watch.holds()
    module.absent = 2
    assert not walk.watch.holds()
    del module.absent
    assert walk.watch.holds()
    module.read = 2
    assert not walk.watch.holds()


def test_wrong_lists_are_refused(language):
    if language == "python":
        pytest.skip("there is nothing to refuse")
    made = native._module.Watched
    wrong = [
        ([[]] * 12, TypeError),
        ([[1], [1], *[[]] * 11], TypeError),
        ([[{}], [], *[[]] * 11], ValueError),
    ]
    if DICTS_HAVE_VERSIONS:
        wrong.append(([[{}], [-1], *[[]] * 11], OverflowError))
    for lists, error in wrong:
        with pytest.raises(error):
            made(*lists, None)


def test_many_changes_elsewhere_are_none_here(language):
    here, there = Walk(), Walk()
    kept, changing = {"a": 1}, {"a": 1}
    here.watch.dictionary(kept)
    there.watch.dictionary(changing)
    assert here.watch.holds()
    assert there.watch.holds()
    for number in (5, 5000):  # of so many Python's notes are not kept
        for i in range(number):
            changing["a"] = i
        assert here.watch.holds()
        assert not there.watch.holds()
    kept["a"] = 2
    assert not here.watch.holds()


def test_attributes_set_by_warm_bytecode(language):
    walk, holder = Walk(), Base()
    holder.size = 0
    walk.watch.dictionary(vars(holder))

    def store(times):
        for i in range(times):
            holder.size = i

    store(1000)
    assert not walk.watch.holds()
    walk.watch.__init__()
    walk.watch.dictionary(vars(holder))
    assert walk.watch.holds()
    store(1)
    assert not walk.watch.holds()


def test_what_copyreg_notes_on_a_class_is_no_change(language):
    """Whoever copies an object of the class, or walks over one, has it noted there."""
    kind = type("Copied", (), {"limit": 1})
    walk = Walk()
    walk.add("class", kind)
    assert walk.watch.holds()
    copy.copy(kind())
    assert "__slotnames__" in vars(kind)
    assert walk.watch.holds()
    kind.limit = 2
    assert not walk.watch.holds()


def test_a_walk_over_objects_holds_after_it(language):
    """Also where it meets a class before an object of it."""
    base = type("Base", (), {})
    walk = Walk()
    walk.add("objects", [type("Derived", (base,), {})(), base()])
    assert walk.watch.holds()
