"""Programs whose tensors are on CUDA devices: python -m tests.host_cuda.programs NAME FOLDER.

Each prints one line of JSON with what it has found.
"""

import atexit
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import meshtrain
from meshtrain.api.handle import find_handle
from meshtrain.compat.distributed import flight_records
from meshtrain.config.run import RunConfig
from meshtrain.errors import ConfigError
from meshtrain.models.weights.block_reader import BlockReader
from meshtrain.parallel.documents import attention
from meshtrain.parallel.randomness import get_random_states, set_random_states
from meshtrain.planning.calibration import command, messages, operators, overhead
from meshtrain.runtime.environment import rank_from_environment
from meshtrain.training.step import mark
from tests.parallel.test_document_segments import (
    SEQ,
    WHOLE,
    alone,
    by_lengths,
    largest_error,
    mask_of,
    tensors,
    with_gradients,
)

TINY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def own_loop(folder: Path) -> dict[str, Any]:
    """Train with the Python API, a stock optimizer and dropout; save, load, generate."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **TINY, attention_dropout=0.1)
    model = meshtrain.parallelize(AutoModelForCausalLM.from_config(config), {"recompute": {"mode": "full"}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    meshtrain.rebind(optimizer)
    ids = torch.arange(64).view(2, 32).to(model.device)
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(folder / "saved")
    model.eval()
    written = model.generate(ids[:, :4], max_new_tokens=4, do_sample=False)
    again = meshtrain.parallelize(AutoModelForCausalLM.from_pretrained(folder / "saved"), {}).eval()
    with torch.no_grad():
        difference = (again(input_ids=ids).logits - model(input_ids=ids).logits).abs().max().item()
    state = get_random_states()
    drawn = torch.rand(4, device="cuda")
    set_random_states(state)
    pipeline = meshtrain.api.handle.pipeline_of(model)
    handle = find_handle(pipeline)
    assert handle is not None
    return {
        "losses": losses,
        "device": str(next(model.parameters()).device),
        "device_of_pipeline": str(handle.device),
        "foreach": [group["foreach"] for group in optimizer.param_groups],
        "written": str(written.device),
        "difference": difference,
        "draws_again": torch.equal(drawn, torch.rand(4, device="cuda")),
        "records": len(flight_records()) > 0,
    }


def loaded_by_blocks(folder: Path) -> dict[str, Any]:
    """Load weights into a run's parameters on the device, through page-locked memory."""
    pinned = []
    read = BlockReader._read_bytes

    def noting(self: BlockReader, tensor: Any, start: int, target: torch.Tensor) -> None:
        pinned.append(target.is_pinned())
        read(self, tensor, start, target)

    BlockReader._read_bytes = noting  # type: ignore[method-assign]
    stock = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY))
    stock.save_pretrained(folder / "stock")
    model = meshtrain.parallelize(meshtrain.build_model(folder / "stock"), {})
    meshtrain.load_weights(model, folder / "stock")
    loaded, saved = model.state_dict(), stock.state_dict()
    same = [torch.equal(loaded[name].cpu(), value) for name, value in saved.items()]
    return {"pinned": all(pinned) and bool(pinned), "same": all(same)}


def own_group(folder: Path) -> dict[str, Any]:
    """Join a process group of its own: first one with NCCL alone, then one with gloo too."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY))
    found: dict[str, Any] = {}
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            found[backend] = str(meshtrain.parallelize(model, {}).device)
        except ConfigError as error:
            found[backend] = str(error)
        dist.destroy_process_group()
    return found


def marks(folder: Path) -> dict[str, Any]:
    """Measure the time between two points in the queue of the device."""
    first = mark(torch.device("cuda"))
    torch.ones(500, 500, device="cuda") @ torch.ones(500, 500, device="cuda")
    second = mark(torch.device("cuda"))
    return {"seconds": first.seconds_until(second), "host": second.host_seconds - first.host_seconds}


def calibrated(folder: Path) -> dict[str, Any]:
    """Measure two devices at a few sizes, without the kernels of attention that a CPU lacks."""
    command._WIDTHS["cuda"], command._LENGTHS["cuda"] = (32, 64), (16, 32)
    messages.SECONDS, operators.SECONDS, operators.ROUNDS, overhead.STEPS = 0.001, 0.001, 1, 2
    messages.SIZES, operators.COLD_BYTES = (2**10, 2**12, 2**14), 2**12
    record = command.record_calls
    command.record_calls = (
        lambda runs: [  # type: ignore[assignment]
            call for call in record(runs[:2]) if "attention" not in call.operator
        ]
    )
    config = RunConfig.model_validate(
        {
            "run_directory": str(folder / "calibration"),
            "steps": 1,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "model": {"type": "llama", "config": TINY},
            "data": {"sequence_length": 16, "tokenizer": {"vocab_size": 300}},
            "optimizer": {"learning_rate": 1e-3},
        }
    )
    command.calibrate(folder / "machine.toml", config)
    return {"text": (folder / "machine.toml").read_text()}


def mixed(folder: Path) -> dict[str, Any]:
    """Do what must fail: mix tensors of two devices, and use a generator of the wrong one."""
    here, there = torch.ones(3, device="cuda"), torch.ones(3)
    attempts: dict[str, Callable[[], Any]] = {
        "sum": lambda: here + there,
        "in place": lambda: there.add_(here),
        "embedding": lambda: torch.nn.functional.embedding(there.long(), here[:, None]),
        "list": lambda: torch.cat([here, there]),
        "foreach": lambda: torch._foreach_add_([here], [there]),
        "generator": lambda: torch.rand(3, device="cuda", generator=torch.Generator()),
        "numpy": lambda: np.asarray(here),
        "device": lambda: torch.cuda.set_device(99),
        "event": lambda: torch.cuda.Event().elapsed_time(torch.cuda.Event()),
        "argument": lambda: torch.cuda.max_memory_allocated(devise=0),  # type: ignore[call-arg]
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except (RuntimeError, TypeError) as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            found[name] = "nothing was raised"
    return found


def memory(folder: Path) -> dict[str, Any]:
    """Count memory of the device."""
    torch.zeros(1, device="cuda")
    before = torch.cuda.memory_allocated()
    kept = torch.ones(1000, device="cuda")
    torch.ones(3000, device="cuda")
    view = kept[10:]
    del kept
    found = {
        "now": torch.cuda.memory_allocated() - before,
        "peak": torch.cuda.max_memory_allocated() - before,
        "pinned": [torch.ones(3).pin_memory().is_pinned(), torch.ones(3).is_pinned()],
    }
    del view
    return {**found, "after": torch.cuda.memory_allocated() - before}


def documents(folder: Path) -> dict[str, Any]:
    """Compute attention of documents, in 16 bits by one kernel, in 32 by a call for each."""
    # The host has no kernel for documents of any lengths, so this one checks what it is given.
    attention.attend_to_lengths = by_lengths
    found = {}
    for name in ("causal", "window", "chunks"):
        for dtype in (torch.float32, torch.bfloat16):
            here = with_gradients(partial(alone, mask_of(name, WHOLE)), tensors(torch.float32, SEQ))
            inputs = [it.detach().to("cuda", dtype).requires_grad_() for it in tensors(torch.float32, SEQ)]
            mask = mask_of(name, WHOLE, device="cuda")
            there = with_gradients(partial(alone, mask), inputs)
            kernel = attention.fits_one_kernel(nn.Module(), *inputs, mask)
            assert all(it.is_cuda for it in there)
            error = largest_error([it.cpu() for it in there], [it.double() for it in here])
            found[f"{name} {dtype}"] = {"one kernel": kernel, "error": error}
    return found


PROGRAMS: dict[str, Callable[[Path], dict[str, Any]]] = {
    function.__name__: function
    for function in (own_loop, loaded_by_blocks, own_group, marks, calibrated, mixed, memory, documents)
}

if __name__ == "__main__":
    found = PROGRAMS[sys.argv[1]](Path(sys.argv[2]))
    if rank_from_environment() == 0:
        print("\n" + json.dumps(found), flush=True)
    # A thread of torch for the stand-in may still run, which C++ ends with an abort.
    atexit._run_exitfuncs()
    os._exit(0)
