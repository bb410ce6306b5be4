"""torch.compile: products and messages in pieces."""

import warnings

from torch.distributed import ProcessGroup
from torch.distributed._symmetric_memory import enable_symm_mem_for_group, is_symm_mem_enabled_for_group

PIPELINED_PRODUCTS = {"_micro_pipeline_tp": True}
"""The option with which inductor fuses a gathered tensor and its products, or a product and the
message that scatters its sum.

Why: it has no public name.
Holds: torch 2.13.
"""


def allow_symmetric_memory(group: ProcessGroup) -> None:
    """Let inductor fuse the messages of a group with products.

    Why: the function warns that it is not needed any more, but inductor fuses nothing without it.
    Holds: torch 2.13.
    """
    if not is_symm_mem_enabled_for_group(group.group_name):
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            enable_symm_mem_for_group(group.group_name)
