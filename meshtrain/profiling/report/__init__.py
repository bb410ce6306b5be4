"""Report of a run, from the files of its run directory. No torch is loaded.

command: what `meshtrain report` does.
recorded: read the run directory.
figures: numbers that are computed from what was read.
tables: the tables of the report, for the screen and for the page.
comparison: predicted against measured.
charts: the charts of the page.
page: the page.
"""
