"""A rank answers the others from its first process group on, not only from its first compilation on.

Those that compiled ask the missing ones what they do. One that still builds its model, in collectives of eager's, is named with the line that it stands in;
without an answer it could not be told from one that is slow.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

log = logging.getLogger(__name__)
_PAUSE = 0.5


def answer_from_the_first_group() -> None:
    """Wait in a thread for the process group of a job that ``torchrun`` started; a process of its own has no thread."""
    if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
        threading.Thread(target=_introduce, name="fxpasses waits for a process group", daemon=True).start()


def _introduce() -> None:
    # Nothing is imported before the main thread is through with torch.distributed.
    while not ((dist := sys.modules.get("torch.distributed")) and getattr(dist, "is_initialized", bool)()):
        time.sleep(_PAUSE)
    from fxpasses.distributed.answering import Answering

    try:
        Answering.introduce()
    except (RuntimeError, ValueError) as error:  # the group is gone already
        log.debug("this rank does not answer other ranks yet: %s", error)


answer_from_the_first_group()
