"""The cache on disk when things go wrong: killed and concurrent writers, other builds, a disk that refuses."""

import hashlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

import fake
from fake.cache import disk
from fake.cache.disk import DiskCache, DiskCacheWarning
from fake.cache.recipe import Constant
from tests import children
from tests.fake.support import describe

KILLED = """
import os, sys, torch, fake
def hang(_):
    print("writing", flush=True)
    import time
    time.sleep(600)
os.fsync = hang
fake.enable_disk_cache(sys.argv[1])
with fake.FakeTensorMode():
    torch.randn(3, 4).relu()
fake.save_disk_cache()
"""

MANY = """
import sys
from fake.cache.disk import DiskCache
from fake.cache.recipe import Constant
number = int(sys.argv[2])
for turn in range(6):
    DiskCache(sys.argv[1]).save({("fake", "op"): {(number, turn): Constant(turn)}})
"""


@pytest.fixture
def opened(tmp_path):
    fake.cache_clear()
    fake.enable_disk_cache(tmp_path)
    yield tmp_path
    fake.disable_disk_cache()
    fake.cache_clear()


def work():
    with fake.FakeTensorMode():
        x = torch.randn(3, 4)
        return [describe(y) for y in (x + 1, x.view(12), x.t(), x @ x.t())]


def reopened(directory):
    fake.cache_clear()
    fake.enable_disk_cache(directory)
    return work(), fake.cache_info().misses


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_nothing_to_read(opened, monkeypatch):
    expected = work()
    fake.save_disk_cache()
    writer = subprocess.Popen([sys.executable, "-c", KILLED, str(opened)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "writing\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert len(list(opened.glob("*.tmp"))) == len(list(opened.glob("*.segment"))) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reopened(opened) == (expected, 0)
    monkeypatch.setattr(disk, "_MERGE_ABOVE", 0)
    DiskCache(opened)
    assert list(opened.glob("*.tmp")), "its writer may still live"
    hours_ago = time.time() - 7200
    for path in opened.glob("*.tmp"):
        os.utime(path, (hours_ago, hours_ago))
    DiskCache(opened)
    assert not list(opened.glob("*.tmp"))
    assert reopened(opened) == (expected, 0)


def test_concurrent_writers_and_mergers_lose_nothing(tmp_path, monkeypatch):
    running = [children.Child(["-c", MANY, tmp_path, number]) for number in range(4)]
    assert [child.finish().returncode for child in running] == [0] * 4
    for _ in range(2):
        found = dict(DiskCache(tmp_path).entries("fake", "op"))
        assert found == {(n, turn): Constant(turn) for n in range(4) for turn in range(6)}
        monkeypatch.setattr(disk, "_MERGE_ABOVE", 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(torch, "__version__", "2.99.0"),
        lambda patch: patch.setattr(torch.version, "git_version", "another commit"),
        lambda patch: patch.setattr(sys, "version_info", (3, 99, 0)),
    ],
    ids=["release", "build", "python"],
)
def test_entries_of_another_build_are_left_alone(opened, monkeypatch, change):
    expected = work()
    path = fake.save_disk_cache()
    disk.build_id.cache_clear()
    with monkeypatch.context() as patch:
        change(patch)
        other = disk.build_id()
    disk.build_id.cache_clear()
    assert other != disk.build_id()
    monkeypatch.setattr(disk, "build_id", lambda: other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers, misses = reopened(opened)
    assert answers == expected
    assert misses > 0
    assert path.exists()


def test_changed_sources_are_another_build(monkeypatch):
    before = disk.build_id.__wrapped__()
    read = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda self: read(self) + (b"#" if self.name == "structured.py" else b"")
    )
    assert disk.build_id.__wrapped__() != before


@pytest.mark.parametrize(
    "payload",
    [b"no pickle", pickle.dumps(3), pickle.dumps(print), b"\x80\x05."],
    ids=["garbage", "a number", "a function", "nothing"],
)
def test_whole_files_without_entries_are_ignored_with_one_warning(opened, payload):
    expected = work()
    data = disk.MAGIC + disk.build_id() + hashlib.sha256(payload).digest() + payload
    for name in ("one.segment", "two.segment"):
        (opened / name).write_bytes(data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert reopened(opened)[0] == expected
    assert sum(issubclass(w.category, DiskCacheWarning) for w in caught) == 1


def test_a_chunk_without_entries_is_ignored(opened):
    expected = work()
    content = pickle.dumps({("fake", "aten::relu"): b"no pickle", ("fake", "aten::add.Tensor"): b"\x80"})
    data = disk.MAGIC + disk.build_id() + hashlib.sha256(content).digest() + content
    (opened / "one.segment").write_bytes(data)
    fake.cache_clear()
    with pytest.warns(DiskCacheWarning):
        assert reopened(opened)[0] == expected


def test_a_disk_that_refuses_loses_nothing(opened, monkeypatch):
    expected = work()

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            fake.save_disk_cache()
        assert not list(opened.iterdir())
        with pytest.warns(DiskCacheWarning, match="not saved"):
            fake.persistence._PERSISTENCE.save_at_exit()
    assert fake.save_disk_cache() is not None
    assert reopened(opened) == (expected, 0)


def test_a_directory_that_was_removed_is_made_again(opened):
    expected = work()
    opened.rmdir()
    assert fake.save_disk_cache() is not None
    assert reopened(opened) == (expected, 0)


def test_what_is_no_regular_file_is_skipped(opened, monkeypatch):
    expected = work()
    segment = fake.save_disk_cache()
    fake.disable_disk_cache()
    os.mkfifo(opened / "0pipe.segment")
    os.mkfifo(opened / "0pipe.tmp")
    (opened / "0directory.segment").mkdir()
    (opened / "0directory.tmp").mkdir()
    (opened / "0nowhere.segment").symlink_to(opened / "missing")
    (opened / "0loop.segment").symlink_to(opened / "0loop.segment")
    (opened / "0device.segment").symlink_to(os.devnull)
    (opened / "0linked.segment").symlink_to(segment.rename(opened / "1moved"))  # a link to a segment is one
    strange = sorted(path.name for path in opened.iterdir() if not path.is_file())
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(opened)  # the path of a socket is short
        server.bind("0socket.segment")
        for many in (
            disk._MERGE_ABOVE,
            0,
        ):  # the second time segments are merged, and unfinished files removed
            monkeypatch.setattr(disk, "_MERGE_ABOVE", many)
            monkeypatch.setattr(disk, "_ABANDONED_AFTER", -1.0)
            fake.cache_clear()
            with pytest.warns(DiskCacheWarning, match="no regular file") as told:
                fake.enable_disk_cache(opened)
            assert len(told) == 1
            assert work() == expected
            assert fake.cache_info().misses == 0
            fake.disable_disk_cache()
    assert not [name for name in strange if not os.path.lexists(opened / name)]
