"""Pictures and pages without a plotting library: SVG and HTML, as text.

timeline: what processes do, and when.
"""
