"""Settings for all tests: few threads, and compile caches that start empty."""

import gc
import os
import tempfile

# Set these before importing torch, which reads them once.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for processes that tests start
os.environ["FXPASSES_CACHE_DIR"] = "off"  # tests of plans name a directory; others compile
# With a new cache, Inductor compiles test programs to see which of the CPU's instruction sets the compiler
# supports. That takes half of the time of a process.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fxpasses_tests_")

import shutil

import pytest
import torch
from torch._library import fake_impl as library_fake_impl

import fxpasses

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module")
def old_objects_aside():
    """For modules that collect garbage again and again: what other tests have left is not looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def fresh_dynamo():
    """Nothing is compiled or counted yet, random numbers are the same each time, and nothing stays compiled."""
    torch._dynamo.reset()
    fxpasses.reset_stats()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def fake_group():
    """This process as the first of two whose messages are not sent."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def context_of_fake_kernels(monkeypatch):
    """torch keeps it in one variable of the process, where threads that run meta kernels may leave each other's."""
    monkeypatch.setattr(library_fake_impl, "global_ctx_getter", library_fake_impl.global_ctx_getter)


def pytest_unconfigure():
    shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
