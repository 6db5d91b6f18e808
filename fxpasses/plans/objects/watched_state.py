"""The check before each call of a plan: whether anything that its walk has seen may have changed.

A false alarm costs another check, but an unnoticed change would give a wrong result. So everything that was
seen is checked: versions of dictionaries and classes, identities elsewhere.
"""

from __future__ import annotations

import abc
import collections
import contextvars
import weakref
from collections.abc import Sequence
from typing import Any

from fxpasses.plans import _torch, native
from fxpasses.plans.objects import kinds

_MISSING = object()
_ANYTHING = object()


class Watch:
    """Dictionaries, sequences, classes and attributes, as they were when they were added.

    Attributes:
        not_kept: the ``id`` of objects that are not kept alive, although what they hold is.
    """

    def __init__(self) -> None:
        self.not_kept: frozenset[int] = frozenset()
        self._dictionaries: list[dict[Any, Any]] = []
        self._contents: list[Any] = []
        self._lists: list[list[Any] | set[Any] | dict[Any, Any]] = []
        self._items: list[list[Any]] = []
        self._other_sequences: list[tuple[Any, list[Any]]] = []
        self._classes: list[type] = []
        self._attributes_of_classes: list[list[Any]] = []
        self._objects: list[Any] = []
        self._kinds: list[type] = []
        self._owners: list[Any] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        self._entry_owners: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._entries: list[Any] = []
        self._variables: list[contextvars.ContextVar[Any]] = []
        self._values_of_variables: list[Any] = []
        self._references: list[tuple[weakref.ReferenceType[Any], type, Any]] = []
        self._abc_cache_token: Any = None
        self._native_watch: Any = None

    def copy(self) -> Watch:
        """A watch over the same, to which more can be added."""
        other = Watch()
        for name, value in vars(self).items():
            setattr(other, name, value.copy() if isinstance(value, list) else value)
        other._native_watch = None
        return other

    def dictionary(self, values: dict[Any, Any]) -> None:
        """Watch the keys and values of a dictionary."""
        self._dictionaries.append(values)
        self._contents.append(_torch.dictionary_state(values))
        if isinstance(values, collections.OrderedDict) and len(values) > 1:
            keys = collections.OrderedDict.keys(values)  # ``move_to_end`` gives the dictionary no new version
            self._other_sequences.append((keys, list(keys)))

    def sequence(self, values: Any) -> None:
        """Watch the items of a list, tuple, set or similar."""
        if isinstance(values, (list, set)):
            self._lists.append(values)
            self._items.append(list(values))
        elif not isinstance(values, (tuple, frozenset)):  # these are immutable
            self._other_sequences.append((values, list(values)))

    def class_of(self, cls: type) -> None:
        """Watch the attributes of a class."""
        self._classes.append(cls)
        self._attributes_of_classes.append(_class_content(cls))

    def class_of_object(self, value: Any) -> None:
        """Watch the class of an object, and if it is not kept, that its ``__dict__`` is the same object."""
        if id(value) in self.not_kept:
            self._references.append((weakref.ref(value), type(value), value.__dict__))
            return
        self._objects.append(value)
        self._kinds.append(type(value))

    def registrations(self) -> None:
        """Watch registrations of classes with abstract classes."""
        self._abc_cache_token = abc.get_cache_token()

    def attributes(self, value: Any, names: Sequence[str]) -> None:
        """Watch attributes that are in no dictionary, of an object that is kept alive."""
        if id(value) in self.not_kept:
            return
        for name in names:
            self._owners.append(value)
            self._names.append(name)
            self._values.append(_attribute(value, name))

    def entry(self, values: dict[Any, Any], name: Any) -> None:
        """Watch one entry of a dictionary whose other entries may change, such as the globals of a module."""
        self._entry_owners.append(values)
        self._keys.append(name)
        self._entries.append(values.get(name, _MISSING))

    def release(self, values: dict[Any, Any] | list[Any], name: Any) -> None:
        """Stop watching one entry of a dictionary or item of a list. ``name`` is the key or index."""
        self._native_watch = None
        if isinstance(values, list):
            for i in [i for i, known in enumerate(self._lists) if known is values][::-1]:
                del self._lists[i]
                self._other_sequences.append((values, self._items.pop(i)))
            for known, items in self._other_sequences:
                if known is values:
                    items[name] = _ANYTHING
            return
        watched = [i for i, known in enumerate(self._dictionaries) if known is values]
        for i in reversed(watched):
            del self._dictionaries[i], self._contents[i]
        if watched:
            self.keys(values)
            for other in values:
                self.entry(values, other)
        entries = zip(self._entry_owners, self._keys, self._entries, strict=True)
        kept = [entry for entry in entries if entry[0] is not values or entry[1] != name]
        self._entry_owners, self._keys, self._entries = ([entry[i] for entry in kept] for i in range(3))

    def keys(self, values: dict[Any, Any]) -> None:
        """Watch the keys of a dictionary and their order."""
        self._lists.append(values)
        self._items.append(list(values))

    def variable(self, variable: contextvars.ContextVar[Any]) -> None:
        """Watch the value of a context variable."""
        self._variables.append(variable)
        self._values_of_variables.append(value_of(variable))

    def holds(self) -> bool:
        """Whether nothing has changed."""
        if self._abc_cache_token is not None and abc.get_cache_token() != self._abc_cache_token:
            return False
        if self._variables and not _are_identical(
            list(map(value_of, self._variables)), self._values_of_variables
        ):
            return False
        for reference, kind, attributes in self._references:
            if type(value := reference()) is not kind or value.__dict__ is not attributes:
                return False
        if self._native_watch is None or not self._native_watch.holds():
            # Or a class has a new version but is unchanged: Dynamo marks classes of modules when it compiles.
            native_watch = native.watched(
                self._dictionaries, self._contents, self._lists, self._items, self._classes, self._objects, self._kinds,
                self._owners, self._names, self._values, self._entry_owners, self._keys, self._entries, _MISSING,
            )  # fmt: skip
            if not self._is_unchanged():
                return False
            self._native_watch = native_watch  # versions taken before everything was found unchanged
            return True
        return all(_are_identical(values, was) for values, was in self._other_sequences)

    def _is_unchanged(self) -> bool:
        return (
            all(map(_torch.has_dictionary_state, self._dictionaries, self._contents))
            and list(map(type, self._objects)) == self._kinds
            and all(
                values.get(name, _MISSING) is was
                for values, name, was in zip(self._entry_owners, self._keys, self._entries, strict=True)
            )
            and all(
                _attribute(value, name) is was
                for value, name, was in zip(self._owners, self._names, self._values, strict=True)
            )
            and all(map(_are_identical, self._lists, self._items))
            and all(_are_identical(values, was) for values, was in self._other_sequences)
            and all(
                _are_identical(_class_content(cls), was)
                for cls, was in zip(self._classes, self._attributes_of_classes, strict=True)
            )
        )


def value_of(variable: contextvars.ContextVar[Any]) -> Any:
    """The current value of a context variable. A placeholder if it has neither a value nor a default."""
    try:
        return variable.get()
    except LookupError:
        return NotImplemented


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, _MISSING)
    except ValueError:  # an empty cell
        return _MISSING


def _class_content(cls: type) -> list[Any]:
    content = {name: value for name, value in vars(cls).items() if name not in kinds.CACHED_ON_CLASSES}
    return [cls.__mro__, *content, *content.values()]


def _are_identical(values: Any, was: list[Any]) -> bool:
    return len(values) == len(was) and all(a is b or b is _ANYTHING for a, b in zip(values, was, strict=True))
