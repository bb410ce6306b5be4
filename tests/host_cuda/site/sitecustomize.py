"""Python runs this at its start, before a program can import torch."""

import os
import traceback

from tests.host_cuda.load import load
from tests.host_cuda.reached import REACHED, note_places

try:
    load()
    if REACHED in os.environ:
        note_places()
except BaseException:  # noqa: BLE001 - Python would go on without the device, and report only the last line
    traceback.print_exc()
    os._exit(70)
