"""Packages import lower layers only, and the lowest layers do not load torch."""

import subprocess
import sys
from pathlib import Path

import pytest

import meshtrain

ROOT = Path(__file__).parents[1]


def test_packages_import_lower_layers_only():
    linted = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )

    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize(
    "modules",
    [
        "meshtrain.config.plan, meshtrain.config.run, meshtrain.config.toml, meshtrain.config.schema",
        "meshtrain.console",
        "meshtrain.errors",
        "meshtrain.cli",
        "meshtrain.runtime.environment",
    ],
)
def test_lowest_layers_do_not_load_torch(modules):
    program = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()

    assert not {"torch", "transformers", "numpy"}.intersection(loaded)


def test_importing_meshtrain_loads_no_dependencies():
    program = "import sys, meshtrain; print(*sys.modules); assert callable(meshtrain.load_run)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()

    assert not {"torch", "pydantic", "rich", "typer"}.intersection(loaded)


def test_public_names_are_sorted_and_exist():
    assert meshtrain.__all__ == sorted(meshtrain.__all__)
    assert dir(meshtrain) == meshtrain.__all__
    assert all(getattr(meshtrain, name).__name__ == name for name in meshtrain.__all__)


def test_unknown_public_name_lists_the_existing_names():
    with pytest.raises(
        AttributeError, match=r"module 'meshtrain' has no attribute 'load'; it has .*load_plan, load_run"
    ):
        meshtrain.load  # noqa: B018
