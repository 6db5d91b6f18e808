"""``torch._subclasses``: torch's own fake and functional tensors, and what their kernels raise."""

from __future__ import annotations

from torch import (
    _from_functional_tensor as from_functional_tensor,
    _is_functional_tensor as is_functional_tensor,
)
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
