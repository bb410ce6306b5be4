"""The ranks of the tests: one fork server for the whole session, with everything imported that the tests need."""

import os

from meshtrain.runtime.ranks import RankError, preload, run_on_ranks

__all__ = ["RankError", "run_on_ranks"]

os.environ.update({"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
preload(
    [
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen3.modeling_qwen3",
    ]
)
