"""What a run really did: its measured timeline, memory and messages, and the report of a run.

files: the prediction and the profile that a run directory may hold.
hook: measures a few steps of a run, and writes their profile.
stopwatch: times of the phases of a step. tracer: the trace of one step.
trace, messages, peak: what the events of a trace say.
report: the lines that show a profile. comparison: predicted beside measured numbers.
"""
