"""Operator profiles: recorded input and output metadata that stands in for a fake kernel.

Profiles and files are torch's own: profiles collected by draft export work here, and ours work there. Two
things differ: a saved profile matches although the file does not record which arguments are not tensors, and
operators behave as before afterwards, including those that had no fake kernel.

>>> import torch
>>> t = TensorMetadata(rank=2, dtype=torch.float32, device=torch.device("cpu"), layout=torch.strided)
>>> text = generate_yaml_from_profiles({"mylib.op.default": {OpProfile((t, t), t)}})
>>> read_profiles_from_yaml(text) == {"mylib.op.default": {OpProfile((t, t), t)}}
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch

from fake.library.errors import ProfileError
from fake.library.libraries import Library
from fake.library.register import get_ctx
from fake.seam import library as _torch

OpProfile: Any = _torch.fake_profile.OpProfile  # declared for a single argument
TensorMetadata = _torch.fake_profile.TensorMetadata

Profiles = Mapping[str, "set[OpProfile]"]


class MissingOpProfile(ProfileError):
    """No profile of the operator matches the inputs of this call."""


def record_profile(op: Callable[..., Any], *args: Any, **kwargs: Any) -> OpProfile:
    """Call ``op`` and return the profile of the call."""
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


def generate_yaml_from_profiles(op_profiles: Profiles) -> str:
    """Serialize profiles to YAML text, which `read_profiles_from_yaml` reads.

    Raises:
        ProfileError: ``op_profiles`` is not a dictionary from operator names to profiles.
    """
    _check("generate_yaml_from_profiles", op_profiles)
    text: str = _torch.fake_profile.generate_yaml_from_profiles(dict(op_profiles))
    return text


def save_op_profiles(op_profiles: Profiles, f: Any) -> None:
    """Write profiles to a path or a binary stream, which `load_op_profiles` reads.

    Raises:
        ProfileError: ``op_profiles`` is not a dictionary from operator names to profiles.
        ValueError: ``f`` is neither a path nor a stream.
    """
    _check("save_op_profiles", op_profiles)
    _torch.fake_profile.save_op_profiles(dict(op_profiles), f)


def read_profiles_from_yaml(yaml_str: str) -> dict[str, set[OpProfile]]:
    """Read profiles from YAML text.

    Raises:
        ProfileError: the text was saved with another version of torch, or does not hold profiles.
    """
    return _read(_torch.fake_profile.read_profiles_from_yaml, yaml_str)


def load_op_profiles(f: Any) -> dict[str, set[OpProfile]]:
    """Read profiles from a path or a binary stream.

    Raises:
        ValueError: ``f`` is neither.
        ProfileError: the contents cannot be used.
    """
    return _read(_torch.fake_profile.load_op_profiles, f)


def _read(read: Callable[[Any], Any], given: Any) -> dict[str, set[OpProfile]]:
    try:
        return read(given)
    except RuntimeError as error:
        raise ProfileError(str(error)) from error
    except (
        KeyError,
        TypeError,
        AttributeError,
    ) as error:  # YAML also parses plain text, and anything that it can read like a file
        raise ProfileError(
            "This is not a file of operator profiles: it has no torch_version and operators."
        ) from error


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
        # Saved profiles do not record where the arguments that are not tensors were.
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


def _is_entry(name: Any, profiles: Any) -> bool:
    if not isinstance(name, str) or not isinstance(profiles, Set):
        return False
    return name.count(".") in (1, 2) and all(isinstance(profile, OpProfile) for profile in profiles)


def _check(call: str, op_profiles: Any) -> None:
    if not isinstance(op_profiles, Mapping) or not all(_is_entry(*entry) for entry in op_profiles.items()):
        raise ProfileError(
            f"{call}: op_profiles is no dictionary of profiles, as read_profiles_from_yaml returns it: "
            "{'mylib.op.default': {OpProfile(...)}}"
        )


@contextmanager
def unsafe_generate_fake_kernels(op_profiles: Profiles) -> Iterator[list[Library]]:
    """Let operators answer fake calls from their profiles inside the block, and as before afterwards.

    The keys are names as in ``torch.ops``: ``"mylib.op.default"``. Ranks, dtypes and devices come from the
    profile, and every size is a new unbacked symbol. That is why this is called unsafe: an operator whose
    output rank depends on more than the inputs' ranks gets wrong answers.

    Raises:
        ProfileError: ``op_profiles`` is not a dictionary from operator names to profiles.
    """
    _check("unsafe_generate_fake_kernels", op_profiles)
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
