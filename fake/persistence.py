"""The on-disk dispatch cache: off unless a directory is given, by a call or in ``FAKE_DISPATCH_CACHE``."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from pathlib import Path
from typing import Any

from fake import acceleration, mode
from fake.cache.disk import DiskCache, DiskCacheWarning, add_entries
from fake.cache.replacements import REPLACEMENTS
from fake.wrong_arguments import check_type, is_path

ENVIRONMENT_VARIABLE = "FAKE_DISPATCH_CACHE"

Entries = dict[tuple[str, str], dict[Any, Any]]


class _Persistence:
    """Owns the open disk cache."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.disk: DiskCache | None = None
        self.registered = False
        self.unsaved: Entries = {}

    def engines(self) -> dict[str, Any]:
        """Engines by the name their entries are stored under: they answer a few operators differently."""
        return {"fake": mode.ENGINE, "torch": acceleration.engine()}

    def enable(self, directory: str | os.PathLike[str]) -> None:
        with self.lock:
            self.disk, self.unsaved = DiskCache(directory), {}
            for name, engine in self.engines().items():
                engine.attach_disk(self.disk, name)
            if not self.registered:
                atexit.register(self.save_at_exit)
                self.registered = True

    def disable(self) -> None:
        with self.lock:
            self.disk, self.unsaved = None, {}
            for engine in self.engines().values():
                engine.attach_disk(None, "")

    def save(self) -> Path | None:
        with self.lock:
            if self.disk is None or REPLACEMENTS.any_builtin:
                return None
            for name, engine in self.engines().items():
                for place, table in engine.take_new_entries(name).items():
                    add_entries(self.unsaved.setdefault(place, {}), table)
            path = self.disk.save(self.unsaved)
            self.unsaved = {}  # if the disk refuses, the next save retries them
            return path

    def save_at_exit(self) -> None:
        try:
            self.save()
        except OSError as error:
            warnings.warn(f"fake: the dispatch cache was not saved: {error}", DiskCacheWarning, stacklevel=2)


_PERSISTENCE = _Persistence()


def enable_disk_cache(directory: str | os.PathLike[str]) -> None:
    """Serve dispatch results from a directory, and add this process's new results to it at exit.

    Entries are valid for the same build of torch and the same sources of this package; other entries are left
    alone. Several processes may share one directory. While a kernel of torch's own operators is replaced
    through ``torch.library``, the disk is neither read nor written. Setting ``FAKE_DISPATCH_CACHE`` does the
    same at import.

    Raises:
        OSError: the directory cannot be created.
        ArgumentTypeError: ``directory`` is not a path.
    """
    check_type("enable_disk_cache", "directory", directory, is_path, "the path of a directory")
    _PERSISTENCE.enable(directory)


def save_disk_cache() -> Path | None:
    """Write the entries that are new since the last save. Returns the file, or None if there were none.

    Raises:
        OSError: the file cannot be written. Nothing is lost: the next save retries.
            At exit this is only a warning.
    """
    return _PERSISTENCE.save()


def disable_disk_cache() -> None:
    """Stop reading from and writing to the disk (entries already read stay in memory)."""
    _PERSISTENCE.disable()


if os.environ.get(ENVIRONMENT_VARIABLE):
    try:
        enable_disk_cache(os.environ[ENVIRONMENT_VARIABLE])
    except OSError as error:
        warnings.warn(f"fake: {ENVIRONMENT_VARIABLE} is not used: {error}", DiskCacheWarning, stacklevel=2)
