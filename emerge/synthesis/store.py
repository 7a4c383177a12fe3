"""Folders of synthesised rules: a file ``synthesised.egg`` and the certificates beside it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from emerge.algebra.rulefile import EqualityRule, rules_of
from emerge.rules.certificates import write_cached
from emerge.rules.certify import Refusal
from emerge.rules.equalities import EqualityCertificate, certify_rule
from emerge.synthesis.generalise import Proposal
from emerge.util.errors import InputError, RuleError

FILE, CERTIFICATES = "synthesised.egg", "synthesised.json"
HEADER = """; Rules that Emerge synthesised: executed values proposed them, the certifier validated them (docs/synthesis.md).
; Keep what is of use: emerge rules promote NAME --from THIS_FILE

"""


def validate(proposal: Proposal, seed: int = 0) -> EqualityCertificate | Refusal:
    """Tests a proposal like a rule of a user's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE
        path.write_text(proposal.text(), encoding="utf-8")
        try:
            (rule,) = rules_of(path)
        except RuleError as exc:
            return Refusal(proposal.name, False, exc.message)
    return certify_rule(rule, seed)


class Store:
    """One folder of synthesised rules."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE

    def add(self, text: str, certificate: EqualityCertificate) -> None:
        """Appends a rule with its certificate, unless it is there already.

        Raises:
            InputError: the folder cannot be written.
        """
        write_cached(certificate)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder):
                if certificate.law in self.names():
                    return
                before = self.path.read_text(encoding="utf-8") if self.path.exists() else HEADER
                _replace(self.path, before + text)
                kept = self.certificates() | {certificate.law: certificate.as_json()}
                _replace(self.folder / CERTIFICATES, json.dumps(kept, indent=1, sort_keys=True) + "\n")
        except OSError as exc:
            message = f"the synthesised rules cannot be written ({exc}); choose another folder"
            raise InputError(message, str(self.folder)) from None

    def certificates(self) -> dict[str, Any]:
        """What stands in the file of certificates, by rule."""
        try:
            return dict(json.loads((self.folder / CERTIFICATES).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def names(self) -> set[str]:
        """Names of the rules in the folder."""
        return {rule.name for rule in rules_of(self.path)} if self.path.exists() else set()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time, where the platform has file locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(folder / ".lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".tmp")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def rule_text(rule: EqualityRule) -> str:
    """A rule as it stands in a file."""
    return f"; @meaning {rule.meaning}\n{rule.text}\n"
