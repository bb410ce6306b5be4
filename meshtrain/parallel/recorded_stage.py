"""The stage of torch's schedules, which tells other threads what it computes."""

from typing import Any

from meshtrain.compat.distributed import StaticStage
from meshtrain.runtime.activity import Activity


class RecordedStage(StaticStage):
    """A torch stage that records what it computes in the activity of the process."""

    def __init__(self, activity: Activity, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._activity = activity

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._activity.enter("forward", self.stage_index, fwd_chunk_id)
        result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._activity.enter("after forward", self.stage_index, fwd_chunk_id)
        return result

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._activity.enter("backward", self.stage_index, bwd_chunk_id)
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._activity.enter("after backward", self.stage_index, bwd_chunk_id)
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._activity.enter("backward of weights", self.stage_index, bwd_chunk_id)
        result = super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._activity.enter("after backward of weights", self.stage_index, bwd_chunk_id)
        return result

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self._activity.enter("reduction", self.stage_index)
        super().perform_reduce_grad(grad_scale_factor)
        self._activity.enter("after reduction", self.stage_index)
