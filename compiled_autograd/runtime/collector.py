"""The garbage collector, paused while a capture makes thousands of small objects that all stay.

Each of its runs would look at all of them again, and the time of a capture grow with the square of its length.
"""

import contextlib
import gc
from collections.abc import Callable

from fake.seam.patches import LEDGER, Edit, When


def _pause() -> Callable[[], None]:
    if not gc.isenabled():
        return lambda: None
    gc.disable()
    return gc.enable


(_PAUSE,) = LEDGER.add(
    Edit(
        "Python's garbage collector: paused",
        _pause,
        when=When.CAPTURE,
        versions=None,
        lost="time: the capture of a long backward pass takes time that grows with the square of its length",
    )
)


def collection_paused() -> contextlib.AbstractContextManager[None]:
    """No garbage collection inside the block: for work that makes many objects that stay, and runs no user code."""
    return LEDGER.in_force(_PAUSE)
