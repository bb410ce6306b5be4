"""datatrove: what its local executor does for one task."""

from datatrove.executor import LocalPipelineExecutor
from datatrove.utils.stats import PipelineStats


class TaskExecutor(LocalPipelineExecutor):
    """datatrove's executor for this machine, which runs each task through `run_task`.

    Why: what surrounds a task (its output, the end of its process) has a private method as its only place.
    Holds: datatrove 0.10.
    """

    def run_task(self, rank: int, local_rank: int, node_rank: int) -> PipelineStats:
        """Run one task in this process, and return what it counted."""
        return super()._run_for_rank(rank, local_rank, node_rank)

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> PipelineStats:
        return self.run_task(rank, local_rank, node_rank)
