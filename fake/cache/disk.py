"""The dispatch cache on disk.

A cache is a directory. Entries are valid for one *build*: a hash of torch's version, Python's, and all
sources of this package that affect answers. Every save adds one segment file, written under a temporary name
and moved into place, so that processes can write concurrently without losing anything. Loading reads all
segments of its build, and merges them when there are many. A segment that is truncated, corrupt, not ours or
not a regular file is ignored, with one warning.

A segment is ``MAGIC``, the build, a SHA-256 of the payload, and the payload: a pickled dictionary from engine
and operator to the pickled ``{key: recipe}`` of that operator, which is read when the operator is first used.
Results on symbolic sizes are stored with numbered symbols, under a separate engine name. Unpickling is
restricted to the names that keys and recipes consist of.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

MAGIC = b"fake dispatch cache 1\n"
_DIGEST = hashlib.sha256().digest_size
_SUFFIX = ".segment"
_MERGE_ABOVE = 16

_ALLOWED = frozenset(
    (
        *(
            ("builtins", name)
            for name in ("int", "float", "bool", "complex", "str", "list", "tuple", "type", "frozenset")
        ),
        *(
            ("fake.cache.recipe", name)
            for name in ("Apart", "Argument", "Constant", "Fresh", "Sequence", "View")
        ),
        ("fake.cache.links", "Linked"),
        ("fake.cache.normalized", "Entry"),
        ("fake.cache.normalized", "intern_normalized"),
        ("fake.cache.symbolic_recipe", "SymbolicConstant"),
        ("fake.cache.key", "_intern_token"),
        ("fake.tensors.metadata", "intern"),
        ("torch", "device"),
        ("torch", "Generator"),
        ("torch.serialization", "_get_layout"),
        ("torch.fx.experimental.symbolic_shapes", "ShapeEnvSettings"),
    )
)
"""All classes and functions that keys and recipes consist of; torch's constants are recognized by type."""


_UNREADABLE = (
    pickle.UnpicklingError, EOFError, ArithmeticError, AttributeError, ImportError, LookupError, TypeError, ValueError,
)  # fmt: skip
"""Errors that unpickling may raise for intact bytes that are not entries."""

_ABANDONED_AFTER = 3600.0
"""Seconds after which an unfinished file counts as abandoned: its writer was killed."""


class DiskCacheWarning(UserWarning):
    """A file of the cache directory was ignored."""


@cache
def build_id() -> bytes:
    """Return a digest of what entries are valid for: torch's build, Python's version,
    this package's sources."""
    digest = hashlib.sha256()
    digest.update(f"{torch.__version__} {torch.version.git_version} {sys.version_info[:2]}".encode())
    root = Path(__file__).parents[1]
    for source in sorted((*root.rglob("*.py"), *root.rglob("*.json"))):
        relative = source.relative_to(root)
        if relative.parts[0] != "library":
            digest.update(str(relative).encode())
            digest.update(source.read_bytes())
    return digest.digest()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        # A memory format is pickled as ``torch.x`` of whichever module imported torch first.
        if module.split(".")[0] == "torch" or name.startswith("torch."):
            constant = getattr(torch, name.removeprefix("torch."), None)
            if isinstance(constant, (torch.dtype, torch.layout, torch.memory_format)):
                return constant
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a dispatch cache")


def _unpickle(data: bytes) -> Any:
    return _Unpickler(io.BytesIO(data)).load()


class _DamagedError(Exception):
    """A file is not a segment, or is incomplete."""


def _read_file(path: Path) -> bytes:
    """Read as many bytes as the file's size says, without blocking: a pipe or a device would never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise _DamagedError("it is no regular file")
        return file.read(status.st_size)


def _read_segment(path: Path) -> dict[tuple[str, str], bytes] | None:
    data = _read_file(path)
    header, build = data[: len(MAGIC)], data[len(MAGIC) : len(MAGIC) + _DIGEST]
    if header != MAGIC or len(data) < len(MAGIC) + 2 * _DIGEST:
        raise _DamagedError("it is truncated or no dispatch cache")
    payload = data[len(MAGIC) + 2 * _DIGEST :]
    if hashlib.sha256(payload).digest() != data[len(MAGIC) + _DIGEST : len(MAGIC) + 2 * _DIGEST]:
        raise _DamagedError("its checksum does not fit")
    if build != build_id():
        return None
    try:
        return dict(_unpickle(payload))
    except _UNREADABLE as error:
        raise _DamagedError(str(error)) from error


@dataclass(frozen=True)
class Segment:
    """One file of a cache.

    Attributes:
        path: the file.
        bytes: its size.
        operators: the number of operators that it has entries for.
        problem: why it is not used, or "".
        damaged: whether the file is damaged; otherwise it is of another build of torch or of this package.
    """

    path: Path
    bytes: int
    operators: int = 0
    problem: str = ""
    damaged: bool = False


def segments(directory: str | os.PathLike[str]) -> list[Segment]:
    """Return the files of a cache, each read and verified against its checksum; nothing is changed."""
    found = []
    for path in sorted(Path(directory).glob(f"*{_SUFFIX}")):
        if not path.is_file():
            found.append(Segment(path, 0, problem="it is no regular file", damaged=True))
            continue
        size = path.stat().st_size
        try:
            content = _read_segment(path)
        except (OSError, _DamagedError) as error:
            found.append(Segment(path, size, problem=str(error), damaged=True))
            continue
        if content is None:
            found.append(
                Segment(path, size, problem="it is of another build of torch, Python or this package")
            )
        else:
            found.append(Segment(path, size, operators=len({operator for _, operator in content})))
    return found


def symbolic_name(name: str) -> str:
    """Return the name under which an engine's results on symbolic sizes are stored on disk."""
    return f"{name}, symbolic"


class DiskCache:
    """Entries of one build in a directory.

    Args:
        directory: created if it does not exist.

    Raises:
        OSError: the directory cannot be created.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._warned = False
        self._pending: dict[tuple[str, str], list[bytes]] = {}
        self._load()

    def _load(self) -> None:
        read = []
        for path in self._files(_SUFFIX):
            content = self._read(path)
            if content is None:
                continue
            read.append(path)
            for owner, data in content.items():
                self._pending.setdefault(owner, []).append(data)
        if len(read) > _MERGE_ABOVE:
            with contextlib.suppress(OSError):  # a read-only directory is used as it is
                self._merge(read)
                self._remove_abandoned()

    def _remove_abandoned(self) -> None:
        """Remove unfinished files whose writers were killed."""
        for path in self._files(".tmp"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _ABANDONED_AFTER:
                    path.unlink()

    def _files(self, suffix: str) -> list[Path]:
        """Return regular files with a suffix, or links to such: opening a pipe would block."""
        files = []
        for path in sorted(self.directory.glob(f"*{suffix}")):
            if path.is_file():
                files.append(path)
            elif os.path.lexists(path):  # else another process has merged it in the meantime
                self._warn_ignored(path, "it is no regular file")
        return files

    def _read(self, path: Path) -> dict[tuple[str, str], bytes] | None:
        """Read a segment's payload; None if it is of another build, or (with a warning) unreadable."""
        try:
            return _read_segment(path)
        except FileNotFoundError:
            return None  # another process has merged it in the meantime
        except (OSError, _DamagedError) as error:
            self._warn_ignored(path, str(error))
            return None

    def _warn_ignored(self, path: Path, reason: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"fake: ignored {path.name} in the dispatch cache: {reason}. Delete it to silence this.",
                DiskCacheWarning,
                stacklevel=4,
            )

    def entries(self, engine: str, operator: str) -> Iterator[tuple[Any, Any]]:
        """Yield the keys and recipes of an operator; each is yielded only once."""
        with self._lock:
            chunks = self._pending.pop((engine, operator), ())
        for chunk in chunks:
            try:
                table = _unpickle(chunk)
            except _UNREADABLE as error:
                self._warn_ignored(self.directory, str(error))
                continue
            yield from table.items()

    def save(self, entries: dict[tuple[str, str], dict[Any, Any]]) -> Path | None:
        """Write new entries as one segment.

        Args:
            entries: ``{(engine, operator): {key: recipe}}``. Entries that cannot be pickled are left out.

        Returns:
            The file, or None if there was nothing to write.
        """
        content = {}
        for owner, table in entries.items():
            chunk = _pickle_table(table)
            if chunk is not None:
                content[owner] = chunk
        return self._write(content) if content else None

    def _write(self, content: dict[tuple[str, str], bytes]) -> Path:
        payload = pickle.dumps(content, protocol=5)
        data = MAGIC + build_id() + hashlib.sha256(payload).digest() + payload
        self.directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            final = Path(name).with_suffix(_SUFFIX)
            os.replace(name, final)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return final

    def _merge(self, paths: list[Path]) -> None:
        """Replace segments that were read by a single one with the same entries."""
        tables: dict[tuple[str, str], dict[Any, Any]] = {}
        for owner, chunks in self._pending.items():
            table = tables.setdefault(owner, {})
            for chunk in chunks:
                try:
                    add_entries(table, _unpickle(chunk))
                except _UNREADABLE as error:
                    self._warn_ignored(self.directory, str(error))
        if self.save(tables) is not None:
            for path in paths:
                path.unlink(missing_ok=True)


def add_entries(table: dict[Any, Any], more: dict[Any, Any]) -> None:
    """Merge entries; if a key has several results (a tuple of them), keep all."""
    for key, value in more.items():
        known = table.get(key)
        if isinstance(value, tuple) and isinstance(known, tuple):
            value = (*known, *(way for way in value if way not in known))
        table[key] = value


def _pickle_table(table: dict[Any, Any]) -> bytes | None:
    try:
        return pickle.dumps(table, protocol=5)
    except (TypeError, AttributeError, pickle.PicklingError):
        kept = {}
        for key, recipe in table.items():
            try:
                pickle.dumps((key, recipe), protocol=5)
            except (TypeError, AttributeError, pickle.PicklingError):
                continue  # a value bound to this process
            kept[key] = recipe
        return pickle.dumps(kept, protocol=5) if kept else None
