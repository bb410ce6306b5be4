"""Text from a parallel model."""

from typing import Any

from torch import Tensor

from meshtrain.api.handle import handle_of
from meshtrain.inference.generation import check_prompts, generate_on_mesh
from meshtrain.parallel.pipeline import Pipeline


def generate(model: Any, inputs: Tensor | None = None, **options: Any) -> Any:
    """Let a parallel model write, as transformers' `generate` does. Collective: every process of the program calls it.

    It computes in evaluation mode, with a cache of keys and values for each stage. It is the same as
    `model.generate(inputs, **options)`.

    Args:
        model: what `parallelize` returned, or an adapter of peft around it; in a hook `state.model`.
        inputs: token ids (batch, seq), left-padded where their lengths differ. Processes that share a model (its tp and
            pp axes) give the same, and draw what the first of them would draw by itself; on other dp ranks there may
            be other prompts, of other shapes.
        options: what transformers' `generate` takes: `attention_mask` (batch, seq), `max_new_tokens`, `do_sample`,
            `num_beams`, a `generation_config`, stopping criteria (which decide alike on the
            processes of one model) and so on; a `streamer` on one process alone, if you like.

    Returns:
        Token ids (batch, seq + new tokens), the same as the stock model gives, on every process; or what else
        transformers' `generate` returns, if it is asked for `return_dict_in_generate`.

    Raises:
        ModelError: if the parameters have no values yet; under a pipeline also for a model whose cache holds something
            else than keys and values.
        UserError: if processes of one model are given different things, prompts without tokens, or `max_time`, which
            would stop each by its own clock; under a pipeline also for attentions, hidden
            states and input embeddings, which no process has whole.

    Source: transformers.GenerationMixin.generate, which runs on every process.
    """
    handle = handle_of(model)
    handle.check_values()
    if inputs is not None:
        check_prompts("generate: inputs", inputs)
        inputs = inputs.to(handle.device)
    if isinstance(model, Pipeline):
        # Of a run, as its hooks are given it.
        return generate_on_mesh(model, inputs, **options)
    return model.generate(inputs, **options)
