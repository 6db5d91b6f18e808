"""``torch.compile(model, backend="fxpasses")`` with plans: its result looks for the plan of an earlier
process before Dynamo traces."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from fake.seam.patches import Patch
from fxpasses.plans._torch import caches_are_disabled
from fxpasses.plans.compile import Compiled
from fxpasses.plans.files.plan_files import OnlyResults, cache_directory
from fxpasses.plans.graph_breaks._torch_entry import surround_callables
from fxpasses.plans.running.loaded import Directory


def before_tracing(backend: Callable[..., Any]) -> Patch:
    """The ledger entry that makes callables of ``torch.compile`` for ``backend`` those of
    :func:`fxpasses.compile`. Other backends are not affected."""

    def make_compiled(
        compiling: Any, keywords: Mapping[str, Any], *, model: Any, **how: Any
    ) -> Compiled[Any] | None:
        """Return the callable, or None to let Dynamo compile. Args: the backend, the keywords of
        ``torch.compile``, the model, and how it is compiled."""
        options = {key: value for key, value in keywords.items() if key == "mode"}
        given = keywords.get("options") or {}
        cache = given.get("cache", "auto") if isinstance(given, Mapping) else None
        if (
            compiling is not backend
            or isinstance(cache, OnlyResults)
            or not isinstance(cache, (str, os.PathLike))
        ):
            return None  # the compilation reports what is wrong with it
        directory = cache_directory(os.fspath(cache))
        if directory is None or (cache == "auto" and caches_are_disabled()):
            return None
        return Compiled(model, {**options, **given}, Directory(directory), **how)

    return surround_callables(make_compiled)
