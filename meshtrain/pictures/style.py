"""The style sheet of pages and of the drawings in them."""

from meshtrain.pictures.colors import GROUNDS, HATCHED, HUES, INKS, MOST_LINES, MUTED_INKS, SERIES, Hue, ink_on

NARROWEST_WIDE = 760
"""Width of a screen in pixels from which wide drawings are shown."""


DASHES = ("none", "7 3", "2 3", "9 3 2 3", "4 2", "1 2")
"""Dashes of the lines of a chart, in order."""


def _variables(dark: bool) -> str:
    index = int(dark)
    colors: dict[str, str] = {name: values[index] for name, values in HUES.items()}
    inks = {f"on-{name}": ink_on(color) for name, color in colors.items()}
    own: dict[str, str] = {
        "ground": GROUNDS[index],
        "ink": INKS[index],
        "muted": MUTED_INKS[index],
        "rule": ("#d5dae0", "#343b44")[index],
        "panel": ("#f5f7f9", "#1c2128")[index],
        "link": ("#0b5cad", "#7cb8f2")[index],
        "alarm": ("#c0182b", "#ff7b7b")[index],
    }
    return ";".join(f"--{name}:{color}" for name, color in [*colors.items(), *inks.items(), *own.items()])


def _hue_and_dash(index: int) -> tuple[Hue, str]:
    """Return how a line of a chart is drawn. A hue that comes again has other dashes."""
    round_, place = divmod(index, len(SERIES))
    return SERIES[place], DASHES[(place + round_) % len(DASHES)]


def _hue_classes() -> str:
    plain = "".join(f".{name}{{fill:var(--{name})}}.on-{name}{{fill:var(--on-{name})}}" for name in HUES)
    hatched = "".join(f".{name}-hatch{{fill:url(#{name}-hatch)}}" for name in HATCHED)
    lines = "".join(
        f".line{index}{{stroke:var(--{hue});stroke-dasharray:{dash}}}.square{index}{{fill:var(--{hue})}}"
        for index, (hue, dash) in enumerate(map(_hue_and_dash, range(MOST_LINES)))
    )
    return plain + hatched + lines


DRAWINGS = """
svg{display:block;max-width:100%;height:auto;overflow:hidden}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",Arial,sans-serif;fill:var(--ink)}
svg .muted{fill:var(--muted)} svg .small{font-size:10.5px} svg .strong{font-weight:600}
svg .alarm{fill:var(--alarm)} svg .halo{paint-order:stroke;stroke:var(--ground);stroke-width:4px;stroke-linejoin:round}
.grid{stroke:var(--rule);stroke-width:1} .frame{stroke:var(--muted);stroke-width:1;fill:none}
.track{fill:var(--panel)} .limit{stroke:var(--alarm);stroke-width:1.5;stroke-dasharray:5 3;fill:none}
.over{stroke:var(--alarm);stroke-width:2;fill:none} .event{stroke:var(--muted);stroke-width:1;stroke-dasharray:2 3}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round} .hover{fill:transparent}
.hover:hover{fill:var(--muted);fill-opacity:.14} .mark{fill:var(--ink)} .cell{stroke:var(--ground);stroke-width:1}
"""
PAGES = f"""
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:1120px;padding:1.25rem 1rem 4rem;background:var(--ground);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",Arial,sans-serif;overflow-wrap:anywhere}}
h1{{font-size:1.6rem;line-height:1.25;margin:0 0 .25rem}} h2{{font-size:1.25rem;margin:2.6rem 0 .6rem;padding-top:.6rem;
border-top:1px solid var(--rule)}} h3{{font-size:1rem;margin:1.4rem 0 .4rem}} p{{margin:.4rem 0}}
p.lead{{color:var(--muted)}} a{{color:var(--link)}}
nav ul{{list-style:none;display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;
padding:0;margin:1rem 0 0}} .box{{overflow-x:auto;max-width:100%}} .box svg{{max-width:none}}
:focus-visible{{outline:2px solid var(--link);outline-offset:2px}}
figure{{margin:.8rem 0 1.4rem}} figcaption{{font-weight:600;font-size:.95rem;margin-bottom:.35rem}}
figure .note,p.note{{color:var(--muted);font-size:.88rem;font-weight:400}}
.charts{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(310px,100%),1fr));gap:.4rem 1.4rem}}
.charts figure{{margin:.4rem 0 .8rem;min-width:0}} .charts svg,.narrow svg{{width:100%}}
table{{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}}
th,td{{padding:.3rem 1.1rem .3rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule);
white-space:nowrap}} th{{color:var(--muted);font-weight:600}} .number{{text-align:right}}
td.long{{min-width:14rem;white-space:normal;overflow-wrap:anywhere}}
dl{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(9.5rem,100%),1fr));gap:.7rem 1rem;margin:.8rem 0}}
dt{{color:var(--muted);font-size:.82rem}} dd{{margin:0;font-size:1.05rem;font-variant-numeric:tabular-nums}}
details{{margin:.6rem 0}} summary{{cursor:pointer;font-weight:600;font-size:.95rem}}
pre{{font:13px/1.5 ui-monospace,Menlo,Consolas,"Liberation Mono",monospace;background:var(--panel);padding:.7rem;
margin:.4rem 0;width:max-content;min-width:100%;overflow-wrap:normal}}
code{{font:.92em ui-monospace,Menlo,Consolas,"Liberation Mono",monospace}}
dd.alarm,p.alarm{{color:var(--alarm)}}
p.verdict{{border-left:5px solid var(--green);padding:.1rem 0 .1rem .8rem;margin:.8rem 0;font-weight:600}}
p.verdict.alarm{{border-color:var(--alarm)}} p.advice{{padding-left:calc(.8rem + 5px)}}
@media (min-width:{NARROWEST_WIDE}px){{.narrow{{display:none}}}}
@media (max-width:{NARROWEST_WIDE - 1}px){{.wide{{display:none}} th,td{{padding-right:.7rem}}
td.long{{min-width:13rem}} dd{{font-size:1rem}}}}
@media print{{body{{max-width:none}} figure,tr{{break-inside:avoid}}}}
"""


def style_sheet() -> str:
    """Return the style sheet of a page."""
    return (
        f":root{{color-scheme:light dark;{_variables(dark=False)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{_variables(dark=True)}}}}}"
        f"{_hue_classes()}{DRAWINGS}{PAGES}"
    )


def patterns() -> str:
    """Return an element that defines the hatches, once for all drawings of a page."""
    drawn = "".join(
        f'<pattern id="{hue}-hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect class="{hue}" width="6" height="6" opacity=".3"/><rect class="{hue}" width="2.5" height="6"/></pattern>'
        for hue in HATCHED
    )
    # Not hidden by `display`: browsers then ignore the patterns.
    return f'<svg width="0" height="0" aria-hidden="true" style="position:absolute">{drawn}</svg>'
