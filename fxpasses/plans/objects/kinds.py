"""The kinds of objects that a walk distinguishes."""

from __future__ import annotations

import collections
import functools
import threading
import types
import weakref

import torch

from fxpasses.plans.objects.origin import CACHE

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range, slice,
)  # fmt: skip
PLAIN_OF_TORCH: tuple[type, ...] = (torch.FunctionSchema, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo, torch.Size)  # fmt: skip
EAGER_ONLY: tuple[type, ...] = ()
"""Classes whose objects traced code cannot read: they run in eager around what is compiled."""
if torch.distributed.is_available():
    EAGER_ONLY = (torch.distributed.Logger, torch.distributed.Reducer)
    PLAIN_OF_TORCH = (*PLAIN_OF_TORCH, torch.distributed.ReduceOp.RedOpType)
FIELD_OF_NAMED_TUPLE = type(vars(collections.namedtuple("_", ["name"]))["name"])
CONTAINERS = (
    dict, list, tuple, set, frozenset, collections.OrderedDict, collections.defaultdict, collections.deque,
)  # fmt: skip
WITH_ATTRIBUTES = (object, types.SimpleNamespace)
"""Classes whose objects hold attributes, and nothing else."""
WRAPPERS = (staticmethod, classmethod, property)
CACHES = (CACHE, functools.cached_property)
LOCKS = (type(threading.Lock()), type(threading.RLock()))
"""Traced code cannot ask whether they are taken."""
TENSOR_CLASSES = (torch.Tensor, torch.nn.Parameter)
"""Classes whose methods all code uses."""
REFERENCES = (weakref.ReferenceType, weakref.KeyedRef)
NUMBERS = (bool, int, float, complex)
BUILTIN_KINDS = (
    *PLAIN, *PLAIN_OF_TORCH, *CONTAINERS, types.FunctionType, types.MethodType, torch.Tensor, torch.nn.Parameter,
)  # fmt: skip
PARTS_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__", "__name__", "__qualname__")
INSTANCE_CHECKS = ("__instancecheck__", "__subclasscheck__", "__subclasshook__")
HEAP_TYPE = 1 << 9
CACHED_ON_CLASSES = (
    "___needs_generation_tag_patch", "___has_generation_tag_patch",  # Dynamo writes these on classes of modules
    "__slotnames__",  # copyreg caches them there
)  # fmt: skip
FUNCTION_ID = "_autograd_function_id"
"""How many classes of autograd functions the process had before this one."""
IGNORED_CLASS_ATTRIBUTES = (
    *CACHED_ON_CLASSES,
    "__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "_abc_impl", "__abstractmethods__",
)  # fmt: skip
