"""Give a model the LoRA adapters that a run asks for."""

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshtrain.config.lora import LoraConfig
from meshtrain.errors import ConfigError, Problem, name_some
from meshtrain.models.adapters import adapter_parameters, is_adapted, take_off_adapters
from meshtrain.models.patterns import nearest
from meshtrain.models.saved_modules import let_train, saved_module_problems


def make_adapters(
    model: PreTrainedModel, config: LoraConfig, *, saved_dtype: torch.dtype | None = None
) -> dict[str, nn.Module]:
    """Freeze a model but for `modules_to_save`, and make its adapters, on the meta device.

    Args:
        model: stock, on the meta device. It stays a stock model, but its parameters are frozen.
        config: with a rank.
        saved_dtype: number format of `modules_to_save`; None: that of adapters.

    Returns:
        FQN of the stock module -> peft's layer without its base layer, as of `take_off_adapters`.
        Adapters have the number format of the model, but at least float32.

    Raises:
        ConfigError: if peft is not installed, a target is no projection or embedding of the model,
            or one of `modules_to_save` cannot train as a whole.
        ModelError: for adapters that cannot be computed in parallel.
    """
    adapted_model(model, config)
    for module in model.modules():
        if is_adapted(module):
            # The magnitudes stay, and `apply_dora` lets the layer compute with them.
            module.lora_variant.clear()  # type: ignore[operator, union-attr]
    adapters = take_off_adapters(model)
    if problems := list(saved_module_problems(model, config.modules_to_save, adapters)):
        raise ConfigError(problems)
    # peft leaves the number format of adapters on meta as it is.
    wanted = model.dtype if model.dtype.itemsize >= torch.float32.itemsize else torch.float32
    for parameter in adapter_parameters(adapters).values():
        parameter.data = parameter.data.to(wanted)
    let_train(model, config.modules_to_save, saved_dtype or wanted)
    return adapters


def adapted_model(
    model: PreTrainedModel, config: LoraConfig, modules_to_save: Sequence[str] = (), device: str = "meta"
) -> Any:
    """Return peft's model around a stock one, which it changes. As for `make_adapters`.

    Args:
        device: of the model.
        modules_to_save: for peft, which puts copies of these modules beside them.
    """
    check_installed()
    from peft import LoraConfig as PeftConfig  # noqa: PLC0415 - an optional package, which loads slowly
    from peft import get_peft_model  # noqa: PLC0415

    _check_targets(model, config)
    assert config.rank is not None, "the run has no adapters"
    alpha: Any = config.rank if config.alpha is None else config.alpha
    asked = PeftConfig(
        r=config.rank,
        lora_alpha=alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        use_rslora=config.rank_stabilized,
        use_dora=config.dora,
        modules_to_save=list(modules_to_save) or None,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings(), torch.device(device):
        # peft still reads an attribute that transformers has renamed.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        # It sets what a Conv1D needs, and says so.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        # Both ends of a tie are saved, with the same values.
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        return get_peft_model(model, asked)


def check_installed() -> None:
    """Check that peft is installed.

    Raises:
        ConfigError: if it is not.
    """
    if find_spec("peft") is None:
        raise ConfigError("`lora.rank` is set, but peft is not installed", "pip install meshtrain[lora]")


def _check_targets(model: PreTrainedModel, config: LoraConfig) -> None:
    # peft ignores a name that matches nothing if another one matches.
    if config.target_modules == "all-linear":
        return
    modules = {name: module for name, module in model.named_modules() if name}
    adaptable = [name for name, it in modules.items() if isinstance(it, nn.Linear | Conv1D | nn.Embedding)]
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in adaptable))
    problems = []
    for target in config.target_modules:
        named = [name for name in modules if name == target or name.endswith(f".{target}")]
        if not named:
            advice = nearest(target, known)
            problems.append(Problem(f"lora.target_modules: {target!r} is the end of no module's name{advice}"))
        elif others := [name for name in named if name not in adaptable]:
            kind = type(modules[others[0]]).__name__
            advice = f"name projections or embeddings: {name_some(known, 8)}"
            problems.append(Problem(f"lora.target_modules: {target!r} names {others[0]}, which is a {kind}", advice))
        elif config.dora and any(isinstance(modules[name], nn.Embedding) for name in named):
            found = f"lora.target_modules: {target!r} names the embedding {named[0]}, and lora.dora is for projections"
            problems.append(Problem(found, "leave it out, or set dora = false"))
    if problems:
        raise ConfigError(problems)
