"""Text generation with a parallel model."""

from typing import Any

from torch import Tensor

from meshtrain.api.handle import handle_of
from meshtrain.inference.generation import check_prompts, generate_on_mesh
from meshtrain.parallel.pipeline import Pipeline


def generate(model: Any, inputs: Tensor | None = None, **options: Any) -> Any:
    """Generate text with a parallel model, as transformers' `generate` does. Collective.

    Every process of the program calls it. It computes in evaluation mode, with a cache of keys and
    values for each stage. It is the same as `model.generate(inputs, **options)`.

    Args:
        model: what `parallelize` returned, or an adapter of peft around it; in a hook
            `state.model`.
        inputs: token ids (batch, seq), left-padded where their lengths differ. Processes that share
            a model (its tp and pp axes) pass the same ids, and draw what the first of them would
            draw alone. Other dp ranks may pass other prompts, of other shapes.
        options: what transformers' `generate` takes: `attention_mask` (batch, seq),
            `max_new_tokens`, `do_sample`, `num_beams`, a `generation_config`, stopping criteria
            (which must decide alike on the processes of one model) and so on. A `streamer` may be
            passed on one process alone.

    Returns:
        Token ids (batch, seq + new tokens), the same as those of the stock model, on every process;
        or, with `return_dict_in_generate`, what else transformers' `generate` returns.

    Raises:
        ModelError: if the parameters have no values yet; under a pipeline also for a model whose
            cache holds something other than keys and values.
        UserError: if processes of one model pass different things, prompts without tokens, or
            `max_time`, which would stop each by its own clock; under a pipeline also for
            attentions, hidden states and input embeddings, which no process has in full.

    Source: transformers.GenerationMixin.generate, which runs on every process.
    """
    handle = handle_of(model)
    handle.check_values()
    if inputs is not None:
        check_prompts("generate: inputs", inputs)
        inputs = inputs.to(handle.device)
    if isinstance(model, Pipeline):
        # The model of a run, as its hooks receive it.
        return generate_on_mesh(model, inputs, **options)
    return model.generate(inputs, **options)
