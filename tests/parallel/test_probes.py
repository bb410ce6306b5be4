"""The behavior of unknown modules is detected by running them."""

import pytest
import torch
from torch import nn
from transformers.models.bart.modeling_bart import BartLearnedPositionalEmbedding, BartScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from meshtrain.parallel.tensor.probes import has_place_for_none, looks_up_rows


@pytest.mark.parametrize(
    ("embedding", "looks_up"),
    [
        (nn.Embedding(8, 4), True),
        (Gemma3TextScaledWordEmbedding(8, 4, 0, embed_scale=2.0), True),
        (BartScaledWordEmbedding(8, 4, 0, embed_scale=2.0), True),
        (BartLearnedPositionalEmbedding(8, 4), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_looks_up_rows_detects_plain_lookups(embedding: nn.Embedding, looks_up: bool) -> None:
    embedding.register_forward_hook(lambda *_: pytest.fail("a hook of the program was called"))
    assert looks_up_rows(embedding.to("meta")) == looks_up
    assert type(embedding).__mro__.count(nn.Embedding) == 1


def test_experts_that_skip_an_index_after_the_last_are_detected() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_local_experts": 4, "experts_implementation": "eager"}
    with torch.device("meta"):
        mixtral, gpt_oss = MixtralExperts(MixtralConfig(**sizes)), GptOssExperts(GptOssConfig(**sizes))
    assert has_place_for_none(mixtral, 4, 8)
    assert not has_place_for_none(gpt_oss, 4, 8)
