"""What code reads behind names that a walk over objects does not see: listed where it is written there, refused otherwise."""

import functools
import inspect
import os
import sys
import time

import pytest

from fxpasses.plans.errors import NoPlan
from fxpasses.plans.objects.unseen import environment_variables_read
from fxpasses.plans.walks.reads import walk_reads
from fxpasses.plans.walks.walk import Walk

ask, read, number_of = getattr, os.getenv, hash

LISTED = {
    "get": (lambda: os.environ.get("A", "0") == "1", ["A"]),
    "item": (lambda: os.environ["B"], ["B"]),
    "in": (lambda: "C" in os.environ, ["C"]),
    "getenv": (lambda: os.getenv("D"), ["D"]),
    "inside": (lambda x: [1 for _ in x if os.environ.get("E")], ["E"]),
    "two": (lambda: (os.environ["F"], os.getenv("G", "1")), ["F", "G"]),
    "names of arguments": (lambda f: f.__code__.co_varnames.index("x"), []),
    "a signature": (lambda f: len(inspect.signature(f).parameters), []),
    "a version": (lambda: sys.version_info >= (3, 11), []),
    "another attribute": (lambda x: getattr(x, "weight", None), []),
}
REFUSED = {
    "a name that is computed": lambda x: os.environ[x],
    "a name that is an argument": lambda x: os.environ.get(x),
    "a name that is put together": lambda x: os.environ.get("A" + x),
    "an f-string": lambda x: os.environ[f"A{x}"],
    "whether it is in there": lambda x: x in os.environ,
    "all": lambda: os.environ,
    "whether there are any": lambda x: "A" if os.environ else x,
    "a method": lambda: os.environ.pop("A"),
    "files": lambda: os.path.exists("A"),
    "of an object": lambda x: x.environ["A"],
    "text before": lambda x: "B" + os.environ[x],
    "code": lambda x: x.__code__,
    "a file name": lambda x: x.__code__.co_filename,
    "an annotation": lambda x: inspect.signature(x).return_annotation,
    "annotations": lambda x: x.__annotations__,
    "the time": lambda: time.time(),
    "the text of a class": lambda x: type(x).__doc__,
    "modules": lambda: sys.modules["os"],
}


@pytest.mark.parametrize("name", LISTED)
def test_what_can_be_listed(name):
    function, expected = LISTED[name]
    assert environment_variables_read(function.__code__) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot(name):
    with pytest.raises(NoPlan, match="may read more"):
        environment_variables_read(REFUSED[name].__code__)


def test_writing_and_importing_are_refused():
    def write():
        os.environ["A"] = "1"

    def delete():
        del os.environ["A"]

    def bring():
        import os

        return os.environ["A"]

    def keep():
        found = os.environ
        return found["A"]

    for function in (write, delete, bring, keep):
        with pytest.raises(NoPlan, match="may read more"):
            environment_variables_read(function.__code__)


class Holds:
    def __init__(self, value):
        self.value = value


def _closes_over(value):
    return lambda x: value(x)


HELD = {
    "an attribute": lambda: Holds(os.getenv),
    "a variable of a closure": lambda: _closes_over(hash),
    "a list": lambda: [vars],
    "a default": lambda: lambda x, ask=getattr: ask(x, "y"),
    "a part of something": lambda: functools.partial(hasattr, Holds(1)),
    "for the second time": lambda: Names(getattr),
}


class Names(Holds):
    def __init__(self, value):
        self.getattr = value
        super().__init__(value)


@pytest.mark.parametrize("held", HELD)
def test_functions_that_are_told_by_their_names_are_held_by_no_other_one(held):
    with pytest.raises(NoPlan, match="by another name"):
        Walk().add("model", HELD[held]())


@pytest.mark.parametrize("name", ["ask", "read", "number_of"])
def test_nor_is_a_global(name):
    assert walk_reads(Walk(), [(__name__, "getattr"), (__name__, "os", "getenv"), (__name__, "hash")])
    with pytest.raises(NoPlan, match="by another name"):
        walk_reads(Walk(), [(__name__, "getattr"), (__name__, name)])
