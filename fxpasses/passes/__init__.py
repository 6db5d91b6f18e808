"""The library of passes, one file each, named for what it does.

* ``dead_code``: what nobody uses
* ``no_ops``: views, copies and casts that change nothing
* ``constants``: what depends on constants alone
* ``common_subexpressions``: what was computed before
* ``accumulate``: sparse gradients added straight to dense ones

Those are the default. Beyond them, by name:

* ``broadcast_products``: linear layers on broadcast inputs, before the broadcast
* ``bucket_collectives``: many small reductions between processes as one
* ``chunked_logits``: the loss of a large vocabulary, a few rows at a time
* ``dropout_bits``: dropout masks with fewer random bits
* ``early_selection``: only the rows that are looked at
* ``grouped_attention``: attention without repeated keys and values
* ``one_hot_products``: products with one-hot rows by lookup
* ``packed_masks``: masks saved in bits
* ``product_order``: chains of matrix products in the cheapest order
* ``saved_precision``: activations saved in bfloat16
* ``stacked_products``: products with the same matrix as one
* ``summed_products``: sums of products as one product
* ``written_attention``: attention that is written out, by the attention kernel
* ``zero_rows``: gradients that are zero but for a few rows, for those rows

``_matching``, ``_rowwise`` and ``_options`` hold what several of them share.
"""

from __future__ import annotations

from fxpasses.pass_manager.contract import Pass
from fxpasses.passes.accumulate import AccumulateInPlaceOfZeros
from fxpasses.passes.broadcast_products import BroadcastProducts
from fxpasses.passes.bucket_collectives import BucketCollectives
from fxpasses.passes.chunked_logits import ChunkedLogits
from fxpasses.passes.common_subexpressions import CommonSubexpressions
from fxpasses.passes.constants import FoldConstants
from fxpasses.passes.dead_code import DeadCodeElimination
from fxpasses.passes.dropout_bits import DropoutBits
from fxpasses.passes.early_selection import EarlySelection
from fxpasses.passes.grouped_attention import GroupedAttention
from fxpasses.passes.no_ops import RemoveNoOps
from fxpasses.passes.one_hot_products import OneHotProducts
from fxpasses.passes.packed_masks import PackedMasks
from fxpasses.passes.product_order import ProductOrder
from fxpasses.passes.saved_precision import SavedPrecision
from fxpasses.passes.stacked_products import StackedProducts
from fxpasses.passes.summed_products import SummedProducts
from fxpasses.passes.written_attention import WrittenAttention
from fxpasses.passes.zero_rows import ZeroRows

__all__ = [
    "DEFAULT_PASSES",
    "AccumulateInPlaceOfZeros",
    "BroadcastProducts",
    "BucketCollectives",
    "ChunkedLogits",
    "CommonSubexpressions",
    "DeadCodeElimination",
    "DropoutBits",
    "EarlySelection",
    "FoldConstants",
    "GroupedAttention",
    "OneHotProducts",
    "PackedMasks",
    "ProductOrder",
    "RemoveNoOps",
    "SavedPrecision",
    "StackedProducts",
    "SummedProducts",
    "WrittenAttention",
    "ZeroRows",
    "default_passes",
    "library",
]

DEFAULT_PASSES = "default"
"""The word that stands for :func:`default_passes` in a list of passes."""


def default_passes() -> tuple[Pass, ...]:
    """The passes that run when nothing else is asked for, in their order."""
    return (
        DeadCodeElimination(),
        RemoveNoOps(),
        FoldConstants(),
        CommonSubexpressions(),
        AccumulateInPlaceOfZeros(),
        DeadCodeElimination(),
    )


def library() -> dict[str, type[Pass]]:
    """All passes that can be asked for by name."""
    classes = (
        AccumulateInPlaceOfZeros,
        BroadcastProducts,
        BucketCollectives,
        ChunkedLogits,
        CommonSubexpressions,
        DeadCodeElimination,
        DropoutBits,
        EarlySelection,
        FoldConstants,
        GroupedAttention,
        OneHotProducts,
        PackedMasks,
        ProductOrder,
        RemoveNoOps,
        SavedPrecision,
        StackedProducts,
        SummedProducts,
        WrittenAttention,
        ZeroRows,
    )
    return {c.name: c for c in classes}
