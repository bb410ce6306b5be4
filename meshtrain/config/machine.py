"""The description of a machine that a plan is sized for."""

from typing import Annotated

from pydantic import Field

from meshtrain.config.settings import Fraction, Positive, Settings


class MachineConfig(Settings):
    """An accelerator, in one TOML file."""

    memory_gib: Positive
    """Memory of one accelerator that torch can allocate, in GiB."""
    reserved_gib: Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)]
    """Memory that is in use besides tensors, in GiB: the context of CUDA, the buffers of NCCL, the
    workspace of cuBLAS."""
    fragmentation: Fraction
    """Memory that torch's allocator holds in unusable pieces, as a fraction of the peak."""
    source: str
    """Where these numbers come from."""
    measured: bool = False
    """Whether they were measured with meshtrain."""
