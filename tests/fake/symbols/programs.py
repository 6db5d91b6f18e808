"""Random programs over sizes, one family per kind of operator, for the exactness tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.fake.symbols.program import Program, program as _program

__all__ = ["FAMILIES"]


small = st.integers(-6, 6)
bound = st.none() | small


@st.composite
def _one_slice(draw: Any) -> str:
    start, stop = draw(bound), draw(bound)
    step = draw(st.sampled_from(["", ":2", ":3"]))
    return f"{'' if start is None else start}:{'' if stop is None else stop}{step}"


@st.composite
def slicing(draw: Any) -> Program:
    places = [draw(_one_slice()), draw(_one_slice() | st.sampled_from(["-1", "0", "1", "None", "..."]))]
    return _program(f"x0[{', '.join(places)}]", ("a", "b"))


@st.composite
def computed_slicing(draw: Any) -> Program:
    start = draw(
        st.sampled_from(["0", "1", "-x0.shape[1]", "x0.shape[1]", "x0.shape[0] // 2", "-(x0.shape[0] // 2)"])
    )
    stop = draw(
        st.sampled_from(["-1", "x0.shape[0]", "x0.shape[1]", "x0.shape[0] - 1", "2 * x0.shape[0]", "100"])
    )
    return _program(f"x0[{start}:{stop}]", ("a", "b"))


@st.composite
def narrowing(draw: Any) -> Program:
    dim = draw(st.integers(-2, 1))
    return _program(
        draw(
            st.sampled_from(
                [
                    f"x0.narrow({dim}, 1, x0.shape[{dim}] - 1)",
                    f"x0.select({dim}, -1)",
                    f"x0.split(2, {dim})",
                    f"x0.chunk(3, {dim})",
                    f"x0.unfold({dim}, 2, 1)",
                    f"x0.unbind({dim})[0]",
                    f"x0.tensor_split(2, {dim})",
                    f"x0.roll(1, {dim})",
                    f"x0.movedim({dim}, 0)",
                    "x0.diagonal(1)",
                    "x0.tril(-1)",
                    "x0.flip(0)",
                ]
            )
        ),
        ("a", "b"),
    )


@st.composite
def viewing(draw: Any) -> Program:
    k = draw(st.integers(1, 4))
    return _program(
        draw(
            st.sampled_from(
                [
                    f"x0.view(-1, {k})",
                    f"x0.view({k}, -1)",
                    f"x0.reshape(x0.shape[0], -1, {k})",
                    "x0.view(-1)",
                    "x0.view(x0.shape[1], x0.shape[0], -1)",
                    "x0.flatten(1)",
                    "x0.flatten(0, 1)",
                    f"x0.unflatten(0, ({k}, -1))",
                    f"x0.unflatten(-1, (-1, {k}))",
                    "x0.transpose(0, 1).reshape(-1)",
                    "x0.transpose(0, 1).reshape(x0.shape[1], -1)",
                    "x0.permute(2, 0, 1).reshape(-1, x0.shape[1])",
                    "x0.permute(1, 0, 2).contiguous().view(x0.shape[1], -1)",
                    "x0[:, 1:].reshape(x0.shape[0], -1)",
                    "x0.unsqueeze(1).squeeze()",
                    "x0.squeeze(0)",
                    "x0.mT.flatten(0, 1)",
                    f"x0.view(-1, {k}).view(x0.shape)",
                    "x0.expand(2, *x0.shape).reshape(-1, x0.shape[2])",
                    "x0.as_strided((x0.shape[0], x0.shape[1]), (x0.stride(0), x0.stride(1)), x0.shape[2] - 1)",
                    "x0.as_strided((x0.shape[0] // 2, x0.shape[2]), (2 * x0.stride(0), 1))",
                    "x0.as_strided((x0.shape[2], x0.shape[1]), (1, x0.shape[2]))",
                    "x0.as_strided((x0.numel() - 2, 2), (1, 1), 1).sum(1)",
                    "x0.unflatten(1, (x0.shape[1] // 2, 2))",
                    "x0.flatten(0, 1).unflatten(0, (x0.shape[0], x0.shape[1]))",
                    f"x0.flatten().unflatten(0, (x0.shape[2], -1, {k}))",
                    "x0.reshape(x0.shape[0] // 2, 2, -1).transpose(0, 1).reshape(x0.shape[0], -1)",
                ]
            )
        ),
        ("a", "b", "c"),
    )


@st.composite
def combining(draw: Any) -> Program:
    text, *shapes = draw(
        st.sampled_from(
            [
                ("torch.cat([x0, x1])", ("a", "c"), ("b", "c")),
                ("torch.cat([x0, x1], 1)", ("a", "b"), ("a", "c")),
                ("torch.cat([x0, x0[1:], x1], -2)", ("a", "c"), ("b", "c")),
                ("torch.stack([x0, x1], 1)", ("a", "b"), ("a", "b")),
                ("x0 + x1", ("a", "b"), ("b",)),
                ("x0 * x1", ("a", 1, "c"), ("b", "c")),
                ("x0.unsqueeze(1) - x1", ("a", "c"), ("b", "c")),
                ("torch.broadcast_tensors(x0, x1)", ("a", 1), ("b",)),
                ("x0.expand_as(x1)", (1, "b"), ("a", "b")),
                ("x0 @ x1", ("a", "b"), ("b", "c")),
                ("x0 @ x1", ("d", "a", "b"), ("d", "b", "c")),
                ("torch.where(x0 > 3, x0, x1)", ("a", "b"), ("a", 1)),
                ("torch.kron(x0, x1)", ("a", "b"), ("c", "d")),
                ("x0.repeat(2, x1.shape[0])", ("a", "b"), ("c",)),
                ("x0.tile(3)", ("a", "b")),
                ("torch.outer(x0, x1).flatten()", ("a",), ("b",)),
                ("torch.meshgrid(x0, x1, indexing='ij')", ("a",), ("b",)),
                ("torch.addmm(x0, x1, x1.mT)", ("a",), ("a", "b")),
            ]
        )
    )
    return _program(text, *shapes)


@st.composite
def contracting(draw: Any) -> Program:
    text, *shapes = draw(
        st.sampled_from(
            [
                ("torch.einsum('ij,jk->ik', x0, x1)", ("a", "b"), ("b", "c")),
                ("torch.einsum('bij,bjk->bik', x0, x1)", ("d", "a", "b"), ("d", "b", "c")),
                ("torch.einsum('ij,kj->ki', x0, x1)", ("a", "b"), ("c", "b")),
                ("torch.einsum('ii->i', x0)", ("a", "a")),
                ("torch.einsum('i,j->ij', x0, x1)", ("a",), ("b",)),
                ("torch.einsum('bhid,bhjd->bhij', x0, x1)", ("d", 2, "a", "b"), ("d", 2, "c", "b")),
                ("torch.einsum('...i->...', x0)", ("a", "b", "c")),
                ("torch.einsum('ij,ij->', x0, x1)", ("a", "b"), ("a", "b")),
                ("torch.einsum('abc,cd,bd->ad', x0, x1, x2)", ("a", "b", "c"), ("c", "d"), ("b", "d")),
                ("torch.einsum('ijj->ji', x0)", ("a", "b", "b")),
                ("torch.einsum('...ij,...jk->...ik', x0, x1)", ("d", "a", "b"), ("b", "c")),
                ("torch.tensordot(x0, x1, 1)", ("a", "b"), ("b", "c")),
                ("torch.inner(x0, x1)", ("a", "b"), ("c", "b")),
            ]
        )
    )
    return _program(text, *shapes)


@st.composite
def indexing(draw: Any) -> Program:
    text, *shapes = draw(
        st.sampled_from(
            [
                ("x0[torch.arange(x0.shape[0] - 1, -1, -1)]", ("a", "b")),
                ("x0[:, torch.arange(0, x0.shape[1], 2)]", ("a", "b")),
                ("x0[torch.arange(2).unsqueeze(1), torch.arange(x0.shape[1])]", ("a", "b")),
                ("x0.index_select(1, torch.arange(x0.shape[1] - 1))", ("a", "b")),
                ("x0.gather(0, torch.zeros(1, x0.shape[1], dtype=torch.int64))", ("a", "b")),
                ("x0.scatter(0, torch.zeros_like(x0, dtype=torch.int64), x0)", ("a", "b")),
                ("x0.index_put((torch.arange(x0.shape[0]),), x1)", ("a", "b"), ("b",)),
                ("x0.take_along_dim(x0.argsort(1), 1)", ("a", "b")),
                ("x0.topk(2, 0)", ("a", "b")),
                ("x0.sort(dim=1, stable=True).values.cumsum(0)", ("a", "b")),
                ("torch.arange(x0.shape[0], 2 * x0.shape[0] + x0.shape[1], 3)", ("a", "b")),
                ("torch.eye(x0.shape[0], x0.shape[1])", ("a", "b")),
                ("torch.full((x0.shape[0] * 2 - 1,), 3)", ("a", "b")),
                ("x0.new_empty(x0.shape[::-1]).zero_()", ("a", "b")),
                ("x0.sum(0, keepdim=True) + x0.mean(1, keepdim=True) * 0", ("a", "b")),
            ]
        )
    )
    return _program(text, *shapes)


@st.composite
def convolving(draw: Any) -> Program:
    kernel, stride = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    padding, dilation = draw(st.integers(0, 2)), draw(st.integers(1, 2))
    extra = draw(st.integers(0, stride - 1))
    text, *shapes = draw(
        st.sampled_from(
            [
                (f"F.conv1d(x0, x1, None, {stride}, {padding}, {dilation})", ("n", 2, "w"), (3, 2, kernel)),
                (
                    f"F.conv2d(x0, x1, None, {stride}, {padding}, {dilation})",
                    ("n", 2, "h", "w"),
                    (3, 2, kernel, 2),
                ),
                (
                    f"F.conv_transpose1d(x0, x1, None, {stride}, {padding}, {extra})",
                    ("n", 2, "w"),
                    (2, 3, kernel),
                ),
                ("F.conv1d(x0, x1, padding='same')", ("n", 2, "w"), (3, 2, kernel)),
                ("F.conv1d(x0, x1, groups=2)", ("n", 2, "w"), (2, 1, kernel)),
                (
                    f"F.conv2d(x0, x1, None, {stride}, ({padding}, 0), (1, {dilation}), 2)",
                    ("n", 4, "h", "w"),
                    (6, 2, kernel, 2),
                ),
                (
                    f"F.conv_transpose2d(x0, x1, None, {stride}, {padding}, {extra}, 2, {dilation if dilation > extra else 2})",
                    ("n", 2, "h", "w"),
                    (2, 1, 3, kernel),
                ),
                (
                    f"F.conv3d(x0, x1, None, {stride}, 1, {dilation})",
                    ("n", 2, "h", "w", 3),
                    (2, 2, 2, kernel, 3),
                ),
                ("F.conv2d(x0, x1, padding='valid')", ("n", 2, "h", "w"), (3, 2, kernel, kernel)),
                (f"F.conv1d(x0, x1, None, {stride}, {padding})", ("n", "c", "w"), ("d", "c", kernel)),
                (
                    f"F.fold(F.unfold(x0, 2, stride={stride}), x0.shape[2:], 2, stride={stride})",
                    ("n", 2, "h", "w"),
                ),
                (f"F.unfold(x0, 2, stride={stride})", ("n", 2, "h", "w")),
            ]
        )
    )
    return _program(text, *shapes)


@st.composite
def pooling(draw: Any) -> Program:
    kernel, stride = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    padding = draw(st.integers(0, kernel // 2))
    ceil = draw(st.booleans())
    return _program(
        draw(
            st.sampled_from(
                [
                    f"F.max_pool2d(x0, {kernel}, {stride}, {padding}, ceil_mode={ceil})",
                    f"F.avg_pool2d(x0, {kernel}, {stride}, {padding}, ceil_mode={ceil})",
                    f"F.max_pool2d(x0, {kernel}, {stride}, {padding}, return_indices=True)",
                    "F.adaptive_avg_pool2d(x0, (2, 3))",
                    "F.adaptive_max_pool2d(x0, (2, None))",
                    f"F.lp_pool2d(x0, 2, {kernel}, {stride})",
                    "F.pixel_unshuffle(x0, 2)",
                    "F.avg_pool1d(x0[0], 2)",
                    f"F.max_pool1d(x0[0], {kernel}, {stride}, {padding}, ceil_mode={ceil})",
                    f"F.avg_pool1d(x0[0], {kernel}, {stride}, {padding}, {ceil})",
                    f"F.max_pool2d(x0, {kernel}, {stride}, {padding}, 2, ceil_mode={ceil})",
                    f"F.avg_pool3d(x0, {kernel}, {stride}, {padding}, ceil_mode={ceil})",
                    f"F.max_pool3d(x0, {kernel}, {stride}, {padding}, ceil_mode={ceil})",
                    "F.adaptive_avg_pool1d(x0[0], x0.shape[3] // 2)",
                    f"F.lp_pool1d(x0[0], 2, {kernel}, {stride}, {ceil})",
                ]
            )
        ),
        ("n", 2, "h", "w"),
    )


@st.composite
def resampling(draw: Any) -> Program:
    scale = draw(st.sampled_from(["2", "0.5", "1.5", "3"]))
    left, right, top = (draw(st.integers(-1, 3)) for _ in range(3))
    return _program(
        draw(
            st.sampled_from(
                [
                    f"F.interpolate(x0, scale_factor={scale})",
                    f"F.interpolate(x0, scale_factor={scale}, mode='bilinear')",
                    "F.interpolate(x0, size=(5, 7))",
                    f"F.interpolate(x0, scale_factor={scale}, mode='nearest-exact')",
                    f"F.interpolate(x0, scale_factor={scale}, mode='bicubic')",
                    f"F.interpolate(x0, scale_factor=({scale}, 2), mode='area')",
                    f"F.interpolate(x0[0], scale_factor={scale}, mode='linear', align_corners=True)",
                    f"F.interpolate(x0[None], scale_factor={scale}, mode='trilinear')",
                    f"F.interpolate(x0, scale_factor={scale}, mode='bilinear', recompute_scale_factor=True)",
                    "F.interpolate(x0, size=x0.shape[2] * 2 - 1)",
                    "F.interpolate(x0, size=(x0.shape[3], x0.shape[2] * 2), mode='bilinear', align_corners=True)",
                    f"F.pad(x0, ({left}, {right}))",
                    f"F.pad(x0, ({left}, {right}, {top}, 1), value=2.0)",
                    f"F.pad(x0, ({abs(left)}, {abs(right)}, 1, 0), mode='reflect')",
                    f"F.pad(x0, ({abs(left)}, 1, {abs(top)}, 0), mode='replicate')",
                    "F.pad(x0, (1, 0, 0, 1), mode='circular')",
                    "F.pixel_shuffle(x0.repeat(1, 2, 1, 1), 2)",
                    "F.pad(x0, (0, x0.shape[2] - 1))",
                    "F.pad(x0, (x0.shape[3] // 2, 0, -1, 2))",
                    f"F.pad(x0[0], ({abs(left)}, {abs(right)}), mode='reflect')",
                    f"F.pad(x0, ({left}, {right}, {top}, 0, 1, 0))",
                    f"F.pad(x0[None], (1, 0, {abs(top)}, 1, 0, {abs(left)}), mode='replicate')",
                ]
            )
        ),
        ("n", 2, "h", "w"),
    )


@st.composite
def refusing(draw: Any) -> Program:
    """What eager refuses for some sizes: for slices without elements, past a storage, or of sizes that do not agree."""
    part = draw(st.sampled_from(["x0[2:]", "x0[:, 1:]", "x0[3:, :-1]", "x0[x0.shape[1] - 1 :]", "x0"]))
    dim, k = draw(st.integers(-2, 1)), draw(st.integers(1, 5))
    text, *shapes = draw(
        st.sampled_from(
            [
                (f"{part}.max({dim})", ("a", "b")),
                (f"{part}.amin({dim})", ("a", "b")),
                (f"{part}.argmax({dim})", ("a", "b")),
                (f"{part}.min()", ("a", "b")),
                (f"{part}.median({dim}).values", ("a", "b")),
                (f"{part}.kthvalue(1, {dim}).values", ("a", "b")),
                (f"{part}.topk({k}, {dim}).values", ("a", "b")),
                (f"{part}.select({dim}, {k})", ("a", "b")),
                (f"{part}.flatten().as_strided(({k}, 2), (2, 1), {k})", ("a", "b")),
                (f"{part}.flatten().as_strided((x0.shape[1], {k}), ({k}, 1))", ("a", "b")),
                (f"{part}.index_select({dim}, torch.zeros({k}, dtype=torch.int64))", ("a", "b")),
                (f"{part}.gather(0, torch.zeros(1, 1, dtype=torch.int64))", ("a", "b")),
                (f"{part}.flatten().take(torch.zeros({k}, dtype=torch.int64))", ("a", "b")),
                (f"F.embedding(torch.zeros({k}, dtype=torch.int64), {part})", ("a", "b")),
                (
                    f"{part}.index_reduce(0, torch.zeros(1, dtype=torch.int64), x1, 'amax')",
                    ("a", "b"),
                    (1, "c"),
                ),
                (f"torch.select_scatter({part}, x1, 0, {k})", ("a", "b"), ("b",)),
                (f"torch.slice_scatter(x0, x1, 0, {k})", ("a", "b"), ("c", "b")),
                (f"torch.diagonal_scatter(x0, x1, {k - 2})", ("a", "b"), ("c",)),
                (f"{part}.diagonal({k - 3}).contiguous()", ("a", "b")),
                (f"F.conv_transpose1d(x0, x1, None, 2, {k - 1})", ("n", 2, "w"), (2, 3, 2)),
                (f"torch.histogramdd({part}, [2, 2], weight=x1).hist", ("a", 2), ("c",)),
                ("F.adaptive_avg_pool3d(x0[:, 2:], 2)", ("n", "c", "h", 3, 3)),
                ("F.grid_sample(x0, x1, align_corners=False)", ("n", 2, "h", "w"), ("m", "a", "b", 2)),
                ("x0.index_put((torch.zeros(2, dtype=torch.int64),), x1)", ("a", "b"), ("c",)),
                ("F.batch_norm(x0[1:], None, None, training=True)", ("a", 2)),
                (f"torch.randint(0, x0.shape[0] - {k}, (2,)).shape[0]", ("a",)),
            ]
        )
    )
    return _program(text, *shapes)


_STEPS = (
    "t.mT", "t[1:]", "t[:, ::2]", "t[-3:, :-1]", "torch.cat([t, t], 1)", "t.reshape(-1, t.shape[0])", "t.flatten()[None]",
    "t.roll(t.shape[1] // 2, 1)", "F.pad(t, (1, 0, 0, 2))", "F.pad(t, (-1, 1))", "F.pad(t[None], (1, 1), mode='replicate')[0]",
    "t.repeat(2, 1)", "t.tril(1)", "t + t.sum(0)", "t.unfold(0, 2, 1).sum(-1)", "F.interpolate(t[None], scale_factor=2)[0]",
    "t.repeat_interleave(2, 0)", "t.unsqueeze(1).expand(-1, 2, -1).flatten(0, 1)", "t.tensor_split(3, 1)[1]", "t.split(2)[-1]",
    "torch.einsum('ij,kj->ik', t, t)", "t.unflatten(0, (-1, 1)).squeeze(1)", "t.diagonal()[None]", "t.chunk(2)[0]", "t.sort(0)[0]",
    "t.as_strided((t.shape[1], t.shape[0]), (1, t.shape[1])) if t.is_contiguous() else t", "t[t.shape[0] // 2 :]",
)  # fmt: skip
_ENDS = (
    "t",
    "(t, t.numel(), t.shape[0] / t.shape[1], t.shape[0] % 3)",
    "t.new_zeros(max(t.shape), t.shape[0] ** 2)",
)


@st.composite
def composing(draw: Any) -> Program:
    text = "x0"
    for step in (
        *draw(st.lists(st.sampled_from(_STEPS), min_size=2, max_size=4)),
        draw(st.sampled_from(_ENDS)),
    ):
        text = f"(lambda t: {step})({text})"
    return _program(text, ("a", "b"))


FAMILIES: dict[str, Callable[[], st.SearchStrategy[Program]]] = {
    "slicing": slicing,
    "computed slicing": computed_slicing,
    "narrowing": narrowing,
    "viewing": viewing,
    "combining": combining,
    "contracting": contracting,
    "indexing": indexing,
    "convolving": convolving,
    "pooling": pooling,
    "resampling": resampling,
    "refusing": refusing,
    "composing": composing,
}
