"""What is known of this machine before a process group is joined."""

import pytest
import torch

from meshtrain.errors import ConfigError
from meshtrain.runtime.process import check_devices


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    check_devices()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    check_devices()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError) as caught:
        check_devices()
    assert caught.value.problems == (
        "3 processes are started on this machine, which has 2 GPUs; start as many, or set CUDA_VISIBLE_DEVICES= "
        "(empty) to train on the CPU",
    )
