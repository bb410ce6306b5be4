"""Report of what the steps of a corpus did.

tables  Prints tables on the screen, and collects what the page shows.
page    Writes the HTML page with charts.
"""
