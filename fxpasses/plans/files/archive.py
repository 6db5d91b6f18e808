"""Portable files of plans: a zip with a readable manifest. Nothing in it is used before all of it has been
checked.

The manifest lists the length and hash of each member and has a hash of its own. A signature signs the
manifest, and so everything. There is no pickle, and this file does not need torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake.error_text import describe_error
from fxpasses.plans.errors import PlanFileError
from fxpasses.plans.files.plan_files import write_atomically

FORMAT = 1
_MANIFEST, _HASH, _SIGNATURE = "manifest.json", "manifest.sha256", "manifest.ed25519"
_MAX_MANIFEST_BYTES = 1 << 26
_REQUIRED_SECTIONS = {"plan", "story"}
"""The sections that every plan has."""
_DAMAGE_ERRORS = (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError, ValueError,
           OverflowError, TypeError, AttributeError)  # fmt: skip
"""What reading a damaged zip or manifest may raise."""


@dataclass(frozen=True)
class Archive:
    """A file that was read and whose hashes hold.

    Attributes:
        path: the file.
        manifest: what it says about its plans.
        plans: the sections of each of its plans.
        signed: whether it has a signature, checked or not.
    """

    path: Path
    manifest: dict[str, Any]
    plans: list[dict[str, bytes]]
    signed: bool


def write_archive(
    path: Path, manifest: dict[str, Any], plans: Sequence[Mapping[str, bytes]], private_key: object = None
) -> None:
    """Write a file atomically.

    Args:
        path: the file.
        manifest: has an entry in ``plans`` for each plan. The members and the format are added.
        plans: the sections of each.
        private_key: a file with an Ed25519 key in PEM, or its bytes, to sign with.

    Raises:
        OSError: the file cannot be written.
        PlanFileError: the key cannot be used.
    """
    members: dict[str, bytes] = {}
    listed = []
    for number, (entry, sections) in enumerate(zip(manifest["plans"], plans, strict=True)):
        names = {}
        for name, data in sections.items():
            kernel = name.startswith("kernel ")  # plans share these
            names[name] = (
                f"kernels/{hashlib.sha256(data).hexdigest()[:32]}.so" if kernel else f"plans/{number}/{name}"
            )
            members[names[name]] = data
        listed.append({**entry, "sections": names})
    files = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in members.items()
    }
    text = json.dumps({"format": FORMAT, **manifest, "plans": listed, "files": files}, indent=1).encode()
    own = {_MANIFEST: text, _HASH: hashlib.sha256(text).hexdigest().encode()}
    if private_key is not None:
        own[_SIGNATURE] = _load_key(path, private_key, private=True).sign(text)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in (own | members).items():
            member = zipfile.ZipInfo(name)  # no timestamp, so that equal plans are equal files
            member.external_attr = 0o600 << 16
            archive.writestr(member, data, zipfile.ZIP_DEFLATED if name == _MANIFEST else zipfile.ZIP_STORED)
    write_atomically(path, buffer.getvalue())


def read_archive(path: Path, public_key: object = None) -> Archive:
    """Read a file and check all of it. Nothing in it is run.

    Args:
        path: the file.
        public_key: a file with an Ed25519 key in PEM, or its bytes. The signature is checked before the
            manifest is used.

    Raises:
        PlanFileError: it is incomplete, has been changed, or the signature does not match.
        OSError: it cannot be read.
    """
    key = None if public_key is None else _load_key(path, public_key, private=False)
    data = path.read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _read(path, archive, key)
    except _DAMAGE_ERRORS as error:
        raise PlanFileError(path, f"it is damaged, or no file of plans ({describe_error(error)})") from None


def _read(path: Path, archive: zipfile.ZipFile, key: Any) -> Archive:
    infos = archive.infolist()
    if len({info.filename for info in infos}) != len(infos):
        raise PlanFileError(path, "it has two members of one name")
    if _MANIFEST not in archive.namelist():
        raise PlanFileError(path, f"it has no {_MANIFEST}")
    text = _read_member(path, archive, _MANIFEST, None)
    signed = _SIGNATURE in archive.namelist()
    if key is not None:
        if not signed:
            raise PlanFileError(path, "it is not signed")
        _verify_signature(path, key, _read_member(path, archive, _SIGNATURE, 64), text)
    if _read_member(path, archive, _HASH, 64) != hashlib.sha256(text).hexdigest().encode():
        raise PlanFileError(path, "its manifest is damaged")
    manifest = json.loads(text)
    if manifest["format"] != FORMAT:
        raise PlanFileError(path, f"it has format {manifest['format']}, this version reads {FORMAT}")
    files = manifest["files"]
    if {info.filename for info in infos} - {_MANIFEST, _HASH, _SIGNATURE} != set(files):
        raise PlanFileError(path, "its members are not those that the manifest lists")
    members = {}
    for name, facts in files.items():
        members[name] = _read_member(path, archive, name, facts["bytes"])
        if hashlib.sha256(members[name]).hexdigest() != facts["sha256"]:
            raise PlanFileError(path, f"its member {name!r} is damaged")
    plans = [
        {name: members[member] for name, member in plan["sections"].items()} for plan in manifest["plans"]
    ]
    if not plans or not all(sections.keys() >= _REQUIRED_SECTIONS for sections in plans):
        raise PlanFileError(path, "it has no plan, or one of which a part is missing")
    return Archive(path, manifest, plans, signed)


def _read_member(path: Path, archive: zipfile.ZipFile, name: str, length: int | None) -> bytes:
    """The content of a member. No more than its length is unpacked."""
    most = _MAX_MANIFEST_BYTES if length is None else length
    with archive.open(name) as file:
        data = file.read(most + 1)
    if len(data) > most or (length is not None and len(data) != length):
        raise PlanFileError(path, f"its member {name!r} does not have its length")
    return data


def _load_key(path: Path, given: object, *, private: bool) -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise PlanFileError(
            path, "signatures need the package 'cryptography' (pip install 'fxpasses[sign]')"
        ) from None
    if isinstance(given, bytes):
        data = given
    elif isinstance(given, (str, Path)):
        data = Path(given).read_bytes()
    else:
        raise PlanFileError(path, f"a key is a file or bytes in PEM, not {type(given).__name__}")
    try:
        key: Any
        if private:
            key = serialization.load_pem_private_key(data, password=None)
        else:
            key = serialization.load_pem_public_key(data)
    except (ValueError, TypeError) as error:
        raise PlanFileError(
            path, f"the {'private' if private else 'public'} key cannot be read: {error}"
        ) from None
    if not isinstance(key, ed25519.Ed25519PrivateKey if private else ed25519.Ed25519PublicKey):
        raise PlanFileError(path, f"the key is no Ed25519 key but {type(key).__name__}")
    return key


def _verify_signature(path: Path, key: Any, signature: bytes, text: bytes) -> None:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, text)
    except InvalidSignature:
        raise PlanFileError(path, "its signature does not fit this public key") from None
