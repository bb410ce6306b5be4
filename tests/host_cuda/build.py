"""Build the CUDA device on the host, and say how a process is started that has it."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
SITE = Path(__file__).with_name("site")
LIBRARY = "HOST_CUDA_LIBRARY"
"""Environment variable with the library that every Python process loads at its start."""
DEVICES = "HOST_CUDA_DEVICES"
CAPABILITY = "HOST_CUDA_CAPABILITY"
"""Environment variable with the compute capability of the devices; 9.0 without it."""
"""Environment variable with the number of devices."""
COMPILER = os.environ.get("CXX", "g++")


def why_not() -> str | None:
    """Return why there can be no CUDA device on the host; None if there can be one."""
    if sys.platform != "linux":
        return "its library is built for Linux"
    if "+cpu" not in version("torch") and importlib.util.find_spec("nvidia") is not None:
        return "torch has CUDA of its own; install the CPU build of torch to run this without a GPU"
    if shutil.which(COMPILER) is None:
        return f"there is no C++ compiler ({COMPILER}); apt-get install g++, or set CXX"
    return None


def torch_folder() -> Path:
    """Return where torch is installed, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def build() -> Path:
    """Compile the library, unless the same one was compiled before, and return its path.

    Raises:
        RuntimeError: with the first error of the compiler.
    """
    torch = torch_folder()
    key = hashlib.sha256(f"{version('torch')} {COMPILER}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "meshtrain-tests")
    library = folder / f"host-cuda-{key}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    # Written beside and renamed, because several processes may build at once.
    unfinished = library.with_suffix(f".{os.getpid()}")
    includes = (torch / "include", torch / "include/torch/csrc/api/include")
    command = [COMPILER, "-O1", "-shared", "-fPIC", "-std=c++20", "-w", *(f"-I{path}" for path in includes)]
    command += [str(SOURCE), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise RuntimeError(f"{SOURCE.name} does not compile with torch {version('torch')}: {' '.join(errors[:1])}")
    unfinished.replace(library)
    return library


def environment(devices: int = 8) -> dict[str, str]:
    """Return the environment of a process in which `torch.cuda.is_available()` is true.

    Its child processes inherit the environment, so they have the device too.
    """
    root = Path(__file__).parents[2]
    paths = [str(SITE), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        LIBRARY: str(build()),
        DEVICES: str(devices),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
