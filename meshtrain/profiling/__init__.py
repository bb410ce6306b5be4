"""What a run really did: its measured timeline, memory and messages, and the report of a run.

files: the prediction and the profile that a run directory may hold.
"""
