"""Compare a QLoRA run with its adapters in stock peft, beside a base that bitsandbytes quantizes.

pip install bitsandbytes
python -m tests.benchmarks.qlora

Two processes train adapters beside a tiny Qwen3 in four bits, in float32. The exported adapters are
loaded by peft, and the base by transformers. bitsandbytes is not one of the packages of the tests:
with it, each process that imports peft starts two seconds later.
"""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from bitsandbytes import __version__
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from meshtrain.config.lora import LoraConfig
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.config.plan import ParallelPlan, PrecisionPlan
from meshtrain.inference.loading import find_model_source, pipeline_from
from meshtrain.inference.lora import export
from meshtrain.models.packed import packed_projections
from meshtrain.parallel.packing import unpacked
from meshtrain.runtime.process import process_group
from tests.ranks import run_on_ranks
from tests.training.lora_runs import logits_of, lora_run, train, write_base

LORA = LoraConfig(rank=4, alpha=8, base="nf4")
WIDE = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}


def train_adapters(directory: Path) -> None:
    """Write a base, train adapters beside it over two shards, and export them."""
    write_base(directory, **WIDE)
    run = lora_run(directory, (1, 1, 2, 1), lora=LORA, steps=3, optimizer=OptimizerConfig(learning_rate=0.05))
    single = PrecisionPlan(parameters="float32", compute="float32", reduce="float32")
    train(run.model_copy(update={"plan": run.plan.model_copy(update={"precision": single})}))
    export(str(directory / "run"), directory / "adapters")


def own_numbers(checkpoint: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of a checkpoint, as `meshtrain generate` loads it, and its weights."""
    with ExitStack() as stack:
        source = find_model_source(checkpoint, stack)
        device = stack.enter_context(process_group())
        (stage,) = pipeline_from(source, source.config(), ParallelPlan(), device).stages
        weights = {name: unpacked(module) for name, module in packed_projections(stage.model)}
        return logits_of(stage.model.eval()), weights


def stock_base(directory: Path) -> Any:
    """Return the base as transformers loads it in four bits."""
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=False,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return AutoModelForCausalLM.from_pretrained(
        directory / "base", dtype=torch.float32, quantization_config=four_bits, device_map="cpu"
    )


def main() -> None:
    with TemporaryDirectory() as name:
        directory = Path(name)
        train_adapters(directory)
        ((logits, weights),) = run_on_ranks(1, own_numbers, str(directory / "run"), joins=False)
        base = stock_base(directory)
        layers = {name: module.weight for name, module in base.named_modules() if isinstance(module, Linear4bit)}
        found = {f"{name}.weight": dequantize_4bit(it.data, it.quant_state) for name, it in layers.items()}
        assert found.keys() == weights.keys()
        before = logits_of(base.train())
        adapted = PeftModel.from_pretrained(base, str(directory / "adapters"))
        # In eval mode, bitsandbytes packs weights anew and computes in bfloat16 on some CPUs.
        differences = {mode: logits_of(adapted.train(mode == "train")) - logits for mode in ("train", "eval")}
    print(f"bitsandbytes {__version__}: largest difference from meshtrain")
    print(f"weights of {len(found)} projections", max((found[it] - weights[it]).abs().max().item() for it in found))
    print("logits without the adapters", (before - logits).abs().max().item())
    for mode, difference in differences.items():
        print(f"logits in {mode} mode", difference.abs().max().item())


if __name__ == "__main__":
    main()
