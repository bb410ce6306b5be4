"""Losses of whole answers that people have judged, and the reference that they compare with."""
