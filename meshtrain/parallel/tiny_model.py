"""Tiny copies of a model, to find out by trying how its class computes."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.compat.transformers import attention_implementation, build, set_attention_implementation, supports_sdpa
from meshtrain.errors import ModelError
from meshtrain.models.build import stock_class, stock_model
from meshtrain.models.refusals import REFUSALS, refusal_reason
from meshtrain.parallel.cut.probe import MISFITS, no_router_logits
from meshtrain.parallel.tiny_copy import MAX_LAYERS, copy_with_all_kinds, layer_kinds, tiny_config

Result = TypeVar("Result")
FEWEST_LAYERS = 4
BATCH, LENGTH, PADDED, NOISE = 2, 8, 2, 0.05


def tiny_model(model: PreTrainedModel, tp: int, *, dtype: torch.dtype = torch.float64, **heads: Any) -> PreTrainedModel:
    """Return a tiny copy of a model with random values, on the CPU.

    Args:
        dtype: in which it computes. Some classes do not in float64.
        heads: numbers of heads other than those of `tiny_config`.
    """
    kind = stock_class(model)
    make = partial(tiny_config, model.config, tp=tp, **heads)
    numbers = range(min(FEWEST_LAYERS, model.config.get_text_config().num_hidden_layers), MAX_LAYERS + 1)
    _, config, _ = copy_with_all_kinds(layer_kinds(model), numbers, make, partial(on_meta, kind))
    implementation = attention_implementation(model.config)
    if implementation not in ("eager", "sdpa"):
        # The other implementations are kernels for one kind of device.
        implementation = "sdpa" if supports_sdpa(kind) else "eager"
    set_attention_implementation(config, implementation)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = build(kind, config, dtype)
        for parameter in built.parameters():
            # Some parameters start as zeros, which let nothing through.
            noise = torch.randn(parameter.shape, dtype=dtype)
            parameter.data = parameter.data.to(dtype) + NOISE * noise
    return built.train()


def tried_once(trial: Callable[..., Result]) -> Callable[..., Result]:
    """Run a trial once for a class, its configuration, its attention and the options of the trial.

    Args:
        trial: called with a model and options by keyword.
    """
    known: dict[tuple[object, ...], Result] = {}

    @wraps(trial)
    def once(model: PreTrainedModel, **options: Any) -> Result:
        attention = attention_implementation(model.config.get_text_config())
        configuration = model.config.to_json_string(use_diff=False)
        key = stock_class(model), attention, configuration, *sorted(options.items())
        if key not in known:
            known[key] = trial(model, **options)
        return known[key]

    return once


def on_meta(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Return a model of a class without values.

    Raises:
        ModelError: if transformers cannot build it.
    """
    try:
        return stock_model(kind, config, torch.float32)
    except REFUSALS as error:
        raise ModelError(
            f"transformers cannot build a tiny {config.model_type} model: {refusal_reason(error)}"
        ) from error


@contextmanager
def copies_must_run(tiny: PreTrainedModel, failure: str = "does not run") -> Iterator[None]:
    """Raise a ModelError if a copy does not run in the block.

    Args:
        tiny: the copy.
        failure: what the error says of the copy.

    Raises:
        ModelError: with the error of the model's own code.
    """
    try:
        yield
    except MISFITS as error:
        first = (str(error).splitlines() or [""])[0]
        raise ModelError(f"a tiny copy of {type(tiny).__name__} {failure} ({type(error).__name__}: {first})") from error


def inputs_of(tiny: PreTrainedModel) -> dict[str, Any]:
    """Return the inputs of a run of a copy: (`BATCH`, `LENGTH`) tokens, and their mask.

    With padding, attention does not take a short way that reads other numbers.
    """
    stream = torch.Generator().manual_seed(1)
    vocabulary = tiny.config.get_text_config().vocab_size
    # Without tokens for padding and the like, if there are others.
    first = 2 if vocabulary > 3 else 0
    ids = torch.randint(first, vocabulary, (BATCH, LENGTH), generator=stream)
    if "attention_mask" not in inspect.signature(type(tiny).forward).parameters:
        return {"input_ids": ids, **no_router_logits(tiny)}
    mask = torch.ones_like(ids)
    mask[0, -PADDED:] = 0
    return {"input_ids": ids, "attention_mask": mask, **no_router_logits(tiny)}
