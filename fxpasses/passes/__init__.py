"""The library of passes, one file each, named for what it does.

* ``eliminate_dead_code``: calls whose result nobody uses
* ``remove_no_ops``: views, copies and casts that change nothing
* ``fold_constants``: what depends on constants alone
* ``eliminate_common_subexpressions``: what was computed before
* ``fuse_scatter_add``: sparse gradients are scattered straight into dense ones

Those are the default. Beyond them, by name:

* ``bucket_collectives``: many small messages between processes become one
* ``chunk_logits``: the loss of a large vocabulary, a chunk of rows at a time
* ``concat_matmuls``: matmuls with the same weight become one
* ``downcast_saved_activations``: activations are saved in bfloat16
* ``fuse_attention``: unfused attention becomes one call of the attention kernel
* ``fuse_matmul_sums``: a sum of matmuls becomes one matmul
* ``hoist_slices``: slices move up, before what computes each row for itself
* ``move_matmul_before_broadcast``: linear layers on broadcast inputs are computed before the broadcast
* ``overlap_collectives``: messages between processes travel while something is computed
* ``pack_dropout_rng``: dropout masks from fewer random bits
* ``pack_saved_masks``: masks are saved in bits
* ``reassociate_matmuls``: chains of matmuls in the cheapest order
* ``remove_repeat_kv``: grouped-query attention without repeated keys and values
* ``replace_one_hot_matmul``: matmuls with one-hot rows become lookups
* ``skip_zero_rows``: gradients that are zero but for a few rows are computed for those rows
* ``use_onednn_convolutions``: convolutions of single pixels on the CPU by oneDNN instead of MKL
* ``use_onednn_matmuls``: matmuls on the CPU by oneDNN instead of MKL

``_matching``, ``_rowwise`` and ``_options`` hold what several of them share.
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
"""The word that stands for :func:`default_passes` in a list of passes."""


TUNED_PASSES = "tuned"
"""The word that, in the place of a list, stands for what is measured best."""


class TunedPasses:
    """Stands in the place of :data:`TUNED_PASSES` where it is also said how to measure."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TunedPasses:
        return self  # others keep copies of the options of torch.compile; this one belongs to a search

    def told(self) -> str:
        """All of it that decides which passes are chosen, as text; the word alone where it is what the word stands for."""
        return TUNED_PASSES


def default_passes() -> tuple[Pass, ...]:
    """The passes that run when nothing else is asked for, in their order."""
    return (
        EliminateDeadCode(),
        RemoveNoOps(),
        FoldConstants(),
        EliminateCommonSubexpressions(),
        FuseScatterAdd(),
        EliminateDeadCode(),
    )


def library() -> dict[str, type[Pass]]:
    """All passes that can be asked for by name."""
    exported = (globals()[name] for name in __all__)
    return {c.name: c for c in exported if isinstance(c, type) and issubclass(c, Pass)}
