"""Python runs this at its start, before a program can import torch."""

import os
import traceback

from tests.host_cuda.load import load

try:
    load()
except BaseException:  # noqa: BLE001 - Python would go on without the device, and report only the last line
    traceback.print_exc()
    os._exit(70)
