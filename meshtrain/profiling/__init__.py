"""What a run really did: its measured timeline, memory and messages, and the report of a run.

known_machine: the machine for which a run is predicted.
prediction: what is predicted for a run. prediction_hook: shows it beside what the run did.
prediction_file: keeps it in the run directory.
files: the prediction and the profile that a run directory may hold.
hook: measures a few steps of a run, and writes their profile.
stopwatch: times of the phases of a step. tracer: the trace of one step.
trace, messages, peak: what the events of a trace say.
lines: what is printed of a profile. comparison: predicted beside measured numbers.
report: the report of a run.
"""
