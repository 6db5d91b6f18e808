"""DDPOptimizer of Dynamo: it cuts a model of ``DistributedDataParallel`` where a bucket of gradients is full. Private names of torch stand here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import fx
from torch._dynamo.backends import distributed

from fake.seam.patches import LEDGER, Patch, When
from fxpasses.dynamo._torch import backend_of

Plan = Callable[[fx.GraphModule, Mapping[str, Any]], AbstractContextManager[Callable[[fx.Node], bool]]]
"""Of a Dynamo graph and the backend's keyword arguments: within, its buckets are compiled; gives whether it may be cut before a node."""

_HAS_OUTPUT = LEDGER.thread_patch(
    distributed,
    "bucket_has_external_output",
    lost="time: models of DistributedDataParallel are cut in the middle of layers, which are compiled one by one",
)


def cut_buckets(backend: Callable[..., Any], plan: Plan) -> Patch:
    """The entry of the ledger by which models of DDP that are compiled for ``backend`` are cut where ``plan`` allows it.

    A bucket that is full is filled on up to there. No effect on other backends.
    """

    def planned(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile_fn(self: Any, gm: fx.GraphModule, example_inputs: Any, **settings: Any) -> Any:
            compiling, keywords = backend_of(self.backend_compile_fn)
            if compiling is not backend:
                return original(self, gm, example_inputs, **settings)
            with plan(gm, keywords) as may_cut_before:

                def has_output(bucket: Any) -> bool:
                    if may_cut_before(bucket.nodes[-1]):
                        return bool(_HAS_OUTPUT.torchs(bucket))
                    bucket.opcount_increased_to_capture_external_output = -1  # it is no lack of outputs
                    return False

                with LEDGER.using((_HAS_OUTPUT, has_output)):
                    return original(self, gm, example_inputs, **settings)

        return compile_fn

    def unfit() -> str:
        known = list(inspect.signature(distributed.DDPOptimizer.compile_fn).parameters)
        return (
            "" if known[:2] == ["self", "gm"] else "DDPOptimizer compiles graphs in another way than is known"
        )

    return Patch(
        distributed.DDPOptimizer,
        "compile_fn",
        planned,
        when=When.BACKEND,
        versions=None,
        unfit=unfit,
        lost="time: models of DistributedDataParallel are cut in the middle of layers, which are compiled one by one",
    )
