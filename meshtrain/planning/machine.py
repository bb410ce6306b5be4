"""The accelerator that a plan is sized for: a shipped one, one of a file, or this machine's CPU."""

import os
from dataclasses import dataclass
from pathlib import Path

from meshtrain.config.machine import MachineConfig
from meshtrain.config.plan import EIGHT_BITS
from meshtrain.config.problems import did_you_mean
from meshtrain.config.toml import load_machine
from meshtrain.errors import ConfigError

CPU = "cpu"
NO_MACHINE = "none"
"""Value of the key `machine` of a run for which nothing is predicted."""
GIB = 2**30
# Sizes that the allocators of torch round up to, in bytes.
CUDA_GRANULARITY, CPU_GRANULARITY = 512, 64


@dataclass(frozen=True)
class Machine:
    """The memory of one process.

    Attributes:
        name: as it was asked for.
        config: its description.
        granularity: of the allocator in bytes.
        is_cpu: whether it is a CPU, whose memory is host memory anyway.
    """

    name: str
    config: MachineConfig
    granularity: int
    is_cpu: bool

    @property
    def shown_name(self) -> str:
        """The name as it is shown: of a file without its folder."""
        return Path(self.name).name

    @property
    def memory_bytes(self) -> int:
        """The memory of one process, without what is in use besides tensors."""
        return int((self.config.memory_gib - self.config.reserved_gib) * GIB)

    def estimates(self) -> list[str]:
        """Return the names of the constants that it has, and that were not measured."""
        constants = self.config.model_dump()
        empty = [f"speed.{name}" for name, value in (constants["speed"] or {}).items() if value == {}]
        return [name for name in self.config.not_measured() if name not in empty]

    def check_number_format(self, products: str) -> None:
        """Check that the machine multiplies in a number format.

        Args:
            products: number format of the products of linear layers.

        Raises:
            ConfigError: if it is a GPU with known rates, but without one for a format of 8 bits.
        """
        speed = self.config.speed
        if products not in EIGHT_BITS or self.is_cpu or speed is None or products in speed.peak_tflops:
            return
        setting, instead = EIGHT_BITS[products]
        raise ConfigError(
            f"{setting}: {self.shown_name} has no rate for {products} (speed.peak_tflops)",
            f"{instead}, or take another machine",
        )

    def with_fragmentation(self, peak_bytes: int) -> int:
        """Return what the allocator holds at a peak."""
        return int(peak_bytes * (1 + self.config.fragmentation))

    def has_measured_rates(self, world_size: int) -> bool:
        """Return whether all rates that a run needs were measured; without rates, the memory.

        Args:
            world_size: number of its processes.
        """
        speed, assumed = self.config.speed, self.config.not_measured()
        if speed is None:
            return not assumed
        not_needed = {"speed.between_hosts"} if world_size <= speed.processes_per_host else set()
        not_needed |= {"speed.within_host"} if world_size == 1 else set()
        return not any(name.startswith("speed.") for name in assumed if name not in not_needed)


def find_machine(name: str, world_size: int, *, setting: str = "--gpu ") -> Machine:
    """Return the machine of a name.

    Args:
        name: of a shipped description, a path to a .toml file, or `cpu`.
        world_size: number of processes, which share the memory of a CPU.
        setting: what precedes the name in the message that there is no such description.

    Raises:
        ConfigError: if there is none, or its file is wrong.
    """
    if name == CPU:
        return _this_cpu(world_size)
    if name.endswith(".toml"):
        return _of_file(name)
    shipped = shipped_machines()
    if name not in shipped:
        options = [*shipped, CPU]
        raise ConfigError(
            f"{setting}{name}: there is no such description",
            did_you_mean(name, options, "take a .toml file, or one of"),
        )
    return Machine(name, load_machine(shipped[name]), CUDA_GRANULARITY, is_cpu=False)


def check_machine(name: str | None) -> None:
    """Check that there is a machine of the name that the key `machine` of a run has.

    Raises:
        ConfigError: if there is none, or its file is wrong.
    """
    if name not in (None, NO_MACHINE):
        find_machine(name, 1, setting="machine = ")


def machine_of_device(device_name: str) -> str | None:
    """Return the name of the shipped description of a GPU; None if it is not exactly one.

    Args:
        device_name: as torch.cuda.get_device_name reports it.
    """
    found = [name for name, file in shipped_machines().items() if device_name in load_machine(file).device_names]
    return found[0] if len(found) == 1 else None


def shipped_machines() -> dict[str, Path]:
    """Return name -> file of each description that comes with meshtrain."""
    return {file.stem: file for file in sorted((Path(__file__).parent / "machines").glob("*.toml"))}


def _of_file(path: str) -> Machine:
    config = load_machine(path)
    is_cpu = config.speed is not None and not config.speed.is_asynchronous
    return Machine(path, config, CPU_GRANULARITY if is_cpu else CUDA_GRANULARITY, is_cpu=is_cpu)


def _this_cpu(world_size: int) -> Machine:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    config = MachineConfig(
        memory_gib=total / world_size,
        reserved_gib=0.0,
        fragmentation=0.0,
        source="this machine",
        measured=["memory_gib", "reserved_gib", "fragmentation"],
    )
    return Machine(CPU, config, CPU_GRANULARITY, is_cpu=True)
