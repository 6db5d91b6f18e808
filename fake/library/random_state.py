"""A run whose random numbers are the same each time, and which nobody notices afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Default generators of the CPU and of the GPUs in use start from this seed; afterwards they are as they were.

    ``torch.manual_seed`` in its place would note, with a stack trace, what devices that are not in use are to be told once they
    are: a millisecond a call, and another seed for them than the user's.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield
