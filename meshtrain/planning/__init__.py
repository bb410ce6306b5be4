"""Know before a launch what a plan needs: memory, floating-point operations and messages.

changes: changes of a plan that need less memory.
command: what `meshtrain plan --gpu` does.
machine: the accelerator that a plan is sized for.
memory: the memory of a process over a step.
report: the tables that are printed.
simulation: the step of any process, on fake tensors.
totals: messages and floating-point operations of a step.
"""
