"""Rules for histograms, which have no meta kernels in torch (``aten/src/ATen/native/Histogram.cpp``)."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.checks.check_registry import bind
from fake.kernels.outputs import fresh
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.seam.dispatch import check


def _check_points(func: OpOverload, self: torch.Tensor, bins: Any) -> None:
    check(self.dim() >= 2, lambda: f"{func.name()}: input should have at least 2 dimensions")
    check(
        self.size(-1) == len(bins),
        lambda: f"{func.name()}: expected {self.size(-1)} sequences of bin edges but got {len(bins)}",
    )


def _check_counts(func: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """Check each coordinate: it needs points, bins, and an ordered range."""
    given = bind(func, args, kwargs)
    bins, ends = given["bins"], given["range"]
    _check_points(func, given["self"], bins)
    for dim, count in enumerate(bins):
        check(
            count > 0,
            lambda d=dim, c=count: f"{func.name()}: bins must be > 0, but got {c} for dimension {d}",  # type: ignore[misc]
        )
    for dim, (low, high) in enumerate(zip((ends or ())[::2], (ends or ())[1::2], strict=False)):
        check(
            low <= high,
            lambda d=dim, r=(low, high): (
                f"{func.name()}: min {r[0]} should not exceed max {r[1]} for dimension {d}"
            ),  # type: ignore[misc]
        )


@rule("aten::histogram.bin_ct")
def _histogram(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return ``(counts, edges)`` for a number of bins."""
    self = args[0]
    bins = args[1] if len(args) > 1 else kwargs.get("bins", 100)
    check(bins > 0, lambda: f"torch.histogram(): bins must be > 0, but got {bins}")
    return (
        fresh(mode, (bins,), None, dtype=self.dtype, device=self.device),
        fresh(mode, (bins + 1,), None, dtype=self.dtype, device=self.device),
    )


@rule("aten::histogram.bins_tensor")
def _histogram_with_edges(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return ``(counts, edges)`` for the bins bounded by the one-dimensional tensor ``bins``."""
    self, bins = args
    check(
        bins.dim() == 1, lambda: f"torch.histogram(): bins tensor should be 1-D, got {bins.dim()} dimensions"
    )
    return (
        fresh(mode, (bins.shape[0] - 1,), None, dtype=self.dtype, device=self.device),
        fresh(mode, bins.shape, None, dtype=self.dtype, device=self.device),
    )


@rule("aten::_histogramdd_bin_edges")
def _bin_edges(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return one tensor of edges per coordinate."""
    self, bins = args
    _check_counts(func, args, kwargs)
    return [fresh(mode, (count + 1,), None, dtype=self.dtype, device=self.device) for count in bins]


@rule("aten::_histogramdd_from_bin_cts")
def _from_bin_counts(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return a histogram with one dimension per coordinate."""
    self, bins = args
    _check_counts(func, args, kwargs)
    return fresh(mode, bins, None, dtype=self.dtype, device=self.device)


@rule("aten::_histogramdd_from_bin_tensors")
def _from_bin_tensors(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return a histogram with one dimension per coordinate, given tensors of edges."""
    self, bins = args
    _check_points(func, self, bins)
    return fresh(mode, [edges.shape[0] - 1 for edges in bins], None, dtype=self.dtype, device=self.device)
