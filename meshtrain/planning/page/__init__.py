"""The page that `meshtrain plan --html` writes.

page: the sections.
mesh: which process holds what.
memory: memory at the peak and over the step.
curve: the memory of a process at a few moments of the step.
time: the timeline and the messages.
constants: the description of the machine.
"""
