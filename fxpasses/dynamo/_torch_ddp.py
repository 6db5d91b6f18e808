"""Dynamo's DDPOptimizer, which cuts a DDP model where a bucket of gradients is full: private torch names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import fx
from torch._dynamo.backends import distributed

from fake.seam.patches import LEDGER, Patch, When
from fxpasses.dynamo._torch import backend_of

Plan = Callable[[fx.GraphModule, Mapping[str, Any]], AbstractContextManager[Callable[[fx.Node], bool]]]
"""Takes a Dynamo graph and the backend's keyword arguments. Buckets are compiled within the context, which
yields whether the graph may be cut before a node."""

_HAS_OUTPUT = LEDGER.thread_patch(
    distributed,
    "bucket_has_external_output",
    lost="time: models of DistributedDataParallel are cut in the middle of layers, which are compiled one by one",
)


def cut_buckets(backend: Callable[..., Any], plan: Plan) -> Patch:
    """The ledger's patch that cuts DDP models compiled for ``backend`` only where ``plan`` allows it.

    A full bucket keeps growing until then. Other backends are not affected.
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
                    bucket.opcount_increased_to_capture_external_output = -1  # no lack of outputs
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


def small_buckets(backend: Callable[..., Any]) -> Patch:
    """The ledger's patch for DDP models whose buckets are below a megabyte, which Dynamo raises an error for.

    Their first bucket is as large as the others, as in DDP.
    """

    def fitting(original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            first, cap = given.arguments["first_bucket_cap"], given.arguments["bucket_bytes_cap"]
            if first is None and backend_of(given.arguments["backend_compile_fn"])[0] is backend:
                given.arguments["first_bucket_cap"] = min(cap, dist._DEFAULT_FIRST_BUCKET_BYTES)
            original(*given.args, **given.kwargs)

        return make

    def unfit() -> str:
        known = inspect.signature(distributed.DDPOptimizer.__init__).parameters.keys()
        return (
            ""
            if {"bucket_bytes_cap", "backend_compile_fn", "first_bucket_cap"} <= known
            else "DDPOptimizer takes its bucket sizes in another way than is known"
        )

    return Patch(
        distributed.DDPOptimizer,
        "__init__",
        fitting,
        when=When.BACKEND,
        versions=None,
        unfit=unfit,
        lost="models of DistributedDataParallel with bucket_cap_mb below 1 raise an AssertionError of Dynamo",
    )
