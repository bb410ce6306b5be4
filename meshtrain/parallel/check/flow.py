"""Check that the rules of a plan sum all partial gradients, and cut only what can be cut."""

from transformers import PreTrainedModel

from meshtrain.models.patterns import as_pattern
from meshtrain.parallel.tensor.flow import HIDDEN_STATES, Flow, follow_heads
from meshtrain.parallel.tensor.rules import Problems, TensorRules

MISUSED = (
    "is not called: with this configuration the model computes with its weight elsewhere, so it cannot be cut; set "
    "mesh.tp = 1"
)
JOINT = (
    "computes over all heads at once, and each process has a part of them; keep the projections around it whole "
    "('colwise_gather_output' and 'rowwise_split_input'), or set mesh.tp = 1"
)
PER_HEAD = "has parameters for every head, and each process has a part of the heads; make it 'per_head'"
PARTIAL = (
    "works on the heads, or the width, of one process, so its gradient must be summed; make it "
    "'replicated_with_grad_allreduce'"
)
TWICE = "gets the same input on every process, so its gradient would count several times; make it 'replicate'"


def check_flow(model: PreTrainedModel, rules: TensorRules, tp: int) -> Problems:
    """Yield what the layers would compute wrongly, or not at all, on one process of `tp`.

    Args:
        model: on the meta device, unfused.
        rules: that the modules of the model can follow, with heads and widths that tp divides.
        tp: number of processes that share a layer.
    """
    flow = follow_heads(model, rules, tp)
    if not flow.ran:
        # Only rules of the user can get here: rules are never derived from layers that do not run.
        return
    yield from dict.fromkeys(_of_modules(flow, rules)) or _of_layers(flow, type(model).__name__)


def _of_modules(flow: Flow, rules: TensorRules) -> Problems:
    cannot_be_cut = ((flow.misused, MISUSED), (flow.joint, JOINT), (flow.per_head, PER_HEAD))
    # A module that cannot be cut does not run, so what was found after it has no meaning.
    kinds = cannot_be_cut if any(names for names, _ in cannot_be_cut) else ((flow.partial, PARTIAL),)
    for names, problem in (*kinds, (flow.counted_twice, TWICE)):
        for name in names:
            if name != HIDDEN_STATES:
                style = rules.styles.get(name)
                rule = "" if style is None else f" is {style!r}, but it"
                yield f"tensor.styles: {as_pattern(name)}{rule} {problem}"


def _of_layers(flow: Flow, architecture: str) -> Problems:
    if HIDDEN_STATES in flow.partial:
        yield (
            f"tensor.styles: inside the layers of {architecture} a full tensor is combined with the heads, or the "
            "width, of one process, so its gradient would be partial; add the missing rule, or set mesh.tp = 1"
        )
    elif flow.failure is not None:
        yield (
            f"tensor.styles: the layers of {architecture} do not run with the heads of one process ({flow.failure}); "
            "write other rules, or set mesh.tp = 1"
        )
