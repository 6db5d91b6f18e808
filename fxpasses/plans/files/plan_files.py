"""Plan files: hashed sections, written atomically, in a folder that only its owner can write to.

A file is a line that names the format, a line of JSON that lists the sections, and the sections. Nothing in a
file is used before all its hashes are verified. There is no pickle: code is in Python's own format for code
objects (``marshal``), kernels are shared libraries. Hashes detect damage, not malice: the same user wrote
what is read here.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxpasses.plans.errors import PlanFileError

_FORMAT = b"fxpasses plan 1\n"
SUFFIX = ".plan"
_LAST_PREFIX = "without-backward-"
"""Prefix of plans that are tried after all others. It sorts behind the hex digits of hashes."""
_MAX_CANDIDATES = 8
"""The most plans that are tried for one key."""


class OnlyResults(str):
    """The option ``cache`` of a compilation whose caller looks for plans and writes them. Only other results
    are cached there.

    Attributes:
        turn: Dynamo does not reuse for this compilation what it compiled with another one.
    """

    turn = 0

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True and self.turn == getattr(other, "turn", 0)

    __hash__ = str.__hash__


def cache_directory(choice: str) -> Path | None:
    """The folder of plans for ``cache="auto"``, ``"off"`` or a folder. None if plans are disabled."""
    if choice == "off":
        return None
    if choice != "auto":
        return Path(choice)
    given, beside = os.environ.get("FXPASSES_CACHE_DIR"), os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if given == "off" or (not given and os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") == "1"):
        return None
    if given or beside:
        return Path(given) if given else Path(str(beside)) / "fxpasses"
    return Path(tempfile.gettempdir()) / f"fxpasses_{os.getuid()}"


def hash_of(data: bytes) -> str:
    """A short hash."""
    return hashlib.sha256(data).hexdigest()[:16]


def are_unchanged(files: Mapping[str, str]) -> bool:
    """Whether files are unchanged. ``files`` maps each path to the hash of its content."""
    try:
        return all(hash_of(Path(file).read_bytes()) == known for file, known in files.items())
    except OSError:
        return False


def write_sections(path: Path, sections: Mapping[str, bytes]) -> None:
    """Write a file atomically.

    Raises:
        OSError: it cannot be written.
    """
    listed = [[name, len(data), hashlib.sha256(data).hexdigest()] for name, data in sections.items()]
    header = json.dumps(listed).encode()
    head = _FORMAT + hashlib.sha256(header).hexdigest().encode() + b"\n" + header + b"\n"
    write_atomically(path, head + b"".join(sections.values()))


def write_plan(
    folder: Path, plan: Mapping[str, Any], story: object, sections: Mapping[str, bytes], *, last: bool = False
) -> Path:
    """Write a plan under a name that is the hash of its content; returns the path.

    Args:
        folder: of its key.
        plan: what decides whether it is used, and how its graph is called.
        story: the walked facts, for errors that name what has changed.
        sections: the rest of the file.
        last: whether it is tried after all others of its key.

    Raises:
        OSError: it cannot be written.
    """
    encoded = json.dumps(plan).encode(), zlib.compress(json.dumps(story).encode(), 1)
    every = {"plan": encoded[0], "story": encoded[1], **sections}
    digest = hashlib.sha256("".join(map(hash_of, every.values())).encode()).hexdigest()[:32]
    path = folder / f"{_LAST_PREFIX * last}{digest}{SUFFIX}"
    write_sections(path, every)
    return path


def comes_last(path: Path) -> bool:
    """Whether a plan is tried after all others of its key, because it has no backward pass."""
    return path.name.startswith(_LAST_PREFIX)


def write_refusal(folder: Path, reason: str, about: Mapping[str, Any]) -> None:
    """Record why there can be no plan. Later processes need not record, and may use AOTAutograd's cache.

    Args:
        folder: of the key.
        reason: why.
        about: the key's factors.

    Raises:
        OSError: it cannot be written.
    """
    plan = {"refused": reason, "reads": [], "read": "", "functions": [], "about": about}
    write_sections(folder / "reason.none", {"plan": json.dumps(plan).encode()})


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file of ours atomically, and create its folders."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_sections(path: Path) -> dict[str, bytes]:
    """Read a file and verify all of it.

    Raises:
        PlanFileError: it is incomplete, has been changed, or somebody else may write to it.
        OSError: it cannot be read.
    """
    check_owner(path)
    data = path.read_bytes()
    if not data.startswith(_FORMAT):
        raise PlanFileError(path, "it is no file of plans of this version")
    digest, _, rest = data.removeprefix(_FORMAT).partition(b"\n")
    header, _, body = rest.partition(b"\n")
    if hashlib.sha256(header).hexdigest().encode() != digest:
        raise PlanFileError(path, "its list of sections is damaged")
    sections, start = {}, 0
    for name, length, expected in json.loads(header):
        content = body[start : start + length]
        if len(content) != length or hashlib.sha256(content).hexdigest() != expected:
            raise PlanFileError(path, f"its section {name!r} is damaged")
        sections[name], start = content, start + length
    if start != len(body):
        raise PlanFileError(path, "there is something behind its last section")
    return sections


def check_owner(path: Path) -> None:
    """Raise PlanFileError if others may write to a file or its folder, or if it is a pipe or a device."""
    if not path.is_file():
        path.stat()  # raises if nothing is there
        raise PlanFileError(path, "it is no regular file")
    for place in (path, path.parent):
        found = place.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PlanFileError(path, f"others than you may write to {place}", is_untrusted=True)


def write_kernel(directory: Path, data: bytes) -> Path:
    """The file of a shared library, named by its hash. Written if it is missing or wrong."""
    path = directory / "kernels" / f"{hashlib.sha256(data).hexdigest()}.so"
    if path.exists():
        check_owner(path)
    if not path.exists() or path.read_bytes() != data:
        write_atomically(path, data)
    return path


def candidates(folder: Path) -> list[Path]:
    """The plans of a key, which differ in what is read besides the model, or else why there are none."""
    return (
        sorted(folder.glob(f"*{SUFFIX}"))[:_MAX_CANDIDATES] or sorted(folder.glob("*.none"))[:_MAX_CANDIDATES]
    )
