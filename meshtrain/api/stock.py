"""Which models `parallelize` takes."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from meshtrain.api.handle import find_handle
from meshtrain.compat.nn import is_compiled
from meshtrain.compat.transformers import attention_implementation, is_registered_here
from meshtrain.config.arguments import described
from meshtrain.errors import ModelError, name_some
from meshtrain.parallel.stage_attention import SHARES_CONFIGURATION

WRAPPERS = (nn.DataParallel, DistributedDataParallel, FullyShardedDataParallel)


def check_stock(model: nn.Module) -> PreTrainedModel:
    """Return the model of transformers that a program has passed, without the wrapper of peft.

    Raises:
        ModelError: for anything else, such as a model that is parallel already.
    """
    if find_handle(model) is not None:
        raise ModelError(
            "this model is parallel already",
            "call meshtrain.parallelize once. For another plan save it (model.save_pretrained) and load it again, or "
            "build it again",
        )
    _check_no_wrapper(model)
    if hasattr(model, "get_base_model"):
        model = _inside_of_adapter(model)
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"{described(model)} is not a model of transformers", "pass one, such as GPT2LMHeadModel")
    if getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False):
        what = "is quantized" if getattr(model, "is_quantized", False) else "was spread over devices by device_map"
        raise ModelError(
            f"this {type(model).__name__} {what}", "load it without that, because meshtrain.parallelize distributes it"
        )
    attention = attention_implementation(model.config.get_text_config())
    if attention is not None and is_registered_here(attention):
        raise ModelError(*SHARES_CONFIGURATION)
    return model


def _check_no_wrapper(model: object) -> None:
    if is_compiled(model):
        raise ModelError(
            "this model is compiled, but the plan decides what is compiled",
            'pass the model from before torch.compile, and set {"compile": {"enabled": True}} in the plan',
        )
    if isinstance(model, WRAPPERS):
        raise ModelError(
            f"a {type(model).__name__} has copies or shards of its own",
            'pass the model inside (model.module), and use the plan instead: {"mesh": {"dp_replicate": N}} as '
            'DDP, {"mesh": {"dp_shard": N}} as FSDP',
        )


def _inside_of_adapter(model: Any) -> Any:
    kinds = {str(config.peft_type.value): config for config in model.peft_config.values()}
    if others := [kind for kind in kinds if kind != "LORA"]:
        raise ModelError(
            f"peft's {name_some(others)} cannot be made parallel", "use LoraConfig, or train the full model"
        )
    if biases := sorted({config.bias for config in model.peft_config.values()} - {"none"}):
        raise ModelError(
            f"bias = {biases[0]!r} of the LoraConfig: peft would save biases of the model with the adapters, but a "
            "parallel model cannot",
            'set bias = "none", and call requires_grad_(True) on the biases to train',
        )
    return model.get_base_model()
