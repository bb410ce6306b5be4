"""Processes of a run: how they start, communicate, agree, watch each other, fail together and stop.

Start and end of a process:
- `launch`: start the processes of a run on this machine, as torchrun does.
- `process`: device, process group and store of one process, from start to end.
- `fork_server`: fork ranks from a process that has imported what they need.
- `apart`: run commands in processes of their own.
- `environment`: the variables that torchrun and Slurm set.
- `signals`: requests to stop, and stacks after a crash.
- `lifetime`: whether processes are alive, and processes that end with their parent.
- `exit_codes`: what the exit codes mean.
- `ranks`: call a function on several ranks of this machine.

Communication:
- `hosts`: check that all machines reach each other.
- `mesh`: one coordinate system for all processes.
- `agreement`: processes that exchange their problems and fail together.

Failures:
- `guard`: when one process fails, all stop and report the cause.
- `failure`: the reason of a failure, as text and JSON.
- `activity`: step and phase of a process, and how long they may take.
- `hang`: find the process that the others wait for.
- `flight_recorder`: the latest collectives of a process.

Files and memory:
- `lock`: one process at a time writes into a folder.
- `claims`: the files of which a lock consists.
- `location`: a path on this machine, or a URL.
- `disk`: flush files to the disk.
- `digest`: short hashes that compare tensors across processes.
- `garbage_collection`: run Python's garbage collector rarely.
- `host_memory`: keep the memory of tensors that are freed.
"""
