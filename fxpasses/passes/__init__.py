"""The pass library, one file for each pass.

* ``eliminate_dead_code``: remove calls whose results are unused
* ``remove_no_ops``: remove views, copies and casts that change nothing
* ``fold_constants``: evaluate calls that depend only on constants
* ``eliminate_common_subexpressions``: reuse values that were computed before
* ``fuse_scatter_add``: scatter sparse gradients directly into dense ones

Those are the default. Others, by name:

* ``bucket_collectives``: merge many small messages between processes into one
* ``chunk_logits``: compute the loss of a large vocabulary one chunk of rows at a time
* ``concat_matmuls``: merge matmuls with the same weight
* ``downcast_saved_activations``: save activations in bfloat16
* ``fuse_attention``: replace unfused attention with one call of the attention kernel
* ``fuse_matmul_sums``: compute a sum of matmuls as one matmul
* ``hoist_slices``: move slices up, before computations that treat each row separately
* ``move_matmul_before_broadcast``: apply linear layers before their inputs are broadcast
* ``overlap_collectives``: overlap communication between processes with computation
* ``pack_dropout_rng``: sample dropout masks from fewer random bits
* ``pack_saved_masks``: save masks as bits
* ``reassociate_matmuls``: order chains of matmuls by cost
* ``remove_repeat_kv``: grouped-query attention without repeated keys and values
* ``replace_one_hot_matmul``: replace matmuls with one-hot rows by lookups
* ``skip_zero_rows``: compute gradients that are zero except in a few rows for only those rows
* ``use_onednn_convolutions``: compute single-pixel convolutions on the CPU with oneDNN instead of MKL
* ``use_onednn_matmuls``: compute matmuls on the CPU with oneDNN instead of MKL

``_matching``, ``_rowwise`` and ``_options`` contain helpers that several of them share.
"""

from __future__ import annotations

from typing import Any

from fxpasses.pass_manager.pass_base import Pass
from fxpasses.passes.bucket_collectives import BucketCollectives
from fxpasses.passes.chunk_logits import ChunkLogits
from fxpasses.passes.concat_matmuls import ConcatMatmuls
from fxpasses.passes.downcast_saved_activations import DowncastSavedActivations
from fxpasses.passes.eliminate_common_subexpressions import EliminateCommonSubexpressions
from fxpasses.passes.eliminate_dead_code import EliminateDeadCode
from fxpasses.passes.fold_constants import FoldConstants
from fxpasses.passes.fuse_attention import FuseAttention
from fxpasses.passes.fuse_matmul_sums import FuseMatmulSums
from fxpasses.passes.fuse_scatter_add import FuseScatterAdd
from fxpasses.passes.hoist_slices import HoistSlices
from fxpasses.passes.move_matmul_before_broadcast import MoveMatmulBeforeBroadcast
from fxpasses.passes.move_matmul_before_gather import MoveMatmulBeforeGather
from fxpasses.passes.overlap_collectives import OverlapCollectives
from fxpasses.passes.pack_dropout_rng import PackDropoutRng
from fxpasses.passes.pack_saved_masks import PackSavedMasks
from fxpasses.passes.reassociate_matmuls import ReassociateMatmuls
from fxpasses.passes.remove_no_ops import RemoveNoOps
from fxpasses.passes.remove_repeat_kv import RemoveRepeatKv
from fxpasses.passes.replace_one_hot_matmul import ReplaceOneHotMatmul
from fxpasses.passes.skip_zero_rows import SkipZeroRows
from fxpasses.passes.use_onednn_convolutions import UseOnednnConvolutions
from fxpasses.passes.use_onednn_matmuls import UseOnednnMatmuls

__all__ = [
    "DEFAULT_PASSES",
    "TUNED_PASSES",
    "BucketCollectives",
    "ChunkLogits",
    "ConcatMatmuls",
    "DowncastSavedActivations",
    "EliminateCommonSubexpressions",
    "EliminateDeadCode",
    "FoldConstants",
    "FuseAttention",
    "FuseMatmulSums",
    "FuseScatterAdd",
    "HoistSlices",
    "MoveMatmulBeforeBroadcast",
    "MoveMatmulBeforeGather",
    "OverlapCollectives",
    "PackDropoutRng",
    "PackSavedMasks",
    "ReassociateMatmuls",
    "RemoveNoOps",
    "RemoveRepeatKv",
    "ReplaceOneHotMatmul",
    "SkipZeroRows",
    "TunedPasses",
    "UseOnednnConvolutions",
    "UseOnednnMatmuls",
    "default_passes",
    "library",
]

DEFAULT_PASSES = "default"
"""Stands for :func:`default_passes` in a list of passes."""


TUNED_PASSES = "tuned"
"""Stands, instead of a list, for the passes that measure best."""


class TunedPasses:
    """Replaces :data:`TUNED_PASSES` to also specify how to measure."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TunedPasses:
        return self  # torch.compile and others copy their options, but this object belongs to a search

    def told(self) -> str:
        """Return as text what decides which passes are chosen; the plain word for its default meaning."""
        return TUNED_PASSES


def default_passes() -> tuple[Pass, ...]:
    """Return the passes that run by default, in order."""
    return (
        EliminateDeadCode(),
        RemoveNoOps(),
        FoldConstants(),
        EliminateCommonSubexpressions(),
        FuseScatterAdd(),
        EliminateDeadCode(),
    )


def library() -> dict[str, type[Pass]]:
    """Return all passes that are available by name."""
    exported = (globals()[name] for name in __all__)
    return {c.name: c for c in exported if isinstance(c, type) and issubclass(c, Pass)}
