"""Tuned calls: find the results for each graph of a call before anything is traced.

Tracing a model again only to find that all its graphs were tuned takes seconds. The key of a call is made of
what decides which graphs it is traced into, like the key of :mod:`a plan <fxpasses.plans>`. There is one file
for each call, ``tuned/calls/KEY.call``, which names the files of the results.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fxpasses.plans.errors import NoPlan, PlanFileError
from fxpasses.plans.files.plan_files import cache_directory, check_owner, write_atomically
from fxpasses.plans.inputs.arguments import describe_arguments, describe_options
from fxpasses.plans.inputs.surroundings import state, surroundings
from fxpasses.plans.walks.walk import Walk
from fxpasses.tuning.kept import TuningResult, read_result

log = logging.getLogger(__name__)


def file_of_call(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    cache: str,
) -> Path | None:
    """Return the file for a call; ``None`` if it depends on what cannot be described, or nothing is kept.

    Args:
        model: what is called.
        args: its positional arguments.
        kwargs: its keyword arguments.
        options: the options of the compilation, including passes and how they are measured.
        cache: where results are kept, as for :func:`fxpasses.compile`.
    """
    root = cache_directory(cache)
    if root is None:
        return None
    try:
        _, _, objects = describe_arguments(tuple(args), kwargs, lambda tensor: None)
        walk = Walk()
        content = walk.walk_call(model, objects)
        numbers = {id(tensor): i for i, tensor in enumerate(walk.tensors)}
        arguments, _, _ = describe_arguments(tuple(args), kwargs, lambda tensor: numbers.get(id(tensor)))
        key_parts = [content, arguments, describe_options(options), surroundings(), list(map(str, state()))]
    except NoPlan as error:
        log.info("whether a call was tuned before is asked of its graphs: %s", error)
        return None
    key = hashlib.sha256(json.dumps(key_parts, sort_keys=True).encode()).hexdigest()[:32]
    return root / "tuned" / "calls" / f"{key}.call"


def read_call(file: Path) -> list[TuningResult] | None:
    """Return the results of all graphs of a call, or ``None`` if it was not tuned or a result is missing.

    Args:
        file: what :func:`file_of_call` returned.
    """
    if not file.exists():
        return None
    try:
        check_owner(file)
        return [read_result(file.parent.parent / name) for name in json.loads(file.read_text())]
    except (PlanFileError, OSError, ValueError, TypeError, RecursionError) as error:
        log.info("a call that was tuned is traced again: %s", error)
        return None


def write_call(file: Path, results: Sequence[Path | None]) -> None:
    """Record that a call was tuned.

    Args:
        file: what :func:`file_of_call` returned.
        results: the files of the results of all its graphs.
    """
    folder = file.parent.parent
    names = [str(path.relative_to(folder)) for path in results if path is not None and path.exists()]
    if not results or len(names) < len(results):
        return
    try:
        write_atomically(file, json.dumps(names).encode())
    except OSError as error:
        log.warning("that a call was tuned is not kept: %s", error)
