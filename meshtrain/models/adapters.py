"""LoRA adapters of `peft`: take them off a model, which leaves the stock model, and put them back.

Code that refers to modules by name (plans, rules, cuts, checkpoints) uses the stock model. peft's
own layers compute base(x) + B(A(dropout(x))) * scaling. peft is an optional package and is not
imported here, so its layers are recognized by the names of their children.

Source: Low-Rank Adaptation, Hu et al. (arXiv:2106.09685).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from meshtrain.compat.peft import replace_methods, set_unload
from meshtrain.errors import ModelError, Problem, name_some
from meshtrain.models import dora
from meshtrain.models.fused import FusedParameter, UnfusedProjection, split_projection
from meshtrain.models.patterns import as_pattern
from meshtrain.models.tiles import fill_tiles

BASE = "base_layer"
ADVICE = "let target_modules of a LoraConfig name Linear, Conv1D and Embedding modules only, with no variant of LoRA"
MODULES_ADVICE = (
    "leave modules_to_save out of the LoraConfig (and task_type, which fills it in for a classifier), and let the "
    "module itself train by requires_grad_(True); meshtrain.save_pretrained(model, folder, merge_adapters=True) saves "
    "both"
)
# What peft calls the parts of an adapter.
KINDS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", dora.KIND)
CHANGES = ("merge", "update_layer", "delete_adapter")


def take_off_adapters(model: nn.Module) -> dict[str, nn.Module]:
    """Replace every adapted module by its base layer, in place.

    Args:
        model: the model that peft has changed, `peft_model.get_base_model()`. It is not the
            PeftModel around it.

    Returns:
        FQN of the stock module -> peft's layer without its base layer; empty for a stock model.

    Raises:
        ModelError: for adapters that cannot be computed in parallel, with one line for each kind.
    """
    adapted = {name: module for name, module in model.named_modules() if is_adapted(module)}
    _check_supported(model, adapted)
    for name, layer in adapted.items():
        model.set_submodule(name, getattr(layer, BASE))
        delattr(layer, BASE)
    return adapted


def put_on_adapters(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Undo `take_off_adapters`."""
    for name, layer in layers.items():
        setattr(layer, BASE, model.get_submodule(name))
        model.set_submodule(name, layer)


def adapters_held_by(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the layers of the modules that a stage holds.

    Modules of other stages are recognized as stubs, because they have no parameters.
    """
    modules = dict(model.named_modules())
    return {
        name: layer
        for name, layer in layers.items()
        if name in modules and any(True for _ in modules[name].parameters())
    }


def forbid_changes(layers: Mapping[str, nn.Module]) -> None:
    """Make those functions of peft fail that would treat shards as full tensors.

    This includes functions that would add parameters that are not sharded.
    """
    for layer in layers.values():
        replace_methods(layer, **dict.fromkeys(CHANGES, _refuse_change))
        set_unload(layer, _refuse_change)


def _refuse_change(*args: object, **kwargs: object) -> NoReturn:
    raise ModelError(
        "the adapters of a parallel model cannot be added, deleted, unloaded or merged in place",
        "do it before meshtrain.parallelize. meshtrain.save_pretrained(model, folder, merge_adapters=True) writes "
        "them merged",
    )


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """Turn a model into the stock model inside the block, and yield the layers taken off it."""
    layers = take_off_adapters(model)
    try:
        yield layers
    finally:
        put_on_adapters(model, layers)


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is one of peft's LoRA layers around a stock module."""
    return {BASE, "lora_A", "lora_B"} <= {name for name, _ in module.named_children()}


def stock_name(name: str) -> str:
    """Return the FQN that a parameter of an adapted model has in the stock model.

    The name of an adapter's parameter stays as it is.
    """
    return name.replace(f".{BASE}.", ".")


def is_adapter_parameter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter, by its FQN."""
    return any(f".{kind}." in name for kind in KINDS)


def adapter_parameters(layers: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return FQN -> parameter of layers that were taken off a model."""
    return {
        f"{name}.{kind}": parameter for name, layer in layers.items() for kind, parameter in layer.named_parameters()
    }


def adapters_of(layer: nn.Module) -> list[tuple[str, nn.Module, nn.Module]]:
    """Return the name and the modules A and B of every adapter of a projection's layer."""
    downs, ups = layer.lora_A, _ups(layer)
    assert isinstance(downs, nn.ModuleDict)
    return [(name, downs[name], ups[name]) for name in downs]


def embedding_adapters_of(layer: nn.Module) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
    """Return the name, A (rank, vocab) and B (hidden, rank) of an embedding's adapters."""
    downs, ups = layer.lora_embedding_A, layer.lora_embedding_B
    assert isinstance(downs, nn.ParameterDict)
    assert isinstance(ups, nn.ParameterDict)
    return [(name, downs[name], ups[name]) for name in downs]


def _ups(layer: nn.Module) -> nn.ModuleDict:
    assert isinstance(layer.lora_B, nn.ModuleDict)
    return layer.lora_B


def unfuse_adapters(
    layers: Mapping[str, nn.Module], model: nn.Module, fused: Iterable[FusedParameter]
) -> list[FusedParameter]:
    """Split B and magnitudes of a fused projection's adapters into the parts of the projection.

    All parts share A.

    Args:
        layers: taken off `model`. They are changed in place.
        model: with its projections in parts.
        fused: these parts.

    Returns:
        One entry per changed parameter.
    """
    by_name = {entry.name: entry for entry in fused}
    entries = []
    for name, layer in layers.items():
        base = model.get_submodule(name)
        if isinstance(base, UnfusedProjection):
            dim = by_name[f"{name}.weight"].dim
            widths = {part: child.get_parameter("weight").shape[dim] for part, child in base.named_children()}
            ups = _ups(layer)
            for adapter, up in list(ups.items()):
                assert isinstance(up, nn.Linear)
                ups[adapter], split = split_projection(up, f"{name}.lora_B.{adapter}", widths)
                entries += split
            entries += dora.split_magnitudes(layer, name, widths)
    return entries


@torch.no_grad()
def initialize_adapters(model: nn.Module, layers: Mapping[str, nn.Module], *, seed: int) -> None:
    """Fill adapters as peft does, with the same values on every mesh.

    Of projections, A is drawn from a uniform or a normal distribution, and B is zero. Of
    embeddings, B is drawn from a normal distribution, and A is zero.

    Args:
        model: has the configuration of its adapters.
        layers: materialized.
        seed: of the run.

    Raises:
        ModelError: for an initialization that is computed from the weights.
    """
    # `model.peft_config` would raise an error for a parallel model without adapters.
    configs: Mapping[str, Any] = vars(model).get("peft_config", {})
    for name, layer in layers.items():
        for adapter, down, up in adapters_of(layer):
            kind = getattr(configs.get(adapter), "init_lora_weights", True)
            _fill_down(down.weight, kind, f"{seed}|{name}.lora_A.{adapter}.weight", name)  # type: ignore[arg-type]
            for parameter in up.parameters():
                parameter.zero_()
        for adapter, rows, columns in embedding_adapters_of(layer):
            _check_kind(getattr(configs.get(adapter), "init_lora_weights", True), name)
            key = f"{seed}|{name}.lora_embedding_B.{adapter}"
            fill_tiles(columns, lambda tile, stream: tile.normal_(generator=stream), key=key)
            rows.zero_()


def _fill_down(weight: nn.Parameter, kind: Any, key: str, name: str) -> None:
    _check_kind(kind, name)
    rank, width = weight.shape
    if kind is True:
        bound = width**-0.5
        fill_tiles(weight, lambda tile, stream: tile.uniform_(-bound, bound, generator=stream), key=key)
    else:
        fill_tiles(weight, lambda tile, stream: tile.normal_(0.0, 1 / rank, generator=stream), key=key)


def _check_kind(kind: Any, name: str) -> None:
    if kind is not True and kind != "gaussian":
        raise ModelError(
            f"init_lora_weights = {kind!r} of the adapter of {name} is computed from the weights, and there are none "
            "yet",
            "let peft adapt a model that has its weights",
        )


def _check_supported(model: nn.Module, adapted: Mapping[str, nn.Module]) -> None:
    inside = {id(part) for layer in adapted.values() for name, part in layer.named_modules() if not _is_base(name)}
    problems: dict[Problem, None] = {}
    for name, module in model.named_modules():
        if type(module).__module__.startswith("peft.") and id(module) not in inside:
            kind = type(module).__name__
            advice = MODULES_ADVICE if kind == "ModulesToSaveWrapper" else ADVICE
            problems[Problem(f"{_shown(name)} is peft's {kind}, which cannot be made parallel", advice)] = None
    tied = {owner.rpartition(".")[0] for pair in _ties(model) for owner in pair}
    for name, layer in adapted.items():
        if problem := _problem_of(_shown(name), layer, name in tied):
            problems[problem] = None
    if problems:
        raise ModelError(problems)


def _problem_of(name: str, layer: nn.Module, is_tied: bool) -> Problem | None:
    base, kind = getattr(layer, BASE), type(layer).__name__
    if is_adapted(base) or kind not in ("Linear", "Embedding"):
        found = f"{name} has peft's {kind} around a {type(base).__name__}, which cannot be made parallel"
        return Problem(found, ADVICE)
    variants = [type(variant) for variant in getattr(layer, "lora_variant", {}).values()]
    if foreign := {kind.__name__ for kind in variants if kind.__module__.startswith("peft.")}:
        names = name_some(sorted(foreign))
        return Problem(f"{name} has a variant of LoRA ({names}), which cannot be made parallel", ADVICE)
    if getattr(layer, "merged_adapters", None):
        return Problem(f"{name} has an adapter that is merged into its weight", "call unmerge_adapter() first")
    if is_tied:
        found = f"{name} has an adapter, but is tied to another module, which would not have one"
        return Problem(found, "leave it out of target_modules")
    return None


def _shown(name: str) -> str:
    return as_pattern(stock_name(name).removesuffix(f".{BASE}"))


def _is_base(name: str) -> bool:
    return name == BASE or name.startswith(f"{BASE}.")


def _ties(model: nn.Module) -> list[tuple[str, str]]:
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    return [(stock_name(copy), stock_name(source)) for copy, source in ties.items()]
