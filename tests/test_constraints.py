"""constraints.txt pins every package of an installation to the tested version."""

import re
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
PINNED = {canonicalize_name(line.partition("==")[0]) for line in LINES}


def needed(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> set[str]:
    """Return the names of all packages that a package needs, directly or indirectly."""
    if (name, extras) in seen:
        return set()
    seen.add((name, extras))
    names = {name}
    for text in requires(name) or ():
        requirement = Requirement(text)
        if any(requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            names |= needed(canonicalize_name(requirement.name), frozenset(requirement.extras), seen)
    return names


def test_constraints_are_versions_only():
    assert [line for line in LINES if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9.a-z]*", line)] == []


def test_every_package_is_pinned():
    assert needed("meshtrain", frozenset({"test"}), set()) - {"meshtrain"} - PINNED == set()


def test_build_requirements_are_pinned():
    assert "editables" in PINNED
    pytest.importorskip("hatchling", reason="pip built meshtrain in an environment of its own")
    assert needed("hatchling", frozenset(), set()) - PINNED == set()
