"""The picture of a drill: requests as rows, time to the right, faults as marks, waits visible. Pure.

▼ over the rows   a fault                 █ ▆ ▃   tokens arrived, many or few
·                 before the first token  ─       no token for a while, though the stream is open
✓ ✗               the end: with an answer, with an error
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drills.verdict import Mark, Verdict

_LEVELS = "▃▆█"
_NAME_WIDTH = 26

Column = Callable[[float], int]


@dataclass(frozen=True, slots=True)
class Row:
    """One request. Times in seconds on one clock; `arrivals` are (time, tokens)."""

    name: str
    started_s: float
    ended_s: float
    arrivals: tuple[tuple[float, int], ...]
    failed: bool = False
    failed_over: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One round of a drill: all of it on one clock."""

    title: str
    rows: tuple[Row, ...]
    marks: tuple[Mark, ...]

    @property
    def begin_s(self) -> float:
        return min((row.started_s for row in self.rows), default=0.0)

    @property
    def span_s(self) -> float:
        return max(max((row.ended_s for row in self.rows), default=0.0) - self.begin_s, 1e-3)


def draw(panels: Sequence[Panel], width: int = 100) -> list[str]:
    """Lines for a terminal of `width` columns."""
    return [line for panel in panels for line in _draw_panel(panel, width)]


def page(verdicts: Sequence[Verdict], pictures: Sequence[Sequence[Panel]]) -> str:
    """One HTML document with every drill's verdict and picture. Refers to nothing outside itself."""
    parts = [_section(verdict, panels) for verdict, panels in zip(verdicts, pictures, strict=True)]
    return _PAGE.replace("@BODY@", "\n".join(parts))


def _draw_panel(panel: Panel, width: int) -> list[str]:
    columns = max(20, width - _NAME_WIDTH - 2)

    def column(at_s: float) -> int:
        return min(columns - 1, max(0, int((at_s - panel.begin_s) / panel.span_s * columns)))

    faults = [" "] * columns
    for mark in panel.marks:
        faults[column(mark.at_s)] = "▼"
    most = max((tokens for row in panel.rows for tokens in _per_column(row, column, columns)), default=1)
    end = f"{panel.span_s:.1f} s"
    return [
        _line(panel.title, faults),
        *(_line(_label(row), _cells(row, column, columns, most)) for row in panel.rows),
        _line("", "0 s" + end.rjust(columns - 3)),
    ]


def _label(row: Row) -> str:
    return f"{'↷' if row.failed_over else ' '} {row.name}"[:_NAME_WIDTH]


def _line(label: str, cells: Sequence[str]) -> str:
    return f"{label[:_NAME_WIDTH]:<{_NAME_WIDTH}} {''.join(cells)}".rstrip()


def _per_column(row: Row, column: Column, columns: int) -> list[int]:
    counts = [0] * columns
    for at_s, tokens in row.arrivals:
        counts[column(at_s)] += tokens
    return counts


def _cells(row: Row, column: Column, columns: int, most: int) -> list[str]:
    first, last = column(row.started_s), column(row.ended_s)
    counts = _per_column(row, column, columns)
    reached = next((index for index, tokens in enumerate(counts) if tokens), columns)
    cells = [" "] * columns
    for index in range(first, last + 1):
        if counts[index]:
            cells[index] = _LEVELS[min(len(_LEVELS) - 1, (counts[index] * len(_LEVELS) - 1) // most)]
        else:
            cells[index] = "·" if index < reached else "─"
    cells[last] = "✗" if row.failed else "✓"
    return cells


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>pdserve drills</title><style>
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; color: #1d2733; }
h2 { margin-bottom: 0; } h3 { margin: .6rem 0 0; font-weight: normal; }
.PASS { color: #14723b; } .FAIL { color: #b3261e; } .SKIPPED { color: #6b7280; }
svg { width: 100%; height: auto; background: #f7f8fa; border-radius: 4px; } text { font: 11px system-ui, sans-serif; }
table { border-collapse: collapse; } td, th { padding: 0 1rem 0 0; text-align: left; font-weight: normal; }
th { color: #6b7280; }
</style></head><body><h1>pdserve drills</h1>
<p>Each row is a request, each bar its tokens as they arrived; red lines are faults, a gap in a row is a wait.
↷: the request went on elsewhere.</p>
@BODY@
</body></html>
"""
_SVG_WIDTH, _SVG_LEFT, _ROW_HEIGHT, _LETTER_WIDTH = 1000, 200, 16, 7


def _section(verdict: Verdict, panels: Sequence[Panel]) -> str:
    heading = f'<h2>{html.escape(verdict.drill)} <span class="{verdict.status}">{verdict.status}</span></h2>'
    reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in verdict.reasons)
    figures = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(_in_words(value))}</td></tr>"
        for name, value in verdict.as_dict().items()
        if name not in ("drill", "status", "reasons") and value not in (None, {})
    )
    pictures = "".join(f"<h3>{html.escape(panel.title)}</h3>{_svg(panel)}" for panel in panels)
    return f"<section>{heading}<ul>{reasons}</ul><table>{figures}</table>{pictures}</section>"


def _in_words(value: object) -> str:
    return ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else str(value)


def _svg(panel: Panel) -> str:
    height = (len(panel.rows) + 2) * _ROW_HEIGHT

    def x(at_s: float) -> float:
        share = min(1.0, max(0.0, (at_s - panel.begin_s) / panel.span_s))
        return _SVG_LEFT + share * (_SVG_WIDTH - _SVG_LEFT - 10)

    shapes = [shape for number, row in enumerate(panel.rows, 1) for shape in _svg_row(row, number * _ROW_HEIGHT, x)]
    labelled = 0.0  # up to where marks' words reach: where they would overlap, the line alone is drawn
    for mark in sorted(panel.marks, key=lambda each: each.at_s):
        at, title = x(mark.at_s), html.escape(f"{mark.fault} {mark.victim}, {mark.phase}")
        line = f'<line x1="{at:.1f}" x2="{at:.1f}" y1="12" y2="{height - 12}" stroke="#b3261e">'
        shapes.append(f"{line}<title>{title}</title></line>")
        if at >= labelled:
            shapes.append(f'<text x="{at + 3:.1f}" y="11" fill="#b3261e">{html.escape(mark.fault)}</text>')
            labelled = at + 3 + _LETTER_WIDTH * len(mark.fault)
    shapes.append(f'<text x="{_SVG_LEFT}" y="{height - 3}">0 s</text>')
    shapes.append(f'<text x="{_SVG_WIDTH - 50}" y="{height - 3}">{panel.span_s:.1f} s</text>')
    return f'<svg viewBox="0 0 {_SVG_WIDTH} {height}" role="img">{"".join(shapes)}</svg>'


def _svg_row(row: Row, y: int, x: Callable[[float], float]) -> list[str]:
    begin, end = x(row.started_s), x(row.ended_s)
    colour = "#b3261e" if row.failed else "#14723b"
    ticks = [
        f'<rect x="{x(at_s):.1f}" y="{y + 3}" width="1.5" height="10" fill="#2f6fb3"/>' for at_s, _ in row.arrivals
    ]
    return [
        f'<text x="4" y="{y + 11}">{html.escape(_label(row))}</text>',
        f'<rect x="{begin:.1f}" y="{y + 7}" width="{end - begin:.1f}" height="2" fill="#c5cbd3"/>',
        *ticks,
        f'<circle cx="{end:.1f}" cy="{y + 8}" r="3" fill="{colour}"/>',
    ]
