"""A trial of routers: whether what transformers records of them are logits, one row per token."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.compat.transformers import router_recorder
from meshtrain.parallel.cut.probe import no_router_logits
from meshtrain.parallel.routers.formulas import find_routers
from meshtrain.parallel.tiny_model import BATCH, LENGTH, copies_must_run, tiny_model, tried_once


@tried_once
def returns_logits(model: PreTrainedModel) -> bool:
    """Return whether the routers of a model return logits, before softmax or sigmoid.

    Routers without weights have logits of 0, and no probability is 0.

    Args:
        model: whose routers transformers records.

    Raises:
        ModelError: if no tiny copy of the model runs.
    """
    tiny, found = tiny_model(model, 1), list[Tensor]()
    recorder = router_recorder(tiny)
    assert recorder is not None, "the model was not checked"

    def keep(router: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        found.append(output[recorder.index] if isinstance(output, tuple) else output)

    with torch.no_grad(), copies_must_run(tiny):
        for _, router in find_routers(tiny, recorder):
            for parameter in router.parameters():
                parameter.zero_()
            router.register_forward_hook(keep)
        tiny(input_ids=torch.ones(BATCH, LENGTH, dtype=torch.long), use_cache=False, **no_router_logits(tiny))
    # A router that is not called shows nothing.
    return bool(found) and all(it.dim() == 2 and len(it) == BATCH * LENGTH and not it.any() for it in found)
