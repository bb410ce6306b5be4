"""The torch schedule of a pipeline, for each shape of its batches."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from meshtrain.compat.distributed import TorchSchedule
from meshtrain.compat.schedules import build_schedule
from meshtrain.parallel.borders import received_like, result_like, sent_like
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.head.chunks import LossFunction
from meshtrain.parallel.recorded_stage import RecordedStage
from meshtrain.parallel.sent_messages import SentMessages

if TYPE_CHECKING:
    from meshtrain.parallel.pipeline import Pipeline


class LossOfStep:
    """A function that calls the loss function of the present step.

    A torch schedule takes one loss function for all steps, and `step(loss_kwargs=...)` needs
    torch 2.13.
    """

    function: LossFunction

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.function(output, target)


class StepSchedule(NamedTuple):
    """The torch schedule for one shape of a batch, the loss that it calls, and what it sends."""

    torch_schedule: TorchSchedule
    loss: LossOfStep
    sent: SentMessages | None


def schedule_for(pipeline: "Pipeline", labels: Tensor) -> StepSchedule:
    """Return the schedule for batches of one shape, which is built when it is first needed.

    Args:
        pipeline: with several stages.
        labels: of this process (rows, seq).
    """
    # A torch stage has one static shape, so each shape of a batch needs its own schedule.
    shape = tuple(labels.shape)
    if shape not in pipeline.schedules:
        loss = LossOfStep()
        assert pipeline.peers is not None, "a pipeline has a group for its messages"
        # 1F1B waits for each message itself, together with one that it receives.
        waits = pipeline.plan.pipeline.schedule == "1F1B"
        sent = None if waits else SentMessages(pipeline.peers, labels.device)
        pipeline.schedules[shape] = StepSchedule(_build(pipeline, labels, loss, sent), loss, sent)
    return pipeline.schedules[shape]


def _build(
    pipeline: "Pipeline", labels: Tensor, loss_function: LossFunction, sent: SentMessages | None
) -> TorchSchedule:
    schedule_class = get_schedule_class(pipeline.plan.pipeline.schedule)
    stages = [_torch_stage(pipeline, stage, labels, sent) for stage in pipeline.stages]
    return build_schedule(
        schedule_class,
        stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0],
        n_microbatches=labels.shape[0] // pipeline.micro_batch_size,
        loss_fn=loss_function,
        # The loss is already divided by the global token count, and torch would divide again.
        scale_grads=False,
    )


def _torch_stage(pipeline: "Pipeline", stage: Stage, labels: Tensor, sent: SentMessages | None) -> PipelineStage:
    batch, length = pipeline.micro_batch_size, labels.shape[1]
    ids = torch.empty(batch, length, dtype=torch.long, device="meta")
    takes = [ids] if stage.is_first else received_like(pipeline, stage, batch, length)
    returns = (
        [result_like(pipeline, labels).requires_grad_()] if stage.is_last else sent_like(pipeline, stage, batch, length)
    )
    return RecordedStage(
        pipeline.activity,
        stage.model,
        stage.index,
        stage.num_stages,
        labels.device,
        input_args=tuple(takes),
        output_args=tuple(returns),
        group=pipeline.peers,
        frees_gathered=pipeline.plan.shard.reshard_after_forward == "always",
        reduces_each=pipeline.plan.shard.reduces_each_microbatch,
        sent=sent and sent.add,
    )
