"""Build the loss of a run, on tokens or on judged answers."""

from meshtrain.config.mesh import CP
from meshtrain.config.objective import ObjectiveConfig
from meshtrain.config.preference import PreferenceConfig
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import axis_size
from meshtrain.training.loss import TokenLoss, build_loss
from meshtrain.training.objective import build_objective
from meshtrain.training.preference.loss import DpoLoss, PreferenceLoss
from meshtrain.training.preference.others import KtoLoss, OrpoLoss
from meshtrain.training.preference.rows import build_row_log_probs

LOSSES: dict[str, type[PreferenceLoss]] = {"dpo": DpoLoss, "orpo": OrpoLoss, "kto": KtoLoss}


def build_run_loss(pipeline: Pipeline, objective: ObjectiveConfig, config: PreferenceConfig) -> TokenLoss:
    """Return the loss of a run, for logits as the last stage of its pipeline returns them.

    Args:
        pipeline: of the run.
        objective: for a loss of tokens.
        config: for a loss of answers.
    """
    if config.loss is None:
        return build_objective(pipeline, objective)
    tokens = build_loss(pipeline)
    rows = build_row_log_probs(pipeline, tokens)
    return LOSSES[config.loss](tokens.vocabulary, tokens.group, config, rows, axis_size(pipeline.mesh, CP))
