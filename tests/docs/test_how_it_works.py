"""The page "How it works" has the packages, and the layers that import-linter enforces."""

import re
import tomllib

from tests.docs.blocks import ROOT, blocks

MAP, CHAIN = (block.text for block in blocks("text") if block.location.startswith("docs/how-it-works.md"))


def test_the_map_names_every_package() -> None:
    found = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in (ROOT / "meshtrain").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    inside = re.findall(r"^  (\S.*?)(?:   .*)?$", MAP.partition("parallel_plans/")[0], re.MULTILINE)
    named = {name for line in inside for name in re.findall(r"\w+(?:/|\.py)(?= |$)", line)}
    assert named == found - {"__init__.py", "__main__.py"}


def test_the_chain_is_the_contract_of_import_linter() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert CHAIN.strip().split("  >  ") == layers
