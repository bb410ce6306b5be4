"""The z-loss of routers, and the biases that they select experts with, in the stock model."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.compat.transformers import router_recorder
from meshtrain.config.run import RouterConfig
from meshtrain.parallel.experts.stacks import expert_stacks, numbers_of_experts, selection_biases
from meshtrain.parallel.routers.formulas import find_routers
from meshtrain.verify.case import MICRO_BATCH_SIZE


class WatchedRouters:
    """Collects what the routers of a stock model compute in a step, and moves their biases.

    Args:
        model: in one process.
        config: what is asked for; without z-loss or moved biases nothing is collected.
    """

    def __init__(self, model: PreTrainedModel, config: RouterConfig) -> None:
        self._model, self._config = model, config
        self._logits: dict[nn.Module, list[Tensor]] = {}
        self._chosen: dict[str, list[Tensor]] = {}
        recorder = router_recorder(model)
        if config.z_loss and recorder is not None:
            for _, router in find_routers(model, recorder):
                router.register_forward_hook(partial(self._keep_logits, recorder.index))
        if config.bias_update_rate:
            for name, stack in expert_stacks(model).items():
                stack.register_forward_pre_hook(partial(self._keep_chosen, name), with_kwargs=True)

    def z_loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the () mean over routers and microbatches of the mean over tokens."""
        length = batch["input_ids"].shape[1]
        means = []
        for parts in self._logits.values():
            squares = torch.cat(parts).logsumexp(-1) ** 2
            microbatches = zip(squares.split(MICRO_BATCH_SIZE * length), _kept(batch), strict=True)
            means += [values[kept.flatten()].mean() for values, kept in microbatches]
        return torch.stack(means).mean()

    def end_step(self, batch: Mapping[str, Tensor]) -> None:
        """Move the biases by the experts that were chosen in this step, and forget the step."""
        if self._config.bias_update_rate:
            kept, numbers = torch.cat(list(_kept(batch))).flatten(), numbers_of_experts(self._model)
            for name, (module, bias) in selection_biases(self._model).items():
                counts = torch.cat(self._chosen[name])[kept].flatten().bincount(minlength=numbers[name])
                rising = torch.sign(counts.double().mean() - counts.double())
                with torch.no_grad():
                    value = getattr(module, bias)
                    value += self._config.bias_update_rate * rising.to(value.dtype).reshape(value.shape)
        self._logits.clear()
        self._chosen.clear()

    def buffers(self) -> dict[str, Tensor]:
        """Return FQN -> value of the biases that are buffers, if steps move them."""
        if not self._config.bias_update_rate:
            return {}
        values = {id(getattr(*bias)) for bias in selection_biases(self._model).values()}
        return {name: buffer.clone() for name, buffer in self._model.named_buffers() if id(buffer) in values}

    def _keep_logits(self, index: int, router: nn.Module, args: Any, output: Any) -> None:
        self._logits.setdefault(router, []).append(output[index] if isinstance(output, tuple) else output)

    def _keep_chosen(self, name: str, stack: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        _, chosen, *_ = (*args, *kwargs.values())
        self._chosen.setdefault(name, []).append(chosen)


def _kept(batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return (rows, seq) for each microbatch: whether a token is no padding."""
    mask = batch.get("attention_mask")
    kept = torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask.bool()
    return kept.split(MICRO_BATCH_SIZE)
