"""Launch files for several machines; `python -m tests.chaos.slurm` runs slurm.sh under Slurm."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_scripts import ROOT, SCRIPTS

KUBERNETES = ROOT / "launch" / "kubernetes.yaml"
VERSIONS = ("1.29", "1.31", "1.33", "1.35", "1.37")


@pytest.fixture
def service() -> dict[str, Any]:
    """Return the Service of the manifest."""
    return next(document for document in yaml.safe_load_all(KUBERNETES.read_text()) if document["kind"] == "Service")


@pytest.fixture
def job() -> dict[str, Any]:
    """Return the Job of the manifest."""
    return next(document for document in yaml.safe_load_all(KUBERNETES.read_text()) if document["kind"] == "Job")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("there is no shellcheck; apt-get install shellcheck")
    found = subprocess.run(["shellcheck", "--severity=warning", script], capture_output=True, text=True)
    assert found.stdout == ""


@pytest.mark.parametrize("version", VERSIONS)
def test_manifest_is_valid_for_kubernetes(version: str) -> None:
    """This needs kubernetes-validate, which the tests do not install because it has 108 MB."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all(KUBERNETES.read_text()):
        kubernetes_validate.validate(document, version, strict=True)


def test_repeated_values_of_the_manifest_agree(service: dict[str, Any], job: dict[str, Any]) -> None:
    template = job["spec"]["template"]
    pod, container = template["spec"], template["spec"]["containers"][0]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert str(job["spec"]["parallelism"]) == str(job["spec"]["completions"]) == environment["NODES"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == environment["GPUS"]
    assert str(pod["terminationGracePeriodSeconds"]) == environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert (ROOT / container["args"][0]).is_file()


@pytest.mark.parametrize("index", [0, 1])
def test_pods_of_the_manifest_start_torchrun(job: dict[str, Any], index: int, tmp_path: Path) -> None:
    """Run command and arguments like the container, with programs that record their arguments."""
    for name, file in (("python", tmp_path / "started"), ("meshtrain", tmp_path / "checked")):
        (tmp_path / name).write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{file}"\n')
        (tmp_path / name).chmod(0o755)
    container = job["spec"]["template"]["spec"]["containers"][0]
    environment = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": str(index), "POD_IP": "10.0.0.7"}
    command = [*container["command"], *container["args"]]
    shown = subprocess.run(command, env={**environment, **given}, capture_output=True, text=True, check=True)
    assert shown.stdout == ""
    words = (tmp_path / "started").read_text().splitlines()
    assert words[:2] == ["-m", "meshtrain.runtime.launch"]
    words = words[2:]
    checked = (tmp_path / "checked").read_text().splitlines()
    assert checked == ["check", container["args"][0], "--world-size", "16", *container["args"][1:]]
    first = f"{job['metadata']['name']}-0.{job['spec']['template']['spec']['subdomain']}:29500"
    options = dict(zip(words[:16:2], words[1:16:2], strict=True))
    assert options["--rdzv-endpoint"] == first
    assert options["--rdzv-conf"].split(",")[0] == f"is_host={int(index == 0)}"
    assert (options["--nnodes"], options["--nproc-per-node"], options["--local-addr"]) == ("2", "8", "10.0.0.7")
    assert words[16:] == ["-m", "meshtrain", "train", *container["args"]]
