"""Tokens that a model has rows for."""

from torch import Tensor

from meshtrain.config.mesh import MODEL_AXES
from meshtrain.errors import DataError
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import axis_size


def check_tokens(pipeline: Pipeline, ids: object, *, what: str = "input_ids") -> None:
    """Check that the model knows all tokens, where neither its embedding nor its loss would tell.

    Split over tp, an embedding gives zeros for a token that no process has a row for, and a loss takes the logit of
    such a label for 0; under pp the other stages would wait.

    Args:
        pipeline: that is to compute.
        ids: token ids; anything else is not looked at.
        what: the name that they have in the batch.

    Raises:
        DataError: if there are others.
    """
    if not isinstance(ids, Tensor) or ids.numel() == 0 or axis_size(pipeline.mesh, *MODEL_AXES) == 1:
        return
    low, high = (int(bound) for bound in ids.aminmax())
    known = int(pipeline.stages[0].model.config.get_text_config().vocab_size)
    if low < 0 or high >= known:
        raise DataError(
            f"{what} has tokens from {low} to {high}, but the model knows 0 to {known - 1}; use the tokenizer that "
            "belongs to the model, or give new tokens rows (model.resize_token_embeddings) before meshtrain.parallelize"
        )
