"""Know before a launch what a plan needs: memory, floating-point operations and messages.

assembly: the steps of all processes, from the simulations of a few.
calibration: measures the machine at hand.
changes: changes of a plan that need less memory.
command: what `meshtrain plan --gpu` does.
cores: computes something on all cores.
machine: the accelerator that a plan is sized for.
memory: the memory of a process over a step.
names: how processes and sizes are named.
needs: what the processes of a run need.
page: the page with drawings.
remarks: sentences about the needs.
report: print the tables and the remarks.
search: the plans that train a run fastest.
simulation: the step of one process, on fake tensors.
sizing: a run on a machine, all in one.
speed: how long a step takes.
tables: the tables of the needs.
totals: messages and floating-point operations of a step.
verdict: whether a run fits.
"""
