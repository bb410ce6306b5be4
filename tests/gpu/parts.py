"""The parts of `python -m tests.gpu`: what is checked and measured on one device."""

import gc
import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM

import meshtrain
from meshtrain.errors import ConfigError
from meshtrain.models.build import build_meta_model
from meshtrain.parallel.account import flops_per_token
from meshtrain.parallel.float8.product import RECIPES
from meshtrain.planning.machine import Machine, find_machine, machine_of_device
from meshtrain.planning.needs import find_needs
from meshtrain.runtime.process import check_number_format
from tests.gpu.commands import MESHES, profiled, quickstart, run_command, trained_124m, two_processes
from tests.gpu.loops import build_step
from tests.gpu.models import COMPARED, MIXED, SHAPES, SMALL_SHAPES, SMALL_TIMED, TIMED, TINY, TINY_GPT2, traced
from tests.gpu.outcome import Failed, Numbers, Setting, Skipped, check_close
from tests.gpu.steps import Trained, computing_on, memory_of, resolved, seconds_of_step, train, weights_drawn_on_device

CPU = torch.device("cpu")
ROWS, LENGTH = 2, 64
Case = Callable[[Setting], Numbers]


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        cases: name -> what checks it.
        apart: whether each case needs a process of its own, because it fills the memory.
    """

    cases: dict[str, Case]
    apart: bool = False


def parity(setting: Setting, *, model: dict[str, Any], compute: str) -> Numbers:
    """Compare steps on the device with float32 on the CPU."""
    plan = {"precision": {"compute": compute}}
    with computing_on(setting.torch_device) as device:
        reference = train(resolved(model, {}, ROWS, LENGTH), CPU)
        found = train(resolved(model, plan, ROWS, LENGTH), device)
    return check_steps(found, reference, 1e-4 if compute == "float32" else 3e-2)


def check_steps(found: Trained, reference: Trained, tolerance: float) -> Numbers:
    """Compare losses and norms of gradients, as relative differences."""
    loss = check_close("loss", found.losses, reference.losses, tolerance)
    return {
        "loss_difference": loss,
        "norm_difference": check_close("norm", found.norms, reference.norms, 5 * tolerance),
    }


def offload(setting: Setting) -> Numbers:
    """Keep parameters in host memory, and compute the same with less memory of the device."""
    model = TINY if setting.small else SHAPES["GPT-2 124M"][0]
    with computing_on(setting.torch_device) as device:
        plain = train(resolved(model, {}, ROWS, LENGTH), device)
        numbers = {"peak_gib": plain.peak_bytes / 2**30}
        plain = _without_context(plain)
        run = resolved(model, {"shard": {"offload": "cpu", "reshard_after_forward": "always"}}, ROWS, LENGTH)
        offloaded = train(run, device)
    if device.type == "cuda" and offloaded.peak_bytes >= plain.peak_bytes:
        raise Failed(f"offloading needs {offloaded.peak_bytes:,} bytes, {plain.peak_bytes:,} without", numbers)
    return {
        **numbers,
        "offloaded_peak_gib": offloaded.peak_bytes / 2**30,
        **check_steps(offloaded, plain, 1e-4),
        "seconds": statistics.median(plain.seconds),
        "offloaded_seconds": statistics.median(offloaded.seconds),
    }


def _without_context(trained: Trained) -> Trained:
    """Return only the numbers, so that the memory of the model can be used again."""
    kept: Any = {**vars(trained), "context": None}
    del trained
    free_memory()
    return Trained(**kept)


def free_memory() -> None:
    """Give back what no object uses any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def float16(setting: Setting) -> Numbers:
    """Train with a scaled loss."""
    with computing_on(setting.torch_device) as device:
        reference = train(resolved(TINY, {}, ROWS, LENGTH), device)
        found = train(resolved(TINY, {"precision": {"compute": "float16"}}, ROWS, LENGTH), device)
    return {"loss_scale": found.loss_scale, **check_steps(found, reference, 2e-2)}


def overflow(setting: Setting) -> Numbers:
    """Overflow: skip the step, and lower the scale."""
    scale = {"initial": 2.0**60, "hysteresis": 1}
    with computing_on(setting.torch_device) as device:
        run = resolved(TINY, {"precision": {"compute": "float16", "loss_scale": scale}}, ROWS, LENGTH)
        found = train(run, device, 2)
    if found.loss_scale != 2.0**58:
        raise Failed(f"two overflows lower a scale of 2^60 to 2^58, found {found.loss_scale}")
    return {"loss_scale": found.loss_scale}


def float8(setting: Setting, *, recipe: str) -> Numbers:
    """Compute all layers in float8, and compare with bfloat16."""
    precision = {"compute": "float8", "float8": {"recipe": recipe, "skip": []}}
    with computing_on(setting.torch_device) as device:
        try:
            check_number_format("mxfp8" if recipe == "mxfp8" else "float8")
        except ConfigError as error:
            raise Skipped(str(error)) from error
        reference = train(resolved(TINY, MIXED, ROWS, LENGTH), device)
        found = train(resolved(TINY, {"precision": precision}, ROWS, LENGTH), device)
    return check_steps(found, reference, 3e-2)


def compiled(setting: Setting, *, compute: str) -> Numbers:
    """Compile the layers, and compute the same."""
    # Inductor's code for a CPU needs a C++ compiler, and is not what is tested here.
    backend = "inductor" if setting.device == "cuda" and not setting.on_host else "aot_eager"
    precision = {"precision": {"compute": compute}}
    with computing_on(setting.torch_device) as device:
        plain = train(resolved(TINY, precision, ROWS, LENGTH), device)
        plan = {**precision, "compile": {"enabled": True, "backend": backend}}
        found = train(resolved(TINY, plan, ROWS, LENGTH), device)
    numbers = check_steps(found, plain, 1e-4 if compute == "float32" else 2e-2)
    return {**numbers, "seconds": plain.seconds[-1], "compiled_seconds": found.seconds[-1]}


def flash(setting: Setting) -> Numbers:
    """Allow only the flash kernel of sdpa, and compare with eager attention."""
    eager = {**TINY, "attention": "eager"}
    with computing_on(setting.torch_device) as device:
        reference = train(resolved(eager, MIXED, ROWS, LENGTH), device)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            found = train(resolved(TINY, MIXED, ROWS, LENGTH), device)
    return check_steps(found, reference, 3e-2)


def own_attention(setting: Setting, *, name: str) -> Numbers:
    """Train a model of the user with an attention that run files do not have."""
    if name == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise Skipped("flash_attn is not installed")
    if name == "flex_attention" and (setting.on_host or setting.device == "cpu"):
        raise Skipped("flex_attention has no backward pass on a CPU")
    losses: dict[str, list[float]] = {}
    with computing_on(setting.torch_device) as device:
        for attention in ("sdpa", name):
            torch.manual_seed(0)
            config = AutoConfig.for_model("llama", **TINY["config"])
            stock = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
            model = meshtrain.parallelize(stock, MIXED)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            meshtrain.rebind(optimizer)
            ids = torch.arange(ROWS * 128, device=device).view(ROWS, 128)
            losses[attention] = []
            for _ in range(3):
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[attention].append(loss.item())
    return {"loss_difference": check_close("loss", losses[name], losses["sdpa"], 3e-2)}


def memory(setting: Setting, *, shape: str) -> Numbers:
    """Measure the memory of steps beside what `meshtrain plan` predicts."""
    model, plan, rows, length = (SMALL_SHAPES if setting.small else SHAPES)[shape]
    run, machine = resolved(model, plan, rows, length), _machine(setting)
    predicted = find_needs(run, machine).peak_bytes
    numbers = {"predicted_gib": predicted / 2**30}
    if setting.device == "cpu":
        raise Skipped("torch counts no memory on a CPU", numbers)
    _check_fits(predicted, numbers)
    with computing_on(setting.torch_device) as device, weights_drawn_on_device():
        found = train(run, device)
    numbers |= {
        "measured_gib": found.peak_bytes / 2**30,
        "reserved_gib": found.reserved_bytes / 2**30,
        "difference": predicted / found.peak_bytes - 1,
    }
    if abs(numbers["difference"]) > 0.1 and not setting.on_host:
        raise Failed(f"predicted {predicted / 2**30:.2f} GiB, measured {found.peak_bytes / 2**30:.2f} GiB", numbers)
    return numbers


def _machine(setting: Setting) -> Machine:
    name = machine_of_device(torch.cuda.get_device_name()) if setting.device == "cuda" else None
    return find_machine(name or "h100-80gb", 1)


def _check_fits(predicted: int, numbers: Numbers) -> None:
    free, _ = torch.cuda.mem_get_info()
    if predicted > 0.95 * free:
        raise Skipped(f"needs {predicted / 2**30:.1f} GiB, free are {free / 2**30:.1f} GiB", numbers)


def throughput(setting: Setting, *, shape: str) -> Numbers:
    """Measure tokens per second beside a hand-written loop, and the share of the peak FLOPs."""
    model, plan, rows, length = (SMALL_TIMED if setting.small else TIMED)[shape]
    run, number = resolved(model, plan, rows, length), 2 if setting.small else 8
    if setting.device == "cuda":
        _check_fits(find_needs(run, _machine(setting)).peak_bytes, {})
    with computing_on(setting.torch_device) as device, weights_drawn_on_device():
        found = train(run, device, number)
        memory_gib = found.peak_bytes / 2**30
        ours = found.tokens / statistics.median(found.seconds[1:])
        found = _without_context(found)
        # Only now does nothing hold the model.
        free_memory()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        tokens = torch.randint(3, model["config"]["vocab_size"], (run.batch.global_batch_size, length + 1))
        step = build_step(model, plan, rows, device)
        tokens = tokens.to(device)
        seconds = [seconds_of_step(partial(step, tokens), device) for _ in range(number)]
    bare = found.tokens / statistics.median(seconds[1:])
    numbers = {
        "tokens_per_second": ours,
        "by_hand": bare,
        "ratio": ours / bare,
        "peak_gib": memory_gib,
        "by_hand_peak_gib": memory_of(device)[0] / 2**30,
    }
    numbers |= _utilization(setting, run, ours)
    if numbers["ratio"] < 0.9 and not setting.small:
        raise Failed(f"{ours:,.0f} tokens per second, a hand-written loop {bare:,.0f}", numbers)
    return numbers


def features(setting: Setting, *, name: str) -> Numbers:
    """Measure what a part of a plan gains: the same steps with it and without it."""
    model, plan, other, rows, length = COMPARED[name]
    if setting.small:
        model, rows, length = TINY, 2, 64
    documents = "separate" if "attention" in plan else "joined"
    trained: dict[str, Trained] = {}
    with computing_on(setting.torch_device) as device, weights_drawn_on_device():
        for key, chosen in {"with": plan, "without": other}.items():
            run = resolved(model, traced(chosen) if setting.small else chosen, rows, length, documents=documents)
            trained[key] = _without_context(train(run, device, 3 if setting.small else 8))
    seconds = {key: statistics.median(found.seconds[1:]) for key, found in trained.items()}
    numbers = {
        "tokens_per_second": trained["with"].tokens / seconds["with"],
        "times_faster": seconds["without"] / seconds["with"],
        "peak_gib": trained["with"].peak_bytes / 2**30,
        "without_peak_gib": trained["without"].peak_bytes / 2**30,
    }
    # Only the first step begins with equal parameters.
    first = {key: replace(found, losses=found.losses[:1], norms=found.norms[:1]) for key, found in trained.items()}
    return numbers | check_steps(first["with"], first["without"], 3e-2)


def seconds(setting: Setting) -> Numbers:
    """Calibrate this machine, and compare predicted steps with measured ones."""
    file = setting.folder / "machine.toml"
    run_command(setting, "calibrate", str(file), "--processes", "1")
    machine, numbers = find_machine(str(file), 1), {}
    for name, (model, plan, rows, length) in (SMALL_SHAPES if setting.small else SHAPES).items():
        if name == "Llama 8B":
            continue
        run = resolved(model, plan, rows, length)
        time = find_needs(run, machine).time
        assert time is not None
        with computing_on(setting.torch_device) as device, weights_drawn_on_device():
            found = _without_context(train(run, device, 8))
        measured = statistics.median(found.seconds[1:])
        key = name.replace(" ", "_").replace("-", "_").lower()
        numbers |= {f"{key}_seconds": measured, f"{key}_predicted": time.seconds}
        numbers[f"{key}_difference"] = time.seconds / measured - 1
    return numbers


def _utilization(setting: Setting, run: Any, tokens_per_second: float) -> Numbers:
    speed = _machine(setting).config.speed
    known = machine_of_device(torch.cuda.get_device_name()) if setting.device == "cuda" else None
    if known is None or speed is None:
        return {}
    flops = flops_per_token(build_meta_model(run.hf_config, dtype=torch.float32), run.batch.sequence_length)
    return {"mfu": flops * tokens_per_second / (speed.peak_tflops["bfloat16"] * 1e12)}


def _shaped(case: Callable[..., Numbers]) -> dict[str, Case]:
    return {shape: partial(case, shape=shape) for shape in SHAPES}


PARTS: dict[str, Part] = {
    "parity": Part(
        {
            f"{model['type']}, {compute}": partial(parity, model=model, compute=compute)
            for model in (TINY, TINY_GPT2)
            for compute in ("float32", "bfloat16")
        }
    ),
    "quickstart": Part({"train, export, generate": quickstart}),
    "gpt2-124m": Part({"train": trained_124m}),
    "offload": Part({"cpu": offload}),
    "float16": Part({"scaled": float16, "overflow": overflow}),
    "float8": Part({recipe: partial(float8, recipe=recipe) for recipe in RECIPES}),
    "compile": Part({compute: partial(compiled, compute=compute) for compute in ("float32", "bfloat16")}),
    "attention": Part(
        {
            "sdpa, flash kernel": flash,
            **{name: partial(own_attention, name=name) for name in ("flash_attention_2", "flex_attention")},
        }
    ),
    "memory": Part(_shaped(memory), apart=True),
    "throughput": Part({shape: partial(throughput, shape=shape) for shape in TIMED}, apart=True),
    "features": Part({name: partial(features, name=name) for name in COMPARED}, apart=True),
    "seconds": Part({"calibrated": seconds}),
    "profile": Part({"trace": profiled}),
    "processes": Part({name: partial(two_processes, name=name) for name in MESHES}),
}
