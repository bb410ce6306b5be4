"""Modules of a frozen model that train in full beside its adapters (`lora.modules_to_save`)."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from meshtrain.compat.nn import saved_buffers
from meshtrain.errors import Problem, name_some
from meshtrain.models.patterns import nearest

KEY = "lora.modules_to_save"


def let_train(model: PreTrainedModel, targets: Sequence[str], dtype: torch.dtype) -> None:
    """Let modules of a frozen model train, in place.

    Args:
        model: stock, on the meta device.
        targets: ends of the names of modules, as checked by `saved_module_problems`.
        dtype: number format of their parameters.
    """
    modules = dict(model.named_modules())
    for name in saved_modules(model, targets):
        for parameter in modules[name].parameters():
            parameter.requires_grad = True
            parameter.data = parameter.data.to(dtype)


def saved_modules(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Return the FQNs of the modules that targets name, and of those that are tied to them."""
    modules = dict(model.named_modules())
    named = [name for target in targets for name in _named(modules, target)]
    parameters = {parameter for name in named for parameter in modules[name].parameters()}
    return [
        name
        for name, module in modules.items()
        if name in named or parameters.intersection(module.parameters(recurse=False))
    ]


def shortest_targets(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Return what `modules_to_save` of peft must be to name the same modules.

    peft compares ends of names without regard for their dots, so that "norm" names "input_norm"
    too, and does not know of ties where the embedding has another name than "embed_tokens".
    """
    wanted = saved_modules(model, targets)
    names = [name for name, _ in model.named_modules()]
    by_peft = [name for name in names if any(name.endswith(target) for target in targets)]
    return list(targets) if by_peft == wanted else wanted


def saved_module_problems(
    model: PreTrainedModel, targets: Sequence[str], adapted: Collection[str]
) -> Iterator[Problem]:
    """Yield a problem for each target that names nothing, or what cannot train in full.

    Args:
        model: stock, on the meta device.
        targets: ends of the names of modules.
        adapted: FQNs of the modules that have an adapter.
    """
    modules = dict(model.named_modules())
    known = list(dict.fromkeys(name.rpartition(".")[2] for name, module in modules.items() if _is_whole(module)))
    for target in targets:
        named = _named(modules, target)
        if not named:
            yield Problem(f"{KEY}: {target!r} is the end of no module's name{nearest(target, known)}")
            continue
        if others := [name for name in named if not _is_whole(modules[name])]:
            kind = type(modules[others[0]]).__name__
            found = f"{KEY}: {target!r} names {others[0]}, a {kind}, which cannot train and be saved as a whole"
            yield Problem(found, f"name embeddings, the head, projections or norms: {name_some(known, 8)}")
        if both := [name for name in named if name in adapted]:
            yield Problem(
                f"{KEY}: {target!r} names {both[0]}, which has an adapter", "leave it out here or in target_modules"
            )


def _named(modules: Collection[str], target: str) -> list[str]:
    return [name for name in modules if name and (name == target or name.endswith(f".{target}"))]


def _is_whole(module: nn.Module) -> bool:
    """Return whether a module has parameters alone, and none of them is a stack of experts."""
    own = [*module.parameters(recurse=False)]
    has_more = any(True for _ in module.children()) or any(True for _ in saved_buffers(module))
    return bool(own) and not has_more and all(parameter.dim() <= 2 for parameter in own)
