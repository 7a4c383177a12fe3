"""Where certificates are kept: those of the shipped rules beside them, those of a user's rules in a cache folder."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from emerge.rules.certify import Certificate
from emerge.rules.equalities import EqualityCertificate
from emerge.util.resources import resource_dir

FORMAT = "emerge.certificates/1"
_Kind = TypeVar("_Kind", Certificate, EqualityCertificate)


def shipped_path() -> Path:
    """The certificates of the shipped rules."""
    return resource_dir("rules") / "certificates.json"


def _read(path: Path | None) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads((path or shipped_path()).read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return data if data.get("format") == FORMAT else {}


def read_shipped(path: Path | None = None) -> dict[str, Certificate]:
    """Law -> certificate; empty when the file is absent or of another format."""
    return {name: Certificate(name, **entry) for name, entry in _read(path).get("laws", {}).items()}


def read_shipped_equalities(path: Path | None = None) -> dict[str, EqualityCertificate]:
    """Rule of the algebra -> certificate; empty when the file is absent or of another format."""
    return {name: EqualityCertificate(name, **entry) for name, entry in _read(path).get("equalities", {}).items()}


def read_refuted(path: Path | None = None) -> dict[str, tuple[str, str]]:
    """Law -> (hash of the text that was found false, counterexample)."""
    return {name: (entry["hash"], entry["reason"]) for name, entry in _read(path).get("refuted", {}).items()}


def write_shipped(
    certificates: dict[str, Certificate],
    refuted: dict[str, tuple[str, str]] | None = None,
    path: Path | None = None,
    equalities: dict[str, EqualityCertificate] | None = None,
) -> None:
    """Writes the certificates of the shipped rules and what was found false, sorted by name.

    Args:
        equalities: of the algebra's rules; None keeps those that are there.
    """
    kept = read_shipped_equalities(path) if equalities is None else equalities
    body = {
        "format": FORMAT,
        "laws": {n: c.as_json() for n, c in sorted(certificates.items())},
        "equalities": {n: c.as_json() for n, c in sorted(kept.items())},
        "refuted": {n: {"hash": h, "reason": r} for n, (h, r) in sorted((refuted or {}).items())},
    }
    _write(path or shipped_path(), body)


def cache_folder() -> Path:
    """Folder of certificates of users' laws: ``EMERGE_CACHE_DIR``, else the platform's cache folder."""
    if os.environ.get("EMERGE_CACHE_DIR"):
        return Path(os.environ["EMERGE_CACHE_DIR"]) / "certificates"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "emerge" / "certificates"
    base = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "emerge" / "certificates"


def read_cached(digest: str) -> Certificate | None:
    """The certificate of a user's law by its hash."""
    return _cached(digest, Certificate)


def read_cached_equality(digest: str) -> EqualityCertificate | None:
    """The certificate of a user's rule of the algebra by its hash."""
    return _cached(digest, EqualityCertificate)


def _cached(digest: str, kind: type[_Kind]) -> _Kind | None:
    try:
        data: dict[str, Any] = json.loads((cache_folder() / f"{digest}.json").read_text())
        return kind(**data)
    except (OSError, json.JSONDecodeError, TypeError):
        return None


def write_cached(certificate: Certificate | EqualityCertificate) -> None:
    """Keeps the certificate of a user's law; a folder that cannot be written is no error."""
    try:
        _write(cache_folder() / f"{certificate.hash}.json", {"law": certificate.law, **certificate.as_json()})
    except OSError:
        return


def _write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as handle:
        json.dump(data, handle, indent=1, sort_keys=True)
        handle.write("\n")
    os.chmod(handle.name, 0o644)  # temporary files are private
    os.replace(handle.name, path)
