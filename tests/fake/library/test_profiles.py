"""Operator profiles: recorded, saved, loaded, used as fake kernels."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor
from torch._library import fake_profile
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fake.library import custom_op, define
from fake.library.errors import ProfileError
from fake.library.profiles import (
    MissingOpProfile,
    OpProfile,
    TensorMetadata,
    generate_yaml_from_profiles,
    load_op_profiles,
    read_profiles_from_yaml,
    record_profile,
    save_op_profiles,
    unsafe_generate_fake_kernels,
)
from tests.fake.library.support import fresh_name, overload_of

META = TensorMetadata(2, torch.float32, torch.device("cpu"), torch.strided)
OTHER = TensorMetadata(0, torch.int64, torch.device("cpu"), torch.strided)
PROFILES = {
    "mylib.foo.default": {OpProfile((META, META), META), OpProfile((META, None, OTHER), (META, OTHER))},
    "mylib.bar.default": {OpProfile((OTHER,), OTHER)},
}
#: Saved profiles forget arguments that are no tensors.
SAVED = {
    "mylib.foo.default": {OpProfile((META, META), META), OpProfile((META, OTHER), (META, OTHER))},
    "mylib.bar.default": {OpProfile((OTHER,), OTHER)},
}


def test_round_trip(tmp_path):
    assert read_profiles_from_yaml(generate_yaml_from_profiles(PROFILES)) == SAVED
    path = tmp_path / "profiles.yaml"
    save_op_profiles(PROFILES, path)
    assert load_op_profiles(str(path)) == SAVED
    stream = io.BytesIO()
    save_op_profiles(PROFILES, stream)
    stream.seek(0)
    assert load_op_profiles(stream) == SAVED


def test_format_is_torchs():
    theirs = fake_profile.read_profiles_from_yaml(generate_yaml_from_profiles(PROFILES))
    assert {name: len(profiles) for name, profiles in theirs.items()} == {
        n: len(p) for n, p in PROFILES.items()
    }
    assert read_profiles_from_yaml(fake_profile.generate_yaml_from_profiles(theirs)) == SAVED


def test_bad_files():
    text = generate_yaml_from_profiles(PROFILES)
    version = ".".join(torch.__version__.split(".")[:2])
    with pytest.raises(RuntimeError, match="Unable to load outdated profile"):
        read_profiles_from_yaml(text.replace(version, "2.7"))
    with pytest.raises(ProfileError, match="not a file of operator profiles"):
        read_profiles_from_yaml("[]")
    for wrong in (3, None):
        with pytest.raises(ValueError, match="Invalid type of file"):
            load_op_profiles(wrong)
        with pytest.raises(ValueError, match="Invalid type of file"):
            save_op_profiles(PROFILES, wrong)


def test_record():
    assert record_profile(torch.add, torch.ones(2, 3), torch.ones(1, 3)) == OpProfile((META, META), META)
    values, indices = record_profile(torch.max, torch.ones(2, 3, 4), 0).out_profile
    assert (values.rank, indices.dtype) == (2, torch.int64)
    with pytest.raises(ProfileError, match="only operators that return tensors"):
        record_profile(torch.equal, torch.ones(1), torch.ones(1))


def test_fake_kernels_from_profiles():
    @custom_op(fresh_name(), mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    profiles = {
        op.qualname.replace("::", ".") + ".default": {record_profile(op, torch.ones(2, 3), torch.ones(3, 4))}
    }
    with FakeTensorMode(shape_env=ShapeEnv()), pytest.raises(RuntimeError, match="no fake impl"):
        op(torch.ones(2, 3), torch.ones(3, 4))
    with unsafe_generate_fake_kernels(profiles), FakeTensorMode(shape_env=ShapeEnv()):
        result = op(torch.ones(2, 3), torch.ones(3, 4))
        assert result.dim() == 2
        assert all(isinstance(s, torch.SymInt) for s in result.shape)
        with pytest.raises(MissingOpProfile, match="no profiles match"):
            op(torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    with FakeTensorMode(shape_env=ShapeEnv()), pytest.raises(RuntimeError, match="no fake impl"):
        op(torch.ones(2, 3), torch.ones(3, 4))


def test_saved_profiles_of_operators_with_other_arguments():
    name = fresh_name()
    define(name, "(Tensor x, int n) -> Tensor[]")
    op = overload_of(name)
    profile = OpProfile((META, None), (META, OTHER))
    key = name.replace("::", ".") + ".default"
    loaded = read_profiles_from_yaml(generate_yaml_from_profiles({key: {profile}}))
    for profiles in ({key: {profile}}, loaded):
        with unsafe_generate_fake_kernels(profiles), FakeTensorMode(shape_env=ShapeEnv()):
            first, second = op(torch.ones(2, 2), 3)
            assert (first.dim(), second.dtype) == (2, torch.int64)
