"""Tables of a run file that exclude each other, or need a value of another table."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from meshtrain.config.objective import STOCK_OBJECTIVE
from meshtrain.errors import ConfigError

if TYPE_CHECKING:
    from meshtrain.config.run import RunConfig

ONE_OF_THEM = "leave out one of them"
_Problems = Iterable[ConfigError]


def check_combinations(run: "RunConfig") -> None:
    """Check that the tables of a run go together.

    Raises:
        ConfigError: for the first contradiction.
    """
    for problems in (_of_ramp, _of_optimizer, _of_weights, _of_adapters, _of_records, _of_answers, _of_teacher):
        for problem in problems(run):
            raise problem


def _of_ramp(run: "RunConfig") -> _Problems:
    if problem := run.batch_ramp.problem_with(run.global_batch_size):
        yield problem
    if run.batch_ramp.first is None:
        return
    for key, value in (("epochs", run.epochs), ("data.group_by_length", run.data.group_by_length)):
        if value is not None:
            yield ConfigError(
                f"`{key}` = {value} counts steps of one size, and `batch_ramp` has several",
                f"{ONE_OF_THEM}{' and set `steps`' if key == 'epochs' else ''}",
            )


def _of_optimizer(run: "RunConfig") -> _Problems:
    parameters, name, schedule = run.plan.precision.parameters, run.optimizer.name, run.learning_rate.name
    if run.optimizer.state == "bfloat16" and parameters != "float32":
        yield ConfigError(
            f"`optimizer.state` = 'bfloat16' is for parameters in float32, found {parameters!r}",
            "leave it out, or set plan.precision.parameters = 'float32'",
        )
    if not run.optimizer.averages_weights:
        return
    if schedule not in ("constant", "constant_with_warmup"):
        yield ConfigError(
            f"`learning_rate.name` = {schedule!r}, and the optimizer {name!r} replaces a schedule by its average",
            'set `learning_rate.name` = "constant_with_warmup" and `learning_rate.warmup_steps`',
        )
    if run.ema.decay is not None:
        yield ConfigError(f"`ema.decay` averages the weights, as the optimizer {name!r} does itself", ONE_OF_THEM)


def _of_weights(run: "RunConfig") -> _Problems:
    if run.data.has_weights and run.objective != STOCK_OBJECTIVE:
        yield ConfigError(
            "`objective` changes the loss, and weights (`weight_key` in `data`) are those of the cross-entropy",
            ONE_OF_THEM,
        )


def _of_adapters(run: "RunConfig") -> _Problems:
    if run.lora.rank is None:
        return
    if run.model.weights != "pretrained":
        yield ConfigError(
            f"`lora.rank` = {run.lora.rank} trains adapters beside frozen weights, and `model.weights` is "
            f"{run.model.weights!r}",
            'set `model.weights` = "pretrained"',
        )
    others = {
        "`model.enlarge_vocabulary` = true adds rows that should train, and `lora.rank` freezes them": (
            run.model.enlarge_vocabulary
        ),
        "`optimizer` has frozen groups, and `lora.rank` trains adapters alone": (
            any(group.frozen for group in run.optimizer.groups)
        ),
        "`optimizer` has the optimizer 'muon', and `lora.rank` trains adapters alone": (
            run.optimizer.takes_whole_matrices
        ),
        "`ema.decay` averages the weights, and `lora.rank` trains adapters, whose average is not exported": (
            run.ema.decay is not None
        ),
        "`router.bias_update_rate` changes the model, which `lora.rank` freezes": run.router.bias_update_rate,
    }
    yield from (ConfigError(problem, ONE_OF_THEM) for problem, is_set in others.items() if is_set)


def _of_records(run: "RunConfig") -> _Problems:
    loss, wanted = run.preference.loss, run.preference.records
    for name, source in run.data.named_sources.items():
        key = run.data.key_of(name, "format")
        if wanted is None:
            if source.is_of_answers:
                yield ConfigError(f'`{key}` = "{source.format}" is for `preference.loss`, which is not set', "set it")
            continue
        if source.format != wanted:
            yield ConfigError(
                f'`preference.loss` = "{loss}" needs `{key}` = "{wanted}", found "{source.format}"',
                "set it, or choose another loss",
            )
        if source.streaming:
            streaming = run.data.key_of(name, "streaming")
            yield ConfigError(
                f'`preference.loss` = "{loss}" needs all records at the start, and `{streaming}` is true',
                "leave it out",
            )


def _of_answers(run: "RunConfig") -> _Problems:
    loss = f'`preference.loss` = "{run.preference.loss}"'
    if run.preference.loss is None:
        return
    if run.data.form != "padded":
        yield ConfigError(
            f'{loss} compares whole answers, and `data.form` is "{run.data.form}"', 'set `data.form` = "padded"'
        )
    if run.objective != STOCK_OBJECTIVE:
        yield ConfigError(f"{loss} replaces the cross-entropy that `objective` changes", ONE_OF_THEM)
    if run.logging.noise_scale_every is not None:
        yield ConfigError(
            f"{loss} is a mean over answers, and `logging.noise_scale_every` measures means over tokens", ONE_OF_THEM
        )


def _of_teacher(run: "RunConfig") -> _Problems:
    if run.distillation.teacher is None:
        return
    others = {
        "`objective` changes the loss": run.objective != STOCK_OBJECTIVE,
        "`preference.loss` is a loss of whole answers": run.preference.loss is not None,
        "`weight_key` weights the tokens of the cross-entropy": run.data.has_weights,
        "`logging.noise_scale_every` measures gradients of the cross-entropy": (
            run.logging.noise_scale_every is not None
        ),
    }
    for problem, is_set in others.items():
        if is_set:
            yield ConfigError(f"{problem}, and `distillation.teacher` has a loss of its own", ONE_OF_THEM)
