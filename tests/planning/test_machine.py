"""Descriptions of machines: which GPU they are for, and what of them was measured."""

from pathlib import Path

import pytest

from meshtrain.errors import ConfigError
from meshtrain.planning.machine import CPU_GRANULARITY, find_machine, machine_of_device, shipped_machines
from tests.profiling.test_prediction import SPEED, machine_file


@pytest.mark.parametrize(
    ("found", "changed", "message"),
    [
        (
            "memory_gib",
            'measured = ["speed.peak_flops"]\nmemory_gib',
            "'speed.peak_flops' is not a constant of the file",
        ),
        ("[speed]", '[sources]\npeak_tflops = "x"\n[speed]', "'peak_tflops' is not a constant of the file"),
        ("[[1e6, 10]]", "[[1e6, 10], [1e5, 20]]", "expected ascending sizes, found 100000 after 1e+06"),
        ("[[1e6, 10]]", "[]", "expected a list of one or more pairs of numbers above 0, found []"),
        ("[[1e6, 10]]", "[[1e6, -10]]", "pairs of numbers above 0, found [[1000000.0, -10]]"),
        ("gb_per_second = 1,", "gb_per_second = -1,", "speed.within_host.gb_per_second"),
        ("operator_seconds = 1.0\n", "", "speed.operator_seconds: missing"),
        (
            "hook_seconds = 0.0\n",
            "",
            "speed.hook_seconds: missing; expected a number from 0 to 1; measure it: meshtrain calibrate FILE",
        ),
    ],
)
def test_description_with_a_mistake_is_refused(found: str, changed: str, message: str, tmp_path: Path) -> None:
    path = Path(machine_file(tmp_path))
    path.write_text(path.read_text().replace(found, changed, 1))
    with pytest.raises(ConfigError) as error:
        find_machine(str(path), 2)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA B200", "b200-192gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("", None),
    ],
)
def test_device_has_a_shipped_description(device: str, name: str | None) -> None:
    assert machine_of_device(device) == name


def test_every_shipped_description_has_devices_of_its_own() -> None:
    names = [device for name in shipped_machines() for device in find_machine(name, 1).config.device_names]
    assert len(names) == len({*names}) >= len(shipped_machines())


@pytest.mark.parametrize(
    ("name", "products", "message"),
    [
        (
            "a100-80gb",
            "float8",
            "plan.precision.compute = 'float8': a100-80gb has no rate for float8 (speed.peak_tflops); compute in "
            "bfloat16, or take another machine",
        ),
        (
            "h100-80gb",
            "mxfp8",
            "plan.precision.float8.recipe = 'mxfp8': h100-80gb has no rate for mxfp8 (speed.peak_tflops); take the "
            "recipe 'rowwise', or take another machine",
        ),
    ],
)
def test_machine_without_a_rate_for_a_format_is_refused(name: str, products: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_machine(name, 1).check_number_format(products)
    assert caught.value.lines == (message,)
    for other in ("cpu", "b200-192gb"):
        find_machine(other, 1).check_number_format(products)


def test_synchronous_machine_is_a_cpu(tmp_path: Path) -> None:
    cpu = find_machine(machine_file(tmp_path), 2)
    assert (cpu.is_cpu, cpu.granularity) == (True, CPU_GRANULARITY)
    assert cpu.shown_name == "machine.toml"
    for speed in ("", SPEED.replace("is_asynchronous = false", "is_asynchronous = true")):
        assert not find_machine(machine_file(tmp_path, speed=speed), 2).is_cpu


def test_rates_that_a_run_does_not_need_may_be_assumed(tmp_path: Path) -> None:
    path = Path(machine_file(tmp_path))
    machine = find_machine(str(path), 1)
    links = ("speed.within_host", "speed.between_hosts")
    rates = [name for name in machine.config.constants() if name.startswith("speed.") and name not in links]
    path.write_text(f"measured = {rates}\n{path.read_text()}")
    found = find_machine(str(path), 1)
    assert [found.has_measured_rates(number) for number in (1, 2, 3)] == [True, False, False]
    path.write_text(path.read_text().replace("measured = [", f"measured = [{links[0]!r}, "))
    found = find_machine(str(path), 1)
    assert [found.has_measured_rates(number) for number in (1, 2, 3)] == [True, True, False]
    assert not machine.has_measured_rates(1)
    assert find_machine("cpu", 1).has_measured_rates(4)
