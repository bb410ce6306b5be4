"""The loss of a run: of tokens, of judged answers, or with a teacher."""

from meshtrain.config.distillation import NO_DISTILLATION, DistillationConfig
from meshtrain.config.mesh import CP
from meshtrain.config.objective import ObjectiveConfig
from meshtrain.config.preference import PreferenceConfig
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import axis_size
from meshtrain.training.distillation.loss import build_distillation_loss
from meshtrain.training.distillation.passes import BuiltTeacher
from meshtrain.training.loss import TokenLoss, build_loss
from meshtrain.training.objective import build_objective
from meshtrain.training.preference.loss import DpoLoss, PreferenceLoss
from meshtrain.training.preference.others import KtoLoss, OrpoLoss
from meshtrain.training.preference.rows import build_row_log_probs
from meshtrain.training.weighted_loss import build_weighted_loss

ANSWERS: dict[str, type[PreferenceLoss]] = {"dpo": DpoLoss, "orpo": OrpoLoss, "kto": KtoLoss}


def build_run_loss(
    pipeline: Pipeline,
    objective: ObjectiveConfig,
    preference: PreferenceConfig,
    *,
    has_weights: bool,
    distillation: DistillationConfig = NO_DISTILLATION,
    teacher: BuiltTeacher | None = None,
) -> TokenLoss:
    """Return the loss of a run, for logits as the last stage of its pipeline returns them.

    At most one of the following changes the cross-entropy.

    Args:
        pipeline: of the model that trains.
        objective: for a loss of tokens.
        preference: for a loss of answers.
        has_weights: whether labels have weights.
        distillation: for a loss with a teacher.
        teacher: on the same mesh, if the run has one.
    """
    if teacher is not None:
        return build_distillation_loss(pipeline, teacher, distillation)
    if has_weights:
        return build_weighted_loss(pipeline)
    if preference.loss is None:
        return build_objective(pipeline, objective)
    tokens = build_loss(pipeline)
    rows = build_row_log_probs(pipeline, tokens)
    kind = ANSWERS[preference.loss]
    return kind(tokens.vocabulary, tokens.group, preference, rows, axis_size(pipeline.mesh, CP))
