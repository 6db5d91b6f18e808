"""Define, register and check custom operators.

Names and meanings are those of ``torch.library``; operators made with either work with the other. This
package adds calls that skip the dispatcher's overhead where nothing unusual is active, errors at
registration, argument types beyond the schema's, `opcheck` with more checks, and `probe`, which derives a
fake kernel from a real one. See ``docs/custom-ops.md``.
"""

from torch.library import triton_op, wrap_triton

from fake.library import errors
from fake.library.custom_op import CustomOpDef, custom_op, destroy
from fake.library.libraries import Library, define, fallthrough_kernel, impl, scoped_library
from fake.library.opcheck import OpCheckError, generate_opcheck_tests, opcheck
from fake.library.probe import FakeRule, probe
from fake.library.profiles import (
    MissingOpProfile,
    OpProfile,
    TensorMetadata,
    generate_yaml_from_profiles,
    load_op_profiles,
    read_profiles_from_yaml,
    save_op_profiles,
    unsafe_generate_fake_kernels,
)
from fake.library.register import (
    get_ctx,
    get_kernel,
    impl_abstract,
    register_autocast,
    register_autograd,
    register_effect,
    register_fake,
    register_kernel,
    register_torch_dispatch,
    register_vmap,
)
from fake.library.registrations import registry
from fake.library.schema import infer_schema
from fake.seam.library import EffectType, is_opaque_type, register_opaque_type

__all__ = [
    "CustomOpDef",
    "EffectType",
    "FakeRule",
    "Library",
    "MissingOpProfile",
    "OpCheckError",
    "OpProfile",
    "TensorMetadata",
    "custom_op",
    "define",
    "destroy",
    "errors",
    "fallthrough_kernel",
    "generate_opcheck_tests",
    "generate_yaml_from_profiles",
    "get_ctx",
    "get_kernel",
    "impl",
    "impl_abstract",
    "infer_schema",
    "is_opaque_type",
    "load_op_profiles",
    "opcheck",
    "probe",
    "read_profiles_from_yaml",
    "register_autocast",
    "register_autograd",
    "register_effect",
    "register_fake",
    "register_kernel",
    "register_opaque_type",
    "register_torch_dispatch",
    "register_vmap",
    "registry",
    "save_op_profiles",
    "scoped_library",
    "triton_op",
    "unsafe_generate_fake_kernels",
    "wrap_triton",
]
