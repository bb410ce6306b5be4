"""How long a step takes on a machine.

clock: the time of one process.
rates: seconds of an operator and of a message.
replay: the steps of all processes of a pipeline, event by event.
step_time: the seconds of a step, and where they go.
"""
