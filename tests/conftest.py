"""Settings for every test: few threads, and compile caches that no earlier run has filled."""

import gc
import os
import tempfile

# Before torch is imported: these are read once.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start, too
os.environ["FXPASSES_CACHE_DIR"] = "off"  # tests of plans name a directory; the others compile
# A process with a new cache compiles programs to see whether the compiler knows the instructions that the CPU has: half of its time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fxpasses_tests_")

import shutil

import pytest
import torch
import torch._dynamo
from torch._library import fake_impl as library_fake_impl

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish():
    _set_aside()


_modules = 0


def pytest_runtest_teardown(item, nextitem):
    """What a module of tests has left is set aside before the next one."""
    global _modules
    if nextitem is not None and nextitem.path != item.path:
        torch._dynamo.reset()
        _modules += 1
        if _modules % 30 == 0:  # what was in use when it was set aside may be garbage by now
            gc.unfreeze()
        _set_aside()


def _set_aside():
    """What is there now stays: full collections, many of which tests ask for, need not look at it (a tenth of the time of all tests)."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def context_of_fake_kernels(monkeypatch):
    """torch keeps it in one variable of the process, where threads that run meta kernels may leave each other's."""
    monkeypatch.setattr(library_fake_impl, "global_ctx_getter", library_fake_impl.global_ctx_getter)


def pytest_unconfigure():
    shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
