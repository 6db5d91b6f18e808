"""Fake tensors: run operators on shapes, dtypes and devices, without computing any values.

>>> import torch
>>> from fake import FakeTensorMode
>>> with FakeTensorMode():
...     y = torch.randn(3, 4) @ torch.randn(4, 5)
>>> y.shape
torch.Size([3, 5])
"""

import os
from typing import TYPE_CHECKING

from fake.seam import missing as _missing  # noqa: F401  (before the first file that uses private names)
from fake.seam.lazy import lazy_names

if TYPE_CHECKING:  # the same imports happen lazily, on first access to a name
    from fake.acceleration import accelerate
    from fake.cache.calls import cache_custom_op
    from fake.errors import (
        AccelerateError,
        CacheCrossCheckError,
        ContractError,
        ContractInputError,
        ContractViolationError,
        DataDependentOutputException,
        DynamicOutputShapeException,
        FallbackNotAllowedError,
        MetadataMismatchError,
        MissingTorchNameError,
        MixedFakeModesError,
        NonFakeInputError,
        ShapeEnvError,
        UnsupportedFakeTensorException,
        UnsupportedMutationAliasingException,
        UnsupportedOperatorException,
        UnsupportedTorchVersionError,
    )
    from fake.mode import FakeTensorMode, cache_clear, cache_info
    from fake.persistence import disable_disk_cache, enable_disk_cache, save_disk_cache
    from fake.propagate import FakeTensorProp
    from fake.seam.fake_tensor import (
        extract_tensor_metadata,
        is_fake,
        maybe_get_fake_mode,
        unset_fake_temporarily,
    )
    from fake.symbols.contract import Dim, mark_dynamic
    from fake.symbols.explain_guards import Explanation, explain
    from fake.symbols.shape_env import ShapeEnv, using_shape_env
    from fake.symbols.shape_guards import Guard, Guards, guards_of
    from fake.symbols.unbacked import facts_of, insert_runtime_assertions, runtime_assertions
    from fake.tensors._torch_devices import allow_cuda
    from fake.tensors.convert import FakeCopyMode, FakeTensorConverter
    from fake.tensors.tensor import FakeTensor
    from fake.wrong_arguments import ArgumentTypeError

__all__ = [
    "AccelerateError",
    "ArgumentTypeError",
    "CacheCrossCheckError",
    "ContractError",
    "ContractInputError",
    "ContractViolationError",
    "DataDependentOutputException",
    "Dim",
    "DynamicOutputShapeException",
    "Explanation",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorConverter",
    "FakeTensorMode",
    "FakeTensorProp",
    "FallbackNotAllowedError",
    "Guard",
    "Guards",
    "MetadataMismatchError",
    "MissingTorchNameError",
    "MixedFakeModesError",
    "NonFakeInputError",
    "ShapeEnv",
    "ShapeEnvError",
    "UnsupportedFakeTensorException",
    "UnsupportedMutationAliasingException",
    "UnsupportedOperatorException",
    "UnsupportedTorchVersionError",
    "accelerate",
    "allow_cuda",
    "cache_clear",
    "cache_custom_op",
    "cache_info",
    "disable_disk_cache",
    "enable_disk_cache",
    "explain",
    "extract_tensor_metadata",
    "facts_of",
    "guards_of",
    "insert_runtime_assertions",
    "is_fake",
    "mark_dynamic",
    "maybe_get_fake_mode",
    "runtime_assertions",
    "save_disk_cache",
    "unset_fake_temporarily",
    "using_shape_env",
]

__getattr__, __dir__ = lazy_names(__name__)

if os.environ.get("FAKE_DISPATCH_CACHE"):
    import fake.persistence  # noqa: F401  (which opens that cache)
