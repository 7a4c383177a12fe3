"""Folders of synthesised rules: a file ``synthesised.egg`` and the certificates beside it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from emerge.algebra.rulefile import EqualityRule, rules_of
from emerge.rules.certificates import write_cached
from emerge.rules.certify import Refusal
from emerge.rules.equalities import EqualityCertificate, certify_rule
from emerge.synthesis.generalise import Proposal
from emerge.util.errors import RuleError

FILE, CERTIFICATES = "synthesised.egg", "synthesised.json"
HEADER = """; Rules that Emerge synthesised: executed values proposed them, and the certifier validated them (docs/synthesis.md).
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
        """Appends a rule with its certificate."""
        self.folder.mkdir(parents=True, exist_ok=True)
        before = self.path.read_text(encoding="utf-8") if self.path.exists() else HEADER
        self.path.write_text(before + text, encoding="utf-8")
        kept = self.certificates()
        kept[certificate.law] = certificate.as_json()
        beside = self.folder / CERTIFICATES
        beside.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        write_cached(certificate)

    def certificates(self) -> dict[str, Any]:
        """What stands in the file of certificates, by rule."""
        try:
            return dict(json.loads((self.folder / CERTIFICATES).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def names(self) -> set[str]:
        """Names of the rules in the folder."""
        return {rule.name for rule in rules_of(self.path)} if self.path.exists() else set()


def rule_text(rule: EqualityRule) -> str:
    """A rule as it stands in a file."""
    return f"; @meaning {rule.meaning}\n{rule.text}\n"
