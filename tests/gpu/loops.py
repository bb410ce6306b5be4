"""A hand-written loop over the stock model on one device: the speed limit for a trainer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.benchmarks.bare import build_optimizer

LAYERS = {"gpt2": "transformer.h", "llama": "model.layers"}


def build_step(
    model: dict[str, Any], plan: dict[str, Any], rows: int, device: torch.device
) -> Callable[[Tensor], float]:
    """Return a function that trains one step on tokens (batch, seq + 1), and returns the loss.

    It accumulates microbatches of `rows` sequences, and clips the norm of the gradients. With
    float32 parameters it computes in bfloat16 by autocast. It compiles the layers if the plan does.
    """
    is_pure = plan["precision"].get("parameters") == "bfloat16"
    config = AutoConfig.for_model(model["type"], **model["config"], use_cache=False)
    with device:
        stock = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if is_pure else torch.float32).train()
    if plan.get("recompute", {}).get("mode") == "full":
        stock.gradient_checkpointing_enable({"use_reentrant": False})
    if plan.get("compile"):
        for layer in stock.get_submodule(LAYERS[model["type"]]):
            layer.compile(backend=plan["compile"].get("backend", "inductor"))
    optimizer = build_optimizer(stock)

    def step(tokens: Tensor) -> float:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for part in tokens.split(rows):
            with torch.autocast(device.type, torch.bfloat16, enabled=not is_pure):
                logits = stock(input_ids=part[:, :-1]).logits
            labels = part[:, 1:].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels, reduction="sum")
            loss = loss / (tokens.numel() - len(tokens))
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(stock.parameters(), 1.0)
        optimizer.step()
        return total.item()

    return step
