"""Calls written in many ways, varying all that can differ, for adversarial tests of the dispatch cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dispatch.python
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.conformance.observe import observe
from benchmarks.conformance.subjects import seed

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An operator of ATen with its arguments."""


@contextlib.contextmanager
def _setting(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@contextlib.contextmanager
def _deterministic(warn_only: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _both(*contexts: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _default_dtype(dtype: torch.dtype) -> Any:
    return _setting(torch.get_default_dtype, torch.set_default_dtype, dtype)


STATES: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "default float64": lambda: _default_dtype(torch.float64),
    "default half": lambda: _default_dtype(torch.float16),
    "default device cuda": lambda: _setting(lambda: None, torch.set_default_device, "cuda"),
    "default device meta": lambda: _setting(lambda: None, torch.set_default_device, "meta"),
    "device context": lambda: torch.device("cuda"),
    "deterministic": lambda: _deterministic(False),
    "deterministic, warns": lambda: _deterministic(True),
    "autocast bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast half": lambda: torch.autocast("cpu", torch.float16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "autocast cuda": lambda: torch.autocast("cuda", torch.float16),
    "python dispatcher": torch._dispatch.python.enable_python_dispatcher,
    "flush denormals": lambda: _setting(lambda: False, torch.set_flush_denormal, True),
    "matmul precision": lambda: _setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "no mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "math attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "saved tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "dual level": torch.autograd.forward_ad.dual_level,
    "inference, default float64": lambda: _both(_default_dtype(torch.float64), torch.inference_mode()),
    "inference, autocast": lambda: _both(torch.autocast("cpu", torch.bfloat16), torch.inference_mode()),
}


class _Recorded(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and all(map(_is_dense, _tensors((args, kwargs)))):
            self.calls.append((func, *copied((args, kwargs))))
        return func(*args, **kwargs)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def reached(function: Callable[[], Any]) -> list[Call]:
    """The ATen calls on dense tensors that a program makes in eager."""
    recorded = _Recorded()
    with recorded:
        function()
    return recorded.calls


def copied(tree: Any) -> Any:
    """Real tensors of the same metadata, storages included, that nobody else has."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with torch.inference_mode(leaf.is_inference()):
            made = torch.empty(0, dtype=leaf.dtype)
            made.set_(
                leaf.detach().untyped_storage().clone(), leaf.storage_offset(), leaf.shape, leaf.stride()
            )
            torch._C._set_conj(made, leaf.is_conj()) if leaf.is_conj() else None
            torch._C._set_neg(made, leaf.is_neg()) if leaf.is_neg() else None
        return made.requires_grad_() if leaf.requires_grad else made

    return pytree.tree_map(one, tree)


def ways(call: Call) -> Iterator[Call]:
    """The call, the same call written otherwise (by keyword, with defaults), and calls that differ in one argument."""
    func, args, kwargs = call
    yield call
    schema = func._schema.arguments
    positional = [a for a in schema if not a.kwarg_only]
    for count in range(len(args)):
        named = {a.name: v for a, v in zip(positional[count:], args[count:], strict=False)}
        yield func, args[:count], {**named, **kwargs}
    longer = list(args)
    for argument in positional[len(args) :]:
        if not argument.has_default_value():
            break
        longer.append(argument.default_value)
        yield func, tuple(longer), kwargs
    for argument in schema:
        place = positional.index(argument) if argument in positional else len(args)
        if place >= len(args) and argument.name not in kwargs and argument.has_default_value():
            yield func, args, {**kwargs, argument.name: argument.default_value}
        for name, values in _BY_NAME.items():
            if argument.name == name and argument.kwarg_only:
                yield from ((func, args, {**kwargs, name: value}) for value in values)
    for place, value in enumerate(args):
        for other in _others(value):
            yield func, (*args[:place], other, *args[place + 1 :]), kwargs
    for name, value in kwargs.items():
        yield func, args, {k: v for k, v in kwargs.items() if k != name}
        for other in _others(value):
            yield func, args, {**kwargs, name: other}


_BY_NAME: dict[str, tuple[Any, ...]] = {
    "dtype": (None, torch.float64, torch.int64, torch.bool),
    "device": (None, "cpu", torch.device("cpu"), "cuda", "cuda:0", "cuda:1", "meta"),
    "memory_format": (None, torch.contiguous_format, torch.preserve_format, torch.channels_last),
    "layout": (None, torch.strided),
    "pin_memory": (None, False),
}


def _others(value: Any) -> list[Any]:
    """What may stand in the place of an argument."""
    match value:
        case bool():
            return [not value, int(value), None]
        case int():
            return [float(value), bool(value), complex(value), value + 1, -value, [value], 2**33, None]
        case float():
            whole = int(value) if abs(value) < 1e9 else 0
            return [whole, -0.0, 0.0, value + 0.5, float("nan"), float("inf"), True, None]
        case torch.Tensor():
            return _other_tensors(value)
        case str():
            return [value + "x", None]
        case None:
            return [0, 1, 1.0, True, False, [1], torch.float64]
        case list() | tuple() if value and all(type(v) is int for v in value):
            sizes = torch.Size(map(abs, value))
            return [
                tuple(value),
                sizes,
                [*value, 1],
                value[:-1],
                value[0],
                [value[0]],
                [True] * len(value),
                [],
            ]
        case list() | tuple() if value and isinstance(value[0], torch.Tensor):
            return [tuple(value), [*value, value[0]], value[:-1], [value[0]] * len(value), []]
    return []


def _other_tensors(tensor: torch.Tensor) -> list[Any]:
    plain = tensor.detach()
    found: list[Any] = [
        2,
        2.0,
        True,
        1j,
        None,
        plain.double(),
        plain.to(torch.int64),
        plain.to(torch.complex64),
    ]
    room = torch.zeros(2 * plain.numel() + 7, dtype=plain.dtype)
    found.append(room[5 : 5 + plain.numel()].view(plain.shape))
    if plain.dim():
        found += [plain.expand(2, *plain.shape), plain.narrow(0, 0, 0), torch.cat([plain, plain])[::2]]
    if plain.dim() > 1:
        found += [plain.mT, plain.mT.contiguous().mT]
    if plain.is_floating_point():
        found += [plain.clone().requires_grad_(), torch._neg_view(plain)]
    if plain.is_complex():
        found.append(plain.conj())
    with torch.inference_mode():
        found.append(plain.clone())
    return found


def outcome(call: Call, state: str) -> Any:
    """What is seen of a call's results and arguments, or the type of the error that it raised."""
    func, args, kwargs = call
    seed()
    try:
        with STATES[state]():
            results = func(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - refusals are compared as well
        return type(error)
    inputs = _tensors((args, kwargs))
    return observe((results, inputs), inputs), [_more(leaf) for leaf in pytree.tree_leaves(results)]


def _more(leaf: Any) -> Any:
    """What :func:`observe` does not look at."""
    if not isinstance(leaf, torch.Tensor):
        return leaf if leaf == leaf else "nan"
    held = leaf.untyped_storage().nbytes() if _is_dense(leaf) else None
    known = getattr(leaf, "constant", None) is not None
    return held, known, leaf.is_inference(), str(torch._C._dispatch_keys(leaf))
