"""Gradients of ``grid_sample``: the witness finds the pixels around a point, the residues its distance."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxpasses.exact.arithmetic import Arithmetic, stack
from fxpasses.exact.dual import Dual
from fxpasses.exact.rules.table import named, rule

_BILINEAR, _NEAREST = 0, 1
_ZEROS, _BORDER = 0, 1


@rule(*named("grid_sampler_2d_backward"))
def _grid_sampler_2d_backward(
    m: Arithmetic,
    op: Any,
    grad: Dual,
    image: Dual,
    grid: Dual,
    mode: int,
    padding: int,
    align_corners: bool,
    wanted: Sequence[bool],
) -> Any:
    if mode not in (_BILINEAR, _NEAREST) or padding not in (_ZEROS, _BORDER):
        return NotImplemented
    sizes = image.shape[:1:-1]  # of x, then of y
    if not bool(grid.witness.isfinite().all()):
        return NotImplemented
    coordinates, factors = [], []
    for at, size in enumerate(sizes):
        coordinate, factor = _unnormalize(m, grid.map(lambda t, at=at: t[..., at]), size, align_corners)  # type: ignore[misc]
        if padding == _BORDER:
            inside = (coordinate.witness > 0) & (coordinate.witness < size - 1)
            coordinate = m.select(inside, coordinate, coordinate.witness.clamp(0, size - 1))
            factor = m.select(inside, factor, 0)
        coordinates.append(coordinate)
        factors.append(factor)
    if mode == _NEAREST:
        grad_grid = m.full(grid.shape, 0, grid.dtype or torch.float32)
        return _scatter_pixels(
            m, grad, image, [m.snap_to_integers(p).round().long() for p in coordinates]
        ), grad_grid
    low = [m.snap_to_integers(p).floor() for p in coordinates]
    fractions = [m.sub(p, whole) for p, whole in zip(coordinates, low, strict=True)]
    weights = [(m.sub(1, a), a) for a in fractions]
    total: Dual | None = None
    slopes: list[Dual | None] = [None, None]
    for corner in itertools.product((0, 1), repeat=2):
        pixels = [whole.long() + step for whole, step in zip(low, corner, strict=True)]
        corner_weights = [weights[axis][corner[axis]] for axis in (0, 1)]
        each = m.mul(grad, m.mul(corner_weights[0], corner_weights[1]).map(lambda t: t.unsqueeze(1)))
        part = _scatter_pixels(m, each, image, pixels)
        total = part if total is None else m.add(total, part)
        pixel_grad = m.sum(m.mul(grad, _gather_pixels(m, image, pixels)), [1])
        for axis in (0, 1):
            slope = m.mul(m.mul(pixel_grad, corner_weights[1 - axis]), 1 if corner[axis] else -1)
            known = slopes[axis]
            slopes[axis] = slope if known is None else m.add(known, slope)
    grad_grid = stack([m.mul(slope, factor) for slope, factor in zip(slopes, factors, strict=True)], -1)  # type: ignore[arg-type]
    assert total is not None
    return total.as_type(image.dtype or torch.float32), grad_grid.as_type(grid.dtype or torch.float32)


def _unnormalize(m: Arithmetic, coordinate: Dual, size: int, align_corners: bool) -> tuple[Dual, Dual]:
    """A place among the pixels, and its derivative by the number in the grid, which is from -1 to 1."""
    factor = m.div(size - 1 if align_corners else size, 2)
    moved = m.mul(m.add(coordinate, 1), factor)
    if not align_corners:
        moved = m.sub(moved, m.div(1, 2))
    return moved, m.full(coordinate.shape, factor, coordinate.dtype or torch.float32)


def _pixel_indices(image: Dual, at: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Which places are in the image, and their flat pixel indices."""
    height, width = image.shape[-2:]
    x, y = at
    is_inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    return is_inside.unsqueeze(1), (y.clamp(0, height - 1) * width + x.clamp(0, width - 1)).unsqueeze(1)


def _gather_pixels(m: Arithmetic, image: Dual, at: Sequence[Tensor]) -> Dual:
    is_inside, pixels = _pixel_indices(image, at)
    pixels = pixels.expand(-1, image.shape[1], -1, -1)
    taken = image.map(lambda t: t.flatten(2).gather(2, pixels.flatten(2)).view(pixels.shape))
    return m.select(is_inside, taken, 0)


def _scatter_pixels(m: Arithmetic, grad: Dual, image: Dual, at: Sequence[Tensor]) -> Dual:
    is_inside, pixels = _pixel_indices(image, at)
    pixels = pixels.expand(-1, image.shape[1], -1, -1).flatten(2)
    kept = m.select(is_inside, grad, 0)

    def spread(t: Tensor) -> Tensor:
        return (
            t.new_zeros(image.shape).flatten(2).scatter_add(2, pixels, t.flatten(2)).view(tuple(image.shape))
        )

    return m.linear(spread, kept).as_type(image.dtype or torch.float32)
