"""Folders of synthesised rules: a file ``synthesised.egg`` and the certificates beside it."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from emerge.algebra.rulefile import EqualityRule, egg_files, rules_of, shipped_files
from emerge.rules.certificates import read_refuted, read_shipped, read_shipped_equalities, write_cached, write_shipped
from emerge.rules.certify import Refusal
from emerge.rules.equalities import VALIDATION, EqualityCertificate, Validation, certify_rule
from emerge.synthesis.generalise import Proposal
from emerge.synthesis.terms import write
from emerge.util.errors import InputError, RuleError
from emerge.util.resources import resource_dir

#: File of a user's folder that promoted and added rules go to.
PROMOTED = "rules.egg"
FILE, CERTIFICATES = "synthesised.egg", "synthesised.json"
HEADER = """; Rules that Emerge synthesised: executed values proposed them, the certifier validated them (docs/synthesis.md).
; Keep what is of use: emerge rules promote NAME --from THIS_FILE

"""


def as_rule(proposal: Proposal) -> EqualityRule:
    """A proposal read back from the text that it has in a file.

    Raises:
        RuleError: it is no rule.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE
        path.write_text(proposal.text(), encoding="utf-8")
        (rule,) = rules_of(path)
    return rule


def validate(proposal: Proposal, seed: int = 0, how: Validation = VALIDATION) -> EqualityCertificate | Refusal:
    """Tests a proposal like a rule of a user's file."""
    try:
        return certify_rule(as_rule(proposal), seed, how)
    except RuleError as exc:
        return Refusal(proposal.name, False, exc.message)


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

    def keep(self, names: Sequence[str]) -> None:
        """Drops all rules but some."""
        if self.path.exists():
            rules = [rule for rule in rules_of(self.path) if rule.name in names]
            _replace(self.path, HEADER + "".join(map(rule_text, rules)))
            kept = {name: c for name, c in self.certificates().items() if name in names}
            _replace(self.folder / CERTIFICATES, json.dumps(kept, indent=1, sort_keys=True) + "\n")

    def copy(self, to: Store, names: Sequence[str]) -> None:
        """Adds some of the rules, with their certificates, to another folder."""
        known = self.certificates()
        for rule in rules_of(self.path) if self.path.exists() else ():
            if rule.name in names:
                to.add(rule_text(rule), EqualityCertificate(law=rule.name, **known[rule.name]))

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


def promote(name: str, source: Path, to: Path | None = None, new_name: str | None = None) -> tuple[Path, str]:
    """Copies a rule into a folder after validating it; where it went, and its evidence.

    Args:
        to: the folder, None = the shipped rules. new_name: what it is called there.
    Raises:
        RuleError: there is no such rule, it cannot be validated, or the folder has a rule of that name.
    """
    rules = {rule.name: rule for rule in rules_of(source)}
    if name not in rules:
        raise RuleError(f"there is no rule '{name}'; known are {', '.join(sorted(rules)) or 'none'}", str(source))
    rule = rules[name]
    text = rule_text(rule)
    if new_name is not None:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", new_name):
            raise RuleError(f"expected a name of small letters, digits and '-', found {new_name!r}; choose another")
        text = text.replace(f':name "{name}"', f':name "{new_name}"')
    return _keep([text], to)


def add_rules(source: Path, to: Path) -> tuple[Path, str]:
    """Copies all rules of a file into a folder after validating them; where they went, and the weakest evidence.

    Raises:
        RuleError: see :func:`promote`.
    """
    return _keep([rule_text(rule) for rule in rules_of(source)], to)


def _keep(texts: Sequence[str], to: Path | None) -> tuple[Path, str]:
    folder = resource_dir("rules") if to is None else to
    target = folder / (FILE if to is None else PROMOTED)
    taken = {r.name: r.place for path in {*shipped_files(), *egg_files([folder] if folder.exists() else [])}
             for r in rules_of(path)}  # fmt: skip
    made: list[EqualityCertificate] = []
    with tempfile.TemporaryDirectory() as private:
        path = Path(private) / FILE
        path.write_text("".join(texts), encoding="utf-8")
        for rule in rules_of(path):
            if rule.name in taken:
                raise RuleError(f"there is a rule '{rule.name}' already; give this one another name", taken[rule.name])
            found = certify_rule(rule)
            if not isinstance(found, EqualityCertificate):
                raise RuleError(f"the rule '{rule.name}' is refused: it {found.reason}")
            made.append(found)
    folder.mkdir(parents=True, exist_ok=True)
    before = target.read_text(encoding="utf-8") if target.exists() else ""
    _replace(target, before + "".join(texts))
    if to is None:
        kept = read_shipped_equalities() | {c.law: c for c in made}
        write_shipped(read_shipped(), read_refuted(), equalities=kept)
    for certificate in made:
        write_cached(certificate)
    return target, "tested" if any(c.evidence == "tested" for c in made) else "proved"


def rule_text(rule: EqualityRule) -> str:
    """A rule as it stands in a file."""
    text = rule.text
    for at in (":when", ":ruleset"):
        text = text.replace(f" {at} ", f"\n  {at} ", 1)
    left = f"(rewrite {write(rule.patterns[0][1])} " if rule.patterns else ""
    if left and text.startswith(left):
        text = f"{left.rstrip()}\n  {text[len(left):]}"
    return f"; @meaning {rule.meaning}\n{text}\n"
