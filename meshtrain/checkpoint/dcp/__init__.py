"""Save and load tensors with torch's distributed checkpoints (DCP), on any mesh.

- `planner`: which block of each tensor a process writes or reads.
- `reading`: read tensors from a checkpoint on one process, without a process group.
- `store`: save and load checkpoints on all ranks together.
"""
