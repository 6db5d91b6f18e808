"""Run code with reproducible random numbers, and restore the generators afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed the default generators of the CPU and of the GPUs in use, and restore their states afterwards.

    ``torch.manual_seed`` instead would queue the seed, with a stack trace, for devices not yet in use: it
    costs a millisecond per call, and leaves those devices with another seed than the user's.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield
