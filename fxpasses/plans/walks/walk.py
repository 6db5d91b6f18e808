"""A walk over live objects that sees everything about them: a digest of their content, their tensors in
order, and what to check later to find out whether anything has changed.

Objects are numbered as they are met. A repeated object is a reference, so tied weights and shared modules
count. What cannot be walked raises :class:`~fxpasses.plans.errors.NoPlan`. Nothing is skipped.
"""

from __future__ import annotations

import abc
import collections
import contextvars
import copy
import copyreg
import enum
import functools
import gc
import logging
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

from fxpasses.plans import _torch
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.inputs.exchanged import Place, places_of
from fxpasses.plans.objects import _torch_notes, kinds
from fxpasses.plans.objects._torch_optimizers import non_parameter_attributes
from fxpasses.plans.objects.code import code_digest, codes_inside, global_names
from fxpasses.plans.objects.hidden_state import has_hidden_state, is_hash
from fxpasses.plans.objects.hooks_of_modules import ALL_HOOKS, HOOKS_OF_CALLS
from fxpasses.plans.objects.library_operators import parts_of_operator
from fxpasses.plans.objects.named_attributes import has_named_attributes
from fxpasses.plans.objects.open_objects import OpenObjects
from fxpasses.plans.objects.origin import BUILTIN, DESCRIPTORS, origin_of
from fxpasses.plans.objects.references import can_be_weak
from fxpasses.plans.objects.unseen import READERS
from fxpasses.plans.objects.watched_state import Watch, value_of
from fxpasses.plans.tensors.process_groups import describe_group
from fxpasses.plans.tensors.shards import distribution_of, is_sharded, parts_of, sharded_facts
from fxpasses.plans.tensors.tensor_facts import facts_without_sizes, tensor_facts


class Walk(OpenObjects):
    """One walk.

    Attributes:
        tensors: the tensors, in the order in which they were met.
        groups: the process groups and device meshes, likewise.
        codes: digests of the code of all functions that were met.
        made_codes: those whose globals are not a module's; what they read there was walked too.
        hashes: attributes that hold the process-specific hash of their object: traced code may not read them.
        optimizers: those that were met, walked without what they hold of parameters.
        gradients: of the tensors, once they were read.
        counts_before_objects: how many objects and tensors were met before those among the arguments.
        protocol_attributes: attributes that are read when a class is compared with a protocol that was met.

    Args:
        keep_facts: whether the facts are kept.
        leaves_open: whether only :meth:`close` walks objects whose attributes traced code reads by name.
    """

    def __init__(self, *, keep_facts: bool = False, leaves_open: bool = False) -> None:
        super().__init__(keep_facts=keep_facts, leaves_open=leaves_open)
        self.tensors: list[torch.Tensor] = []
        self.groups = list[Any]()
        self.places: dict[int, Place] = {}
        self.exchanged: dict[int, Place] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.gradients: list[list[Any]] | None = None
        self.protocol_attributes: set[str] = set()
        self.codes, self.made_codes = set[str](), set[str]()
        self.hashes = set[str]()
        self._storages, self._numbers_of_tensors = dict[int, int](), dict[int, int]()
        self._kept = list[Any]()
        self.counts_before_objects = 0, 0
        self._in_class = False
        self._classes = [kind for kind in kinds.BUILTIN_KINDS if isinstance(kind, type)]
        self._abstract: list[type] = []

    def fork(self, *, watched: bool = False) -> Walk:
        """Copy this walk, to continue it. The copy watches what this one has met only if ``watched``."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (list, set, dict)):
                setattr(other, name, value.copy())
        other.watch = self.watch.copy() if watched else Watch()
        other.watch.not_kept = self.watch.not_kept
        return other

    def add(self, label: str, value: Any) -> str:
        """Walk a value and return the digest of its content.

        Raises:
            NoPlan: it holds something that cannot be walked.
        """
        start = len(self._lines)
        for kind in kinds.TENSOR_CLASSES:
            self._path = [kind.__name__]
            self._walk(kind)
        self._path = [label]
        self._walk(value)
        self._weak = self._emit_weak_references(self._weak, self._numbers, allow_unknown=bool(self.left_open))
        return self._digest_since(start)

    def walk_call(self, model: Any, objects: Sequence[Any]) -> list[Any]:
        """Walk a model and the objects among a call's arguments; returns the digests of both.

        Objects that :func:`can_be_weak` are not kept alive.

        Raises:
            NoPlan: they hold something that cannot be walked.
        """
        self.watch.not_kept = frozenset(id(item) for item in objects if can_be_weak(item))
        return [self.add("model", model), self.walk_objects(objects)]

    def walk_objects(self, objects: Sequence[Any]) -> list[str]:
        """Walk the objects among the arguments, after the model, and return their digests.

        Raises:
            NoPlan: they hold something that cannot be walked.
        """
        self.watch.not_kept = frozenset(id(item) for item in objects if can_be_weak(item))
        self.counts_before_objects = len(self._kept), len(self.tensors)
        return [self.add(f"object {i}", item) for i, item in enumerate(objects)]

    def has_met(self, value: Any) -> bool:
        """Whether the walk has met this object."""
        return id(value) in self._numbers

    def _visit(self, step: str, value: Any) -> None:
        self._path.append(step)
        self._walk(value)
        self._path.pop()

    def _walk(self, value: Any) -> None:
        kind = type(value)
        if kind in kinds.PLAIN:
            if kind is slice:
                self._emit("slice", *map(_slice_bound, (value.start, value.stop, value.step)))
            else:
                self._emit(kind.__name__, repr(value))
            return
        if kind in kinds.PLAIN_OF_TORCH:
            self._emit(kind.__name__, str(value))
            return
        if id(value) in READERS and not self._path[-1].endswith(f".{value.__name__}"):
            raise self._refusal("a function that reads more than objects hold, by another name")
        number = self._numbers.get(id(value))
        if number is not None:
            self._emit("same as", number)
            self._drop_places(value)
            return
        self._numbers[id(value)] = len(self._kept)
        self._kept.append(None if id(value) in self.watch.not_kept else value)
        try:
            self._walk_by_kind(value, kind)
        except NoPlan:
            del self._numbers[id(value)]  # the next one to meet it must be told too
            raise

    def _walk_by_kind(self, value: Any, kind: type) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, type):
            self._class(value)
        elif (original := _torch_notes.original_callable(value)) is not None:
            self._emit("compiled")
            self._visit("", original)
        elif kind is types.FunctionType:
            self._function(value)
        elif kind is types.MethodType:
            self._emit("method")
            self._visit(".__func__", value.__func__)
            self._visit(".__self__", value.__self__)
        elif kind is types.ModuleType or isinstance(value, types.ModuleType):
            if len(self._path) > 1:  # of modules, only the attributes that are read are walked
                raise self._refusal("a module that an object holds")
            self._emit("module", value.__name__)
        elif kind in BUILTIN:
            self._builtin(value)
        elif kind in DESCRIPTORS:
            self._emit("descriptor", value.__qualname__)
        elif kind is kinds.FIELD_OF_NAMED_TUPLE:
            self._emit("field of a named tuple", value.__reduce__()[1][0])
        elif isinstance(value, kinds.WRAPPERS):
            self._wrapper(value, kind)
        elif kind is functools.partial:
            self._emit("partial")
            self._visit(".func", value.func)
            self._visit(".args", value.args)
            self._visit(".keywords", value.keywords)
            self.watch.attributes(value, ("func", "args", "keywords"))
            self._visit(".__dict__", value.__dict__)
        elif kind in kinds.CACHES:  # the function is traced; its cached results never count
            self._emit("cache", kind.__name__)
            self.watch.dictionary(value.__dict__)
            self._items(value.__dict__)
        elif kind in (*kinds.LOCKS, *kinds.EAGER_ONLY) or _torch_notes.is_fsdp_hook_state(value):
            self._emit("closed", kind.__name__)
        elif kind in kinds.REFERENCES:
            self._emit("weak reference", value() is None)
            if value() is not None:
                self._weak.append(("".join(self._path), value))
        elif kind is types.MappingProxyType:
            self._emit("proxy")
            self._visit(".mapping", gc.get_referents(value)[0])
        elif isinstance(value, enum.Enum):
            self._emit("enum", value.name)
            self._visit(".__class__", kind)
            self.watch.dictionary(value.__dict__)
            self._items({name: item for name, item in value.__dict__.items() if name != "_inverted_"})
        elif isinstance(value, logging.Logger):
            self._logger(value)
        elif isinstance(value, contextvars.ContextVar):
            self._emit("context variable", value.name)
            self.watch.variable(value)
            self._visit(".get()", value_of(value))
        elif kind.__module__ == "typing" or kind in (types.GenericAlias, types.UnionType):
            self._emit("type", repr(value))
        elif _torch.operator_name(value):
            self._emit("operator", _torch.operator_name(value))
            self._items(dict(parts_of_operator(value, self.watch)))
        elif (group := describe_group(value)) is not None:
            self._emit(*group)
            self.groups.append(value)
        else:
            self._object(value, kind)

    def _tensor(self, tensor: torch.Tensor) -> None:
        sharded = is_sharded(tensor)
        try:
            facts = sharded_facts(tensor) if sharded else tensor_facts(tensor)
        except NoPlan as error:
            raise self._refusal(error.reason) from None
        if len(self.tensors) in self._names.grow:
            facts = facts_without_sizes(facts)
        storage = tensor.untyped_storage().data_ptr() if tensor.numel() and not sharded else 0
        place = self._storages.setdefault(storage, len(self._storages)) if storage else -1
        self._emit("tensor", len(self.tensors), place, *facts)
        self._numbers_of_tensors[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        self.watch.dictionary(tensor.__dict__)
        self._items(tensor.__dict__)
        if sharded:
            self._emit("distributed", *distribution_of(tensor))
            self.watch.attributes(tensor, copyreg._slotnames(type(tensor)))  # type: ignore[attr-defined]
            self._tensor(parts_of(tensor)[0])

    def _drop_places(self, value: Any) -> None:
        for item in value if type(value) is tuple else (value,):
            if isinstance(item, torch.Tensor):
                self.places.pop(self._numbers_of_tensors[id(item)], None)

    def _wrapper(self, value: Any, kind: type) -> None:
        base = next(base for base in kinds.WRAPPERS if isinstance(value, base))
        self._emit(base.__name__)
        if kind is not base:
            self._visit(".__class__", kind)
            self._visit(".__dict__", getattr(value, "__dict__", None))
        for name in ("fget", "fset", "fdel") if base is property else ("__func__",):
            self._visit(f".{name}", getattr(value, name))

    def _logger(self, value: logging.Logger) -> None:
        self._emit("logger", value.name, value.manager.disable)
        self.watch.attributes(value.manager, ("disable",))
        self.watch.dictionary(value.__dict__)
        known = ("parent", "manager", "handlers", "filters", "_cache")  # these decide where messages go
        self._items({name: item for name, item in value.__dict__.items() if name not in known})
        self._visit(".parent", value.parent)

    def _builtin(self, value: Any) -> None:
        owner = getattr(value, "__self__", None)
        self._emit(type(value).__name__, getattr(value, "__module__", None), value.__qualname__)
        if owner is not None and not isinstance(owner, types.ModuleType):
            self._visit(".__self__", owner)

    def _function(self, value: types.FunctionType) -> None:
        code = value.__code__
        module = sys.modules.get(value.__globals__.get("__name__", ""))
        self.codes.update(map(code_digest, codes_inside(code)))
        self._emit("function", value.__module__, value.__name__, value.__qualname__, code_digest(code))
        if value.__dict__.get("_dynamo_marked_constant"):
            return  # it is not traced; its results are read
        depth = len(self._path)
        is_method = self._in_class
        self._in_methods += [code_digest(code)] * is_method
        try:
            self._function_parts(value, code, module)
        except NoPlan as error:
            self.unwalkable_codes.add(code_digest(code))
            if not self._in_class:
                raise
            del self._path[depth:]
            self._emit("unseen", error.reason)  # check_covered makes sure that it is not traced
        finally:
            del self._in_methods[len(self._in_methods) - is_method :]

    def _function_parts(self, value: types.FunctionType, code: types.CodeType, module: Any) -> None:
        if module is None or vars(module) is not value.__globals__:  # made from text, as in named tuples
            self.made_codes.update(map(code_digest, codes_inside(code)))
            for name in global_names(code):
                self.watch.entry(value.__globals__, name)
                self._emit("global", name, name in value.__globals__)
                if name in value.__globals__:
                    self._visit(f".__globals__[{name!r}]", value.__globals__[name])
        elif not self._in_class and _torch.is_imported_with_torch(module):
            self._settings(value.__globals__, code)
        self.watch.attributes(value, kinds.PARTS_OF_FUNCTIONS)
        self._visit(".__defaults__", value.__defaults__)
        self._visit(".__kwdefaults__", value.__kwdefaults__)
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            if name == "__class__":
                self._emit("cell", name)  # of ``super()``; the class is walked where it is used
                continue
            try:
                content = cell.cell_contents
            except ValueError:
                raise self._refusal("a closure that is not filled yet") from None
            self.watch.attributes(cell, ("cell_contents",))
            self._visit(f".closure[{name!r}]", content)
        self.watch.dictionary(value.__dict__)
        self._items({k: v for k, v in value.__dict__.items() if k != "__wrapped__"})
        if "__wrapped__" in value.__dict__:
            self._visit(".__wrapped__", value.__dict__["__wrapped__"])

    def _registrations(self, cls: type) -> None:
        """Which classes are subclasses of others only because they are registered with an abstract class."""
        pairs = [(cls, base) for base in self._abstract]
        # Which classes are ones of ``ABC`` depends on all abstract classes of the process, and nobody asks.
        if isinstance(cls, abc.ABCMeta) and cls is not abc.ABC and not getattr(cls, "_is_protocol", False):
            pairs += [(kind, cls) for kind in self._classes]
            self._abstract.append(cls)
            self.watch.registrations()
        self._classes.append(cls)
        for kind, base in pairs:
            if base not in kind.__mro__ and issubclass(kind, base):
                self._emit("registered", kind.__module__, kind.__qualname__, base.__qualname__)

    def _settings(self, values: dict[str, Any], code: types.CodeType) -> None:
        """The plain globals of torch that one of its functions reads. Torch's version covers the rest."""
        for name in global_names(code):
            if type(values.get(name, _torch)) in kinds.PLAIN and name not in _torch.TRACING_FLAGS:
                self.watch.entry(values, name)
                self._emit("setting", name, repr(values[name]))

    def _class(self, cls: type) -> None:
        self._emit("class", cls.__module__, cls.__qualname__, cls.__name__)
        if not cls.__flags__ & kinds.HEAP_TYPE or cls.__module__ == "typing":
            return
        for base in cls.__mro__[1:]:
            self._visit(f".{base.__name__}", base)
        if type(cls) is not type:
            self._visit(".__class__", type(cls))
        self._registrations(cls)
        if getattr(cls, "_is_protocol", False):
            self.protocol_attributes.update(vars(cls), getattr(cls, "__annotations__", ()))
        self.watch.class_of(cls)
        self.watch.attributes(cls, ("__name__", "__qualname__"))
        if _torch.is_trusted(cls):  # its version covers its code, but not its settings
            for name, value in vars(cls).items():
                if type(value) in kinds.PLAIN and not name.startswith(("__", kinds.FUNCTION_ID)):
                    self._emit("attribute", name, repr(value))
            kept = {k: v for k, v in vars(cls).items() if not _torch_notes.is_disabled_copy(cls, k, v)}
            origins = [(name, origin) for name, value in kept.items() if (origin := origin_of(value))]
            self._emit("methods", origins)
            return
        if any(name in vars(cls) for name in kinds.INSTANCE_CHECKS):
            raise self._refusal("a class that decides what its instances are")
        for name, value in list(vars(cls).items()):
            if name in kinds.IGNORED_CLASS_ATTRIBUTES or type(value) is types.GetSetDescriptorType:
                continue
            if name in ("__annotations__", "__annotate_func__", "__annotations_cache__"):
                continue
            if cls is torch.nn.Module and name in ("__init__", "__setstate__", "__del__"):
                continue  # Dynamo replaces them; none of them runs in a call of a module
            self._emit("attribute", name)
            before, self._in_class = self._in_class, True
            try:
                self._visit(f".{name}", value)
            finally:
                self._in_class = before

    def _object(self, value: Any, kind: type) -> None:
        base = next(
            b
            for b in kind.__mro__
            if b in kinds.CONTAINERS or b is object or not b.__flags__ & kinds.HEAP_TYPE
        )
        if base not in (*kinds.CONTAINERS, *kinds.WITH_ATTRIBUTES) or has_hidden_state(kind, base):
            raise self._refusal(f"an object of class {kind.__module__}.{kind.__qualname__}")
        if kind.__module__.startswith("torch.backends"):
            raise self._refusal("settings of torch.backends")
        before, self._in_class = self._in_class, False
        try:
            self._parts(value, kind, base)
        finally:
            self._in_class = before

    def _parts(self, value: Any, kind: type, base: type) -> None:
        if kind not in kinds.CONTAINERS:
            self._emit("object")
            self._visit(".__class__", kind)
            self.watch.class_of_object(value)
        if base is collections.defaultdict:
            self.watch.attributes(value, ("default_factory",))
            self._visit(".default_factory", value.default_factory)
        if issubclass(kind, dict):
            self.watch.dictionary(value)
            self._items(value)
        elif base not in kinds.WITH_ATTRIBUTES:
            self._emit(base.__name__, len(value))
            self.watch.sequence(value)
            if base is collections.deque:
                self._emit("maxlen", value.maxlen)
            if issubclass(kind, (set, frozenset)):
                # Numbers are in an order that the history of the set decides. The order of others differs by
                # process, and code that reads it is refused.
                ordered = all(type(item) in kinds.NUMBERS for item in value)
                for item in value if ordered else sorted(value, key=self._sort_key):
                    self._visit("{...}", item)
            else:
                for position, item in enumerate(value):
                    known = len(self.tensors)
                    self._visit(f"[{position}]", item)
                    if kind is list and (met := self.tensors[known:]):
                        self.places |= dict(enumerate(places_of(value, position, met), known))
        if kind not in (dict, list, tuple, set, frozenset):
            self._state(value)

    def _sort_key(self, item: Any) -> str:
        if isinstance(item, type):
            return f"{item.__module__}.{item.__qualname__}"
        if type(item) not in (bool, int, float, complex, str, bytes, type(None), *kinds.PLAIN_OF_TORCH):
            raise self._refusal("a set of objects")
        return f"{type(item).__name__} {item!r}"

    def _state(self, value: Any) -> None:
        state = getattr(value, "__dict__", None)
        if state is not None:
            self.watch.attributes(value, ("__dict__",))  # it may be replaced as a whole
            if has_named_attributes(type(value)):  # type: ignore[arg-type]
                self._defer_or_walk(value)
            else:
                self.watch.dictionary(state)
                if isinstance(value, torch.optim.Optimizer):
                    self.optimizers.append(value)
                    state = non_parameter_attributes(value)
                self._items(state, value)
        for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
            self.watch.attributes(value, (name,))
            self._emit("slot", name, hasattr(value, name))
            if hasattr(value, name):
                self._visit(f".{name}", getattr(value, name))

    def _items(self, values: dict[Any, Any], owner: Any = None) -> None:
        notes = [key for key in _torch_notes.MARKS if key in values and _torch_notes.is_mark(key, values)]
        self._emit("items", len(values) - len(notes))
        for key, item in values.items():
            if (notes and key in notes) or _torch_notes.is_composable_api_key(key):
                continue
            if type(item) is int and abs(item) >= 1 << 32 and is_hash(item, owner):
                self._emit("the hash of its object", key)
                self.hashes.add(key)
                continue
            if (
                key in ALL_HOOKS
                and isinstance(owner, torch.nn.Module)
                and type(item) is collections.OrderedDict
            ):
                self._hooks(key, item, values)
                continue
            if type(key) is str:
                known = len(self.tensors)
                self._emit("key", key)
                self._visit(f".{key}", item)
                if met := self.tensors[known:]:
                    of = values if owner is None else vars(owner)
                    self.places |= dict(enumerate(places_of(of, key, met), known))
            else:
                self._visit("[key]", key)
                self._visit(f"[{key!r}]", item)

    def _hooks(self, name: str, hooks: dict[int, Any], values: dict[str, Any]) -> None:
        """Hooks of a module. Their process-wide numbers give their order and match entries of other kinds."""
        self._emit("hooks", name, len(hooks))
        if hooks or name in HOOKS_OF_CALLS:
            self.watch.dictionary(hooks)
        numbers = sorted({number for kind in ALL_HOOKS for number in values.get(kind, ())}) if hooks else []
        for number, hook in hooks.items():
            self._emit("place", numbers.index(number))
            self._visit(f".{name}[{number}]", hook)


def _slice_bound(value: Any) -> Any:
    if type(value) not in (int, type(None)):
        raise NoPlan("a slice of something else than integers")
    return value
