"""The executor of datatrove: what it does for one task."""

from datatrove.executor import LocalPipelineExecutor
from datatrove.utils.stats import PipelineStats


class TaskExecutor(LocalPipelineExecutor):
    """datatrove's executor for this machine, which runs each task through `run_task`.

    Why: only a private method surrounds a task, and can handle its output and the end of its
    process.
    Holds: datatrove 0.10.
    """

    def run_task(self, rank: int, local_rank: int, node_rank: int) -> PipelineStats:
        """Run one task in this process, and return its statistics."""
        return super()._run_for_rank(rank, local_rank, node_rank)

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> PipelineStats:
        return self.run_task(rank, local_rank, node_rank)
