"""Check that a model has rows for the tokens of a batch."""

from torch import Tensor

from meshtrain.config.mesh import MODEL_AXES
from meshtrain.errors import DataError
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import axis_size


def check_tokens(pipeline: Pipeline, ids: object, *, what: str = "input_ids") -> None:
    """Check that the model knows all tokens, if neither its embedding nor its loss would fail.

    An embedding that is split over tp returns zeros for a token without a row. The loss takes 0 as
    the logit of such a label. Under pp the other stages would wait.

    Args:
        pipeline: the pipeline that will compute.
        ids: token ids. Anything that is not a tensor is not checked.
        what: the name of the ids in the batch.

    Raises:
        DataError: if the model does not know some of the tokens.
    """
    if not isinstance(ids, Tensor) or ids.numel() == 0 or axis_size(pipeline.mesh, *MODEL_AXES) == 1:
        return
    low, high = (int(bound) for bound in ids.aminmax())
    known = int(pipeline.stages[0].model.config.get_text_config().vocab_size)
    if low < 0 or high >= known:
        raise DataError(
            f"{what} has tokens from {low} to {high}, but the model knows 0 to {known - 1}",
            "use the tokenizer of the model, or add rows for new tokens (model.resize_token_embeddings) before "
            "meshtrain.parallelize",
        )
