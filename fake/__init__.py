"""What a tensor would be, without computing it.

>>> import torch
>>> from fake import FakeTensorMode
>>> with FakeTensorMode():
...     y = torch.randn(3, 4) @ torch.randn(4, 5)
>>> y.shape
torch.Size([3, 5])
"""

from ._torch import extract_tensor_metadata, is_fake, maybe_get_fake_mode, unset_fake_temporarily
from .acceleration import accelerate
from .convert import FakeCopyMode, FakeTensorConverter
from .errors import (
    AccelerateError,
    CacheCrossCheckError,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FallbackNotAllowedError,
    MetadataMismatchError,
    MixedFakeModesError,
    NonFakeInputError,
    UnsupportedFakeTensorException,
    UnsupportedMutationAliasingException,
    UnsupportedOperatorException,
    UnsupportedTorchVersionError,
)
from .mode import FakeTensorMode, cache_clear, cache_info
from .persistence import disable_disk_cache, enable_disk_cache, save_disk_cache
from .propagate import FakeTensorProp
from .tensor import FakeTensor

__all__ = [
    "AccelerateError",
    "CacheCrossCheckError",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorConverter",
    "FakeTensorMode",
    "FakeTensorProp",
    "FallbackNotAllowedError",
    "MetadataMismatchError",
    "MixedFakeModesError",
    "NonFakeInputError",
    "UnsupportedFakeTensorException",
    "UnsupportedMutationAliasingException",
    "UnsupportedOperatorException",
    "UnsupportedTorchVersionError",
    "accelerate",
    "cache_clear",
    "cache_info",
    "disable_disk_cache",
    "enable_disk_cache",
    "extract_tensor_metadata",
    "is_fake",
    "maybe_get_fake_mode",
    "save_disk_cache",
    "unset_fake_temporarily",
]
