"""Pictures and pages without a plotting library: SVG and HTML, as text.

Pages
    page: a page of sections; paragraphs, tables, lists of values, and drawings in them.
    style: the style sheet.
    colors: the colors, for light and for dark.

Drawings
    mesh_grid: the processes of a mesh, and what each of them holds.
    memory: the memory of processes at the peak, and over a step.
    pipeline_lanes: the timeline of a pipeline.
    message_bars: bytes of messages by axis of the mesh.
    stacked_bars: bars of parts, against a limit.
    line_chart: lines over the steps of a run.
    svg: pieces of SVG.
    scales: scales, round ticks and units.

Data
    timeline: what processes do, and when.
    tables: a table, which the screen and a page show alike.
"""
