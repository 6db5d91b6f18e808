"""The cache on disk: served across processes, and never wrong: foreign, truncated and stale files are left alone."""

import pickle
import warnings

import pytest
import torch

import fake
from fake.cache import disk
from fake.cache.disk import DiskCache, DiskCacheWarning
from fake.cache.recipe import Constant
from fake.mode import ENGINE
from tests import children
from tests.fake.support import describe, dynamic, symbolic_mode

WORK = """
import sys, torch, fake
fake.enable_disk_cache(sys.argv[1])
with fake.FakeTensorMode():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, {last}))
    model(torch.randn(3, 4)).sum().backward()
info = fake.cache_info()
print(info.hits, info.misses)
"""


def run(directory, last=2):
    result = children.run_fresh("-W", "error::UserWarning", "-c", WORK.format(last=last), directory)
    assert result.returncode == 0, result.stderr
    return [int(word) for word in result.stdout.split()]


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
        return [describe(y) for y in (x + 1, x.view(12), *x.split(1), x.t(), x.add_(1), x.to(torch.float16))]


def test_entries_come_back_as_they_were(opened):
    expected = work()
    assert fake.save_disk_cache() is not None
    assert fake.save_disk_cache() is None
    fake.cache_clear()
    fake.enable_disk_cache(opened)
    assert work() == expected
    assert work() == expected
    assert fake.cache_info().misses == 0


@pytest.mark.parametrize(
    ("damage", "expected_warnings"),
    [
        (lambda data: data[: len(data) // 2], 1),
        (lambda data: data[:10], 1),
        (lambda data: b"", 1),
        (lambda data: b"something else entirely" * 20, 1),
        (lambda data: data[:-3] + b"xyz", 1),
        (lambda data: data.replace(disk.build_id(), b"0" * 32), 0),
    ],
    ids=["truncated", "cut in the header", "empty", "foreign", "corrupt", "another build"],
)
def test_a_bad_file_is_ignored_with_one_warning(opened, damage, expected_warnings):
    expected = work()
    path = fake.save_disk_cache()
    path.write_bytes(damage(path.read_bytes()))
    (opened / "again.segment").write_bytes(path.read_bytes())
    fake.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fake.enable_disk_cache(opened)
        assert work() == expected
    assert sum(issubclass(w.category, DiskCacheWarning) for w in caught) == expected_warnings
    assert fake.cache_info().misses > 0


def test_only_data_is_unpickled(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("this must not run",))

    with pytest.raises(pickle.UnpicklingError, match="no part of a dispatch cache"):
        disk._unpickle(pickle.dumps({"key": Evil()}))


def test_writers_lose_nothing_and_segments_are_merged(tmp_path):
    writers = [DiskCache(tmp_path) for _ in range(disk._MERGE_ABOVE + 2)]
    for number, writer in enumerate(writers):
        writer.save({("fake", "op"): {(number,): Constant(number)}})
    assert len(list(tmp_path.iterdir())) > disk._MERGE_ABOVE
    merged = DiskCache(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    expected = {(n,): Constant(n) for n in range(disk._MERGE_ABOVE + 2)}
    assert dict(merged.entries("fake", "op")) == expected
    assert dict(DiskCache(tmp_path).entries("fake", "op")) == expected


@pytest.mark.slow
def test_processes_share_a_directory(tmp_path):
    running = [children.Child(["-c", WORK.format(last=last), tmp_path]) for last in (2, 5)]
    assert [child.finish().returncode for child in running] == [0, 0]
    assert len(list(tmp_path.iterdir())) == 2
    hits, misses = run(tmp_path, 5)
    assert misses == 0
    assert hits > 10


def test_entries_of_this_process_alone_are_left_out(opened):
    table = {(1,): Constant(1), (lambda: 0,): Constant(2)}
    saved = DiskCache(opened)
    saved.save({("fake", "op"): table})
    assert dict(DiskCache(opened).entries("fake", "op")) == {(1,): Constant(1)}
    assert ENGINE.store.take_new_recipes() is not None


def symbolic_work(sizes):
    """Results and guards on symbolic sizes."""
    mode = symbolic_mode()
    x = dynamic(mode, torch.ones(sizes), "x")
    y = dynamic(mode, torch.ones(sizes), "y")
    with mode:
        made = [x + y, x.view(-1), x @ y.t(), x.reshape(-1, 2), torch.cat([x, y]), x.clone().add_(1)]
        made += [torch.nn.functional.layer_norm(x, (x.shape[1],)), *x.split(x.shape[0] // 2)]
    return [describe(t) for t in made], [str(guard.expr) for guard in mode.shape_env.guards]


def test_symbolic_entries_come_back_for_other_symbols(opened):
    expected = {sizes: symbolic_work(sizes) for sizes in ((6, 4), (10, 8), (9, 2))}
    assert fake.save_disk_cache() is not None
    for sizes, answer in expected.items():
        fake.cache_clear()
        fake.enable_disk_cache(opened)
        normalized = ENGINE.symbolic.normalized
        assert symbolic_work(sizes) == answer
        assert not normalized.take_new()
    fake.cache_clear()
    fake.enable_disk_cache(opened)
    unseen = symbolic_work((12, 6))
    fake.disable_disk_cache()
    fake.cache_clear()
    assert unseen == symbolic_work((12, 6))


def test_merging_keeps_every_way_of_a_key(tmp_path):
    place = {("fake, symbolic", "aten::view"): {("a key",): ("one way",)}}
    other = {("fake, symbolic", "aten::view"): {("a key",): ("one way", "another")}}
    for number in range(disk._MERGE_ABOVE + 1):
        DiskCache(tmp_path).save(other if number == 3 else place)
    DiskCache(tmp_path)
    assert len(list(tmp_path.iterdir())) < disk._MERGE_ABOVE
    assert dict(DiskCache(tmp_path).entries("fake, symbolic", "aten::view"))[("a key",)] == (
        "one way",
        "another",
    )
