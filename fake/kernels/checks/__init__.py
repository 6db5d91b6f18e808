"""Checks that eager makes before it computes and that meta kernels omit: one function per check.

>>> import torch
>>> check_arguments(torch.ops.aten.slice_scatter.default, (torch.zeros(4), torch.zeros(3)), {"end": 2})
Traceback (most recent call last):
RuntimeError: aten.slice_scatter.default: expected src to have a size equal to the slice of self. src size = [3], slice size = [2]
"""

from fake.kernels.checks import indexing, matmul_checks, number_checks, operands, size_checks  # noqa: F401  (they register their checks)
from fake.kernels.checks.check_registry import bind, check_arguments, check_for, checks_of, extent, has_checks

__all__ = ["bind", "check_arguments", "check_for", "checks_of", "extent", "has_checks"]
