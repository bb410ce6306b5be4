"""Check that the experts of a model can lie on several ranks of ep."""

from transformers import PreTrainedModel

from meshtrain.compat.nn import own_forward
from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import ModelError, Problem
from meshtrain.models.patterns import as_pattern
from meshtrain.parallel.check.batch import BatchShape
from meshtrain.parallel.experts.stacks import expert_parameters, expert_stacks, num_experts
from meshtrain.parallel.experts.trial import sums_weighted_results
from meshtrain.parallel.tensor.rules import Problems
from meshtrain.parallel.tensor.styles import STYLES


def check_experts(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    """Yield why the experts of a model, or the rules of a plan, do not fit ep."""
    ep = plan.mesh.ep
    if ep == 1:
        return
    stacks = expert_stacks(model)
    if not stacks:
        yield Problem(f"mesh.ep = {ep}: {type(model).__name__} has no stacked experts", "use ep = 1")
        return
    replaced = [name for name, stack in stacks.items() if own_forward(stack) is not None]
    if replaced:
        yield Problem(
            f"mesh.ep = {ep}: the forward of {replaced[0]} was replaced, and it would not see the experts of other "
            "processes",
            "leave it as it is, or use ep = 1",
        )
        return
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair} & expert_parameters(model)
    if tied:
        yield Problem(f"mesh.ep = {ep}: several stacks of experts share {sorted(tied)[0]}", "use ep = 1")
        return
    try:
        numbers = {as_pattern(name): num_experts(stack) for name, stack in stacks.items()}
        if not sums_weighted_results(model):
            raise ModelError(f"{type(model).__name__} does not sum the results of its experts by their weights")
    except ModelError as error:
        yield Problem(f"mesh.ep = {ep}: {error.problems[0].found}", "use ep = 1")
        return
    for name, number in numbers.items():
        if number % ep:
            ways = [way for way in range(1, number + 1) if number % way == 0]
            yield Problem(
                f"mesh.ep = {ep} does not divide the {number} experts of {name}",
                f"use one of {', '.join(map(str, ways))}",
            )
    whole = {style for style in plan.tensor.styles.values() if STYLES[style].shards == "experts"}
    if plan.mesh.tp > 1 and whole:
        yield Problem(
            f"mesh.ep = {ep} with tensor style {whole.pop()!r}: the processes of ep hold whole experts already",
            "make it 'moe_tp_experts' (`tensor.experts` = \"tensor\"), which divides each expert over tp",
        )
