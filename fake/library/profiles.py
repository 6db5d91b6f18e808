"""Operator profiles: recorded input and output descriptions that stand in for a fake kernel.

The YAML format is torch's, so profiles saved by either can be read by the other.

>>> import torch
>>> t = TensorMetadata(rank=2, dtype=torch.float32, device=torch.device("cpu"), layout=torch.strided)
>>> text = generate_yaml_from_profiles({"mylib.op.default": {OpProfile((t, t), t)}})
>>> read_profiles_from_yaml(text) == {"mylib.op.default": {OpProfile((t, t), t)}}
True
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import yaml

from fake.library import _torch
from fake.library.errors import ProfileError
from fake.library.library import Library
from fake.library.register import get_ctx

__all__ = [
    "MissingOpProfile",
    "OpProfile",
    "TensorMetadata",
    "generate_yaml_from_profiles",
    "load_op_profiles",
    "read_profiles_from_yaml",
    "record_profile",
    "save_op_profiles",
    "unsafe_generate_fake_kernels",
]

Profiles = Mapping[str, "set[OpProfile]"]


class MissingOpProfile(ProfileError):
    """No profile of the operator matches the inputs of this call."""


@dataclass(frozen=True)
class TensorMetadata:
    """The profile of one tensor: everything but its sizes."""

    rank: int
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    @staticmethod
    def maybe_from_tensor(value: Any) -> TensorMetadata | None:
        """The description of a tensor; None of anything else."""
        if not isinstance(value, torch.Tensor):
            return None
        return TensorMetadata(value.dim(), value.dtype, value.device, value.layout)


@dataclass(frozen=True)
class OpProfile:
    """One observed call: a description (None: no tensor) for each argument, and of the output or outputs."""

    args_profile: tuple[TensorMetadata | None, ...]
    out_profile: TensorMetadata | tuple[TensorMetadata, ...]


def record_profile(op: Callable[..., Any], *args: Any, **kwargs: Any) -> OpProfile:
    """Call ``op`` and describe the call."""
    result = op(*args, **kwargs)
    inputs = tuple(TensorMetadata.maybe_from_tensor(a) for a in (*args, *kwargs.values()))
    describe = TensorMetadata.maybe_from_tensor
    if isinstance(result, (tuple, list)):
        return OpProfile(inputs, tuple(d for d in map(describe, result) if d is not None))
    output = describe(result)
    if output is None:
        raise ProfileError(
            f"{op}: only operators that return tensors have a profile, got {type(result).__name__}"
        )
    return OpProfile(inputs, output)


# --- YAML -----------------------------------------------------------------------------------------
def _dump_tensor(tensor: TensorMetadata) -> dict[str, Any]:
    dtypes, layouts, _, _ = _torch.serialization_codes()
    return {
        "rank": tensor.rank,
        "dtype": dtypes[tensor.dtype].value,
        "device": str(tensor.device),
        "layout": layouts[tensor.layout].value,
    }


def _load_tensor(data: Mapping[str, Any]) -> TensorMetadata:
    _, _, dtypes, layouts = _torch.serialization_codes()
    return TensorMetadata(
        rank=data["rank"],
        dtype=dtypes[data["dtype"]],
        device=torch.device(data["device"]),
        layout=layouts[data["layout"]],
    )


def _dump_profile(profile: OpProfile) -> dict[str, Any]:
    out = profile.out_profile
    return {
        "args_profile": [_dump_tensor(a) for a in profile.args_profile if a is not None],
        "out_profile": _dump_tensor(out)
        if isinstance(out, TensorMetadata)
        else [_dump_tensor(o) for o in out],
    }


def _load_profile(data: Mapping[str, Any]) -> OpProfile:
    out = data["out_profile"]
    return OpProfile(
        args_profile=tuple(_load_tensor(a) for a in data["args_profile"]),
        out_profile=tuple(_load_tensor(o) for o in out) if isinstance(out, list) else _load_tensor(out),
    )


def _version() -> str:
    return ".".join(map(str, _torch.TORCH_VERSION))


def generate_yaml_from_profiles(op_profiles: Profiles) -> str:
    """The profiles as YAML text that `read_profiles_from_yaml` reads."""
    operators = {name: [_dump_profile(p) for p in profiles] for name, profiles in op_profiles.items()}
    return yaml.dump({"torch_version": _version(), "operators": operators}, sort_keys=False)


def read_profiles_from_yaml(yaml_str: str) -> dict[str, set[OpProfile]]:
    """Profiles from YAML text.

    Raises:
        ProfileError: it was saved with another version of torch, or is not a file of profiles.
    """
    data = yaml.safe_load(yaml_str)
    if not isinstance(data, dict) or not {"torch_version", "operators"} <= set(data):
        raise ProfileError("This is not a file of operator profiles: it has no torch_version and operators.")
    if data["torch_version"] != _version():
        raise ProfileError(
            "Unable to load outdated profile. It was saved with torch version: "
            f"{data['torch_version']} but the current torch version is: {_version()}"
        )
    return {name: {_load_profile(p) for p in profiles} for name, profiles in data["operators"].items()}


def save_op_profiles(op_profiles: Profiles, f: Any) -> None:
    """Write profiles to a path or a binary stream.

    Raises:
        ValueError: ``f`` is neither.
    """
    text = generate_yaml_from_profiles(op_profiles)
    if isinstance(f, (str, os.PathLike)):
        with open(f, "w") as file:
            file.write(text)
    elif isinstance(f, io.BytesIO):
        f.write(text.encode("utf-8"))
    else:
        raise ValueError(f"Invalid type of file {f}")


def load_op_profiles(f: Any) -> dict[str, set[OpProfile]]:
    """Read profiles from a path or a binary stream.

    Raises:
        ValueError: ``f`` is neither.
        ProfileError: what it holds cannot be used.
    """
    if isinstance(f, (str, os.PathLike)):
        with open(f) as file:
            return read_profiles_from_yaml(file.read())
    if isinstance(f, io.BytesIO):
        return read_profiles_from_yaml(f.read().decode("utf-8"))
    raise ValueError(f"Invalid type of file {f}")


# --- fake kernels ---------------------------------------------------------------------------------
def _dynamic_tensor(description: TensorMetadata) -> torch.Tensor:
    ctx = get_ctx()
    shape = [ctx.new_dynamic_size() for _ in range(description.rank)]
    strides = []
    stride: Any = 1
    for size in shape:
        strides.append(stride)
        stride = stride * size
    return torch.empty_strided(
        shape, strides, dtype=description.dtype, device=description.device, layout=description.layout
    )


def _fake_kernel(op_name: str, profiles: set[OpProfile]) -> Callable[..., Any]:
    def fake_kernel(*args: Any, **kwargs: Any) -> Any:
        inputs = tuple(TensorMetadata.maybe_from_tensor(a) for a in (*args, *kwargs.values()))
        # Saved profiles have lost the places of arguments that are no tensors.
        tensors = tuple(i for i in inputs if i is not None)
        for profile in profiles:
            if (
                profile.args_profile == inputs
                or tuple(a for a in profile.args_profile if a is not None) == tensors
            ):
                out = profile.out_profile
                return (
                    _dynamic_tensor(out)
                    if isinstance(out, TensorMetadata)
                    else [_dynamic_tensor(o) for o in out]
                )
        raise MissingOpProfile(
            f"No fake kernel was found for {op_name}, and although we have previously registered some profiles to "
            f"generate a fake kernel, no profiles match the given inputs: {inputs}. Record a call with such inputs.",
            op=op_name,
        )

    return fake_kernel


@contextmanager
def unsafe_generate_fake_kernels(op_profiles: Profiles) -> Iterator[list[Library]]:
    """Inside the block, operators answer fake calls from their profiles; afterwards as before.

    The keys are names as in ``torch.ops``: ``"mylib.op.default"``. Ranks, dtypes and devices are taken from the
    profile and every size is a new unknown, which is why this is called unsafe: an operator whose output rank depends
    on more than the inputs' ranks gets wrong answers.
    """
    libraries: list[Library] = []
    restore: list[tuple[Any, Any]] = []
    try:
        for op_name, profiles in op_profiles.items():
            namespace, name, *overload = op_name.split(".")
            suffix = f".{overload[0]}" if overload and overload[0] != "default" else ""
            qualname = f"{namespace}::{name}{suffix}"
            kernel = _fake_kernel(qualname, profiles)
            custom = _torch.maybe_get_opdef(qualname)
            if custom is not None:
                restore.append((custom, custom._abstract_fn))
                custom._abstract_fn = kernel
            else:
                library = Library(namespace, "FRAGMENT")
                libraries.append(library)
                library._register_fake(name + suffix, kernel)
        yield libraries
    finally:
        for library in libraries:
            library._destroy()
        for custom, before in restore:
            custom._abstract_fn = before
