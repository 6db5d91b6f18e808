"""All private torch names that the conformance program uses: operator databases and the fake engine."""

from __future__ import annotations

from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DATA_DEPENDENT",
    "UNSUPPORTED",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorMode",
    "ShapeEnv",
    "TorchDispatchMode",
    "custom_op_db",
    "enable_python_dispatcher",
    "hint",
    "module_db",
    "op_db",
    "storage_id",
]

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
UNSUPPORTED = (UnsupportedOperatorException,)


def op_db() -> list[Any]:
    """Return torch's operators with their samples. Imported on demand, because that takes a second.

    For each list of samples, torch looks for the calling method of a ``unittest.TestCase`` and reads the
    source file of each frame. That takes 20 ms or more, a third of a small test. We have no ``TestCase``, so
    it is switched off.
    """
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    core.extract_test_fn = common_utils.extract_test_fn = lambda: None
    return list(op_db)


def custom_op_db() -> list[Any]:
    """Return torch's custom operators for tests."""
    from torch.testing._internal.custom_op_db import custom_op_db

    return list(custom_op_db)


def module_db() -> list[Any]:
    """Return torch's modules with their sample inputs."""
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


def hint(value: Any) -> Any:
    """Return a number itself, or the hint of a symbolic one (``None`` for an unbacked symbol)."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint
    return value


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, which all of its views share."""
    return tensor.untyped_storage()._cdata
