"""Check that all ranks call a parallel model alike, whatever rows each one passes."""

import torch
import torch.distributed as dist
import xxhash

from meshtrain.config.mesh import AXES
from meshtrain.errors import ModelError
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import all_reduce_over, axis_size


def check_same_call(pipeline: Pipeline, *, has_labels: bool) -> None:
    """Check that all ranks or none compute a loss, and train the same parameters. Collective.

    It is collective over all axes. A rank with a loss would wait for those without one, and copies
    of a parameter that is frozen on one rank alone would silently drift apart.

    Args:
        pipeline: of the model that is called.
        has_labels: whether this rank has passed labels.

    Raises:
        ModelError: on all ranks alike.
    """
    if axis_size(pipeline.mesh, *AXES) == 1:
        return
    trains = [parameter.requires_grad for _, parameter in pipeline.named_parameters()]
    digest = xxhash.xxh3_64_intdigest(bytes([has_labels, *trains])) >> 2
    # One message carries the maximum and, negated, the minimum.
    extremes = all_reduce_over(torch.tensor([digest, -digest]), pipeline.mesh, AXES, dist.ReduceOp.MAX)
    if int(extremes[0]) != -int(extremes[1]):
        raise ModelError(
            f"rank {dist.get_rank()} calls the model {'with' if has_labels else 'without'} labels and trains "
            f"{sum(trains)} of {len(trains)} parameters, another rank does otherwise; pass labels on all ranks or on "
            "none, and freeze the same parameters on all"
        )
