"""Changes of a program to a stock model take effect or are refused, and are never lost silently."""

import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import meshtrain
from meshtrain.errors import ModelError
from meshtrain.parallel.cut.hooks import hooks_disabled
from tests.api.programs import own_part, padded_batches, parallel, stock_model
from tests.api.test_refusals import message_of
from tests.ranks import run_on_ranks

MESHES = ({"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}, {"pp": 2})


def tied_by_hand() -> Any:
    model: Any = stock_model("llama-untied")
    model.lm_head.weight = model.model.embed_tokens.weight
    model.config.tie_word_embeddings = True
    return model


def with_a_head_of_its_own() -> Any:
    model: Any = stock_model("gpt2-tied")
    model.lm_head = nn.Linear(model.config.n_embd, model.config.vocab_size, bias=False).double()
    model.config.tie_word_embeddings = False
    return model


def doubled(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return type(module).forward(module, hidden) * 2


def with_a_method() -> Any:
    model: Any = stock_model("llama-untied")
    mlp = model.model.layers[1].mlp
    mlp.forward = types.MethodType(doubled, mlp)
    return model


def with_a_closure() -> Any:
    model: Any = stock_model("llama-untied")
    mlp = model.model.layers[1].mlp
    mlp.forward = partial(doubled, mlp)
    return model


def with_a_loss() -> Any:
    model: Any = stock_model("llama-untied")
    stock = model.loss_function
    model.loss_function = lambda *args, **kwargs: 7 * stock(*args, **kwargs)
    return model


def with_a_forward() -> Any:
    model: Any = stock_model("llama-untied")
    stock = model.forward
    model.forward = lambda *args, **kwargs: stock(*args, **kwargs)
    return model


def with_a_hook() -> Any:
    model: Any = stock_model("llama-untied")
    model.register_forward_hook(lambda module, args, output: None)
    return model


def with_a_projection() -> Any:
    model: Any = stock_model("gpt2-tied")
    projection = model.transformer.h[1].attn.c_attn
    projection.forward = types.MethodType(doubled, projection)
    return model


def with_a_hook_on_a_projection() -> Any:
    model: Any = stock_model("gpt2-tied")
    model.transformer.h[1].attn.c_attn.register_forward_pre_hook(lambda module, args: None)
    return model


def loss_of(model: Any) -> torch.Tensor:
    part = own_part(model, padded_batches()[0])
    return model(**part).loss if isinstance(model, nn.Module) else model.evaluate(part)


def compute(folder: Path) -> None:
    for number, make in enumerate((tied_by_hand, with_a_head_of_its_own, with_a_method, with_a_closure)):
        torch.manual_seed(1)
        wanted = make()(**padded_batches()[0]).loss
        for mesh in MESHES[: 3 if make is with_a_closure else 4]:
            torch.manual_seed(1)
            model = parallel(make(), mesh)
            torch.testing.assert_close(loss_of(model), wanted, rtol=1e-12, atol=0)
            if make not in (tied_by_hand, with_a_head_of_its_own):
                continue
            saved = folder / f"{number}-{'-'.join(mesh)}"
            model.save_pretrained(saved)
            again = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float64)
            torch.testing.assert_close(again(**padded_batches()[0]).loss, wanted, rtol=1e-12, atol=0)


def test_changes_of_a_program_take_effect_on_every_mesh(tmp_path: Path) -> None:
    run_on_ranks(2, compute, tmp_path)


def refuse() -> dict[str, str]:
    found = {make.__name__: message_of(ModelError, partial(parallel, make(), {"pp": 2})) for make in REFUSED}
    for make in (with_a_projection, with_a_hook_on_a_projection):
        found[make.__name__] = message_of(ModelError, partial(parallel, make(), {"dp_replicate": 2}))
    return found


REFUSED = {
    with_a_hook: "the model itself has a hook, but the inputs and outputs of pipeline stages differ from those of the "
    "model; put it on a module inside, or use a mesh with pp = 1",
    with_a_loss: "model.loss_function was set by the program, but the last stage of a pipeline computes the mean "
    "cross entropy itself; pass it as meshtrain.parallelize(..., loss=...), or use a mesh with pp = 1, which uses the "
    "model's own loss",
    with_a_forward: "model.forward was replaced by the program, but the stages of a pipeline run the forward of the "
    "class, and compute the loss themselves; use a mesh with pp = 1, or replace the forward of a module inside",
    with_a_closure: "the forward of model.layers.1.mlp was replaced by a function that is not a method of it, and "
    "would still compute with the module that was cut; pass it as types.MethodType(function, module), with the "
    "module as its first argument, or use a mesh with pp = 1",
}


def test_changes_that_a_mesh_would_lose_are_refused() -> None:
    wanted = {make.__name__: message for make, message in REFUSED.items()}
    for name, what in (("with_a_projection", "a replaced forward"), ("with_a_hook_on_a_projection", "a hook")):
        wanted[name] = (
            f"transformer.h.1.attn.c_attn has {what}, but tensor.fused keeps that projection in parts; put it on the "
            "module around it"
        )
    assert run_on_ranks(2, refuse) == [wanted] * 2


def refuse_ties() -> list[str]:
    model = tied_by_hand()
    model.config.tie_word_embeddings = False
    messages = [message_of(ModelError, partial(parallel, model, mesh)) for mesh in MESHES]
    # The refused model is unchanged.
    model.config.tie_word_embeddings = True
    wanted = tied_by_hand()(**padded_batches()[0]).loss
    torch.testing.assert_close(loss_of(parallel(model, {"tp": 2})), wanted, rtol=1e-12, atol=0)
    return messages


def test_undeclared_ties_are_refused() -> None:
    messages = run_on_ranks(2, refuse_ties)[0]
    assert all(message.startswith("lm_head.weight and model.embed_tokens.weight are one p") for message in messages)


class Recorder:
    """Watches layers with a method as the hook, as many programs do."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def see(self, module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self.seen.append(hidden.norm().item())

    def see_of(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.seen.append(name)


def watch() -> list[int]:
    """Count the calls of hooks on the first and the last layer on this rank."""
    model: Any = stock_model("llama-untied")
    recorders = [Recorder(), Recorder()]
    for layer, recorder in zip((0, -1), recorders, strict=True):
        model.model.layers[layer].register_forward_hook(recorder.see)
        model.model.layers[layer].register_forward_hook(partial(recorder.see_of, "layer"))
    # A hook that knows its module must get the module that is there now.
    mlp = model.model.layers[1].mlp
    mlp.register_forward_hook(partial(lambda known, module, args, output: None if known is module else 0 / 0, mlp))
    pipeline = parallel(model, {"pp": 2}, pipeline={"schedule": "1F1B"})
    pipeline.evaluate(padded_batches()[0])
    assert all(
        recorder.seen.count("layer") * 2 == len(recorder.seen) for recorder in recorders if "layer" in recorder.seen
    )
    return [len(recorder.seen) // 2 for recorder in recorders]


def look_at_hidden_states() -> None:
    """Let transformers add its own hooks, which it does when hidden states are first requested.

    This happens before `parallelize` in one case and after it in the other.
    """
    batch = padded_batches()[0]
    for mesh in ({"pp": 2}, {"tp": 2}):
        for is_before in (True, False):
            model: Any = stock_model("llama-untied")
            wanted = model(**batch, output_hidden_states=is_before).loss
            torch.testing.assert_close(loss_of(parallel(model, mesh)), wanted, rtol=1e-12, atol=0)
    model = stock_model("llama-untied")
    model.config.output_hidden_states = True
    with hooks_disabled(model):
        assert not any(module._forward_hooks for module in model.modules())
        model(**batch)
    assert len(model(**batch).hidden_states) == model.config.num_hidden_layers + 1


def test_hooks_of_transformers_are_kept() -> None:
    run_on_ranks(2, look_at_hidden_states)


def test_hooks_of_a_program_run_on_the_rank_of_their_layer() -> None:
    assert run_on_ranks(2, watch) == [[8, 0], [0, 8]]


def set_on_a_pipeline() -> None:
    model = parallel(stock_model("llama-untied"), {"pp": 2})
    for name in ("loss_function", "forward", "config", "training", "lm_head", "generate"):
        with pytest.raises(ModelError, match=f"^{name} of a model over pp cannot be set[:;] "):
            setattr(model, name, None)
    model.note = "of a program's own"
    assert model.note == "of a program's own"
    before = model.generation_config
    model.generation_config = type(before)(max_new_tokens=3, num_beams=2)
    assert all(stage.model.generation_config.num_beams == 2 for stage in meshtrain.api.handle.pipeline_of(model).stages)
    assert model.generate(padded_batches()[0]["input_ids"][:2]).shape == (2, 11)


def test_attributes_set_on_a_pipeline_take_effect_or_are_refused() -> None:
    run_on_ranks(2, set_on_a_pipeline)
