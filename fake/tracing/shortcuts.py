"""Skip the text of the joint, forward and backward graphs if nothing reads it: AOTAutograd makes it for the
structured log and for entries of its cache.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from fake.seam.aot_autograd import graph_compile
from fake.seam.logging import structured_log_is_on
from fake.seam.patches import LEDGER, Patch, When


def text_is_read(config: Any) -> bool:
    """Return whether the text of a graph is read: by a log, or by an entry of AOTAutograd's cache."""
    return (
        config.cache_info is not None
        or structured_log_is_on()
        or any(
            log.isEnabledFor(logging.INFO)
            for log in (graph_compile.aot_joint_log, graph_compile.aot_graphs_log)
        )
    )


def _skip_if_unread(original: Callable[..., Any]) -> Callable[..., Any]:
    def log(*arguments: Any) -> Any:
        config = arguments[-1]
        if not text_is_read(config):
            config = dataclasses.replace(config, enable_log=False)
        return original(*arguments[:-1], config)

    return log


PATCHES = LEDGER.add(
    *(
        Patch(
            graph_compile,
            name,
            _skip_if_unread,
            when=When.COMPILATION,
            lost="time: the text of each graph is made, also where nobody reads it",
        )
        for name in ("_log_joint_graph", "_log_fw_bw_graphs")
    )
)
