"""The picture of a drill: requests as rows, time to the right, faults as marks, waits visible. Pure.

▼ over the rows   a fault                 █ ▆ ▃   tokens arrived, many or few
·                 before the first token  ─       no token for a while, though the stream is open
✓ ✗               the end: with an answer, with an error
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deploy.drills.verdict import Mark, Verdict

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
class Picture:
    rows: tuple[Row, ...]
    marks: tuple[Mark, ...]

    @property
    def begin_s(self) -> float:
        return min((row.started_s for row in self.rows), default=0.0)

    @property
    def end_s(self) -> float:
        return max((row.ended_s for row in self.rows), default=1.0)


def draw(picture: Picture, width: int = 100) -> list[str]:
    """Lines for a terminal of `width` columns."""
    columns = max(20, width - _NAME_WIDTH - 2)
    span_s = max(picture.end_s - picture.begin_s, 1e-3)

    def column(at_s: float) -> int:
        return min(columns - 1, max(0, int((at_s - picture.begin_s) / span_s * columns)))

    faults = [" "] * columns
    for mark in picture.marks:
        faults[column(mark.at_s)] = "▼"
    lines = [_line("faults", faults)] if picture.marks else []
    most = max((tokens for row in picture.rows for tokens in _per_column(row, column, columns)), default=1)
    lines += [_line(_label(row), _cells(row, column, columns, most)) for row in picture.rows]
    scale = "0 s".ljust(columns // 2) + f"{span_s / 2:.1f} s"
    end = f"{span_s:.1f} s"
    lines.append(_line("", list((scale + end.rjust(columns - len(scale)))[:columns])))
    return lines


def page(verdicts: Sequence[Verdict], pictures: Sequence[Picture]) -> str:
    """One HTML document with every drill's verdict and picture. Refers to nothing outside itself."""
    parts = [_section(verdict, picture) for verdict, picture in zip(verdicts, pictures, strict=True)]
    return _PAGE.replace("@BODY@", "\n".join(parts))


def _label(row: Row) -> str:
    return f"{'↷' if row.failed_over else ' '} {row.name}"[-_NAME_WIDTH:]


def _line(label: str, cells: Sequence[str]) -> str:
    return f"{label:<{_NAME_WIDTH}} {''.join(cells)}".rstrip()


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
            cells[index] = _LEVELS[min(len(_LEVELS) - 1, counts[index] * len(_LEVELS) // (most + 1))]
        else:
            cells[index] = "·" if index < reached else "─"
    cells[last] = "✗" if row.failed else "✓"
    return cells


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>pdserve drills</title><style>
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; color: #1d2733; }
h2 { margin-bottom: 0; } .PASS { color: #14723b; } .FAIL { color: #b3261e; } .SKIPPED { color: #6b7280; }
svg { width: 100%; height: auto; background: #f7f8fa; border-radius: 4px; } text { font: 11px system-ui, sans-serif; }
table { border-collapse: collapse; } td, th { padding: 0 1rem 0 0; text-align: left; font-weight: normal; }
th { color: #6b7280; }
</style></head><body><h1>pdserve drills</h1>
<p>Each row is a request, each bar its tokens as they arrived; red lines are faults, a gap in a row is a wait. ↷: the
request went on elsewhere.</p>
@BODY@
</body></html>
"""
_SVG_WIDTH, _SVG_LEFT, _ROW_HEIGHT = 1000, 200, 16


def _section(verdict: Verdict, picture: Picture) -> str:
    heading = f'<h2>{html.escape(verdict.drill)} <span class="{verdict.status}">{verdict.status}</span></h2>'
    reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in verdict.reasons)
    figures = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in verdict.as_dict().items()
        if name not in ("drill", "status", "reasons") and value not in (None, {})
    )
    return f"<section>{heading}<ul>{reasons}</ul>{_svg(picture)}<table>{figures}</table></section>"


def _svg(picture: Picture) -> str:
    if not picture.rows:
        return ""
    span_s = max(picture.end_s - picture.begin_s, 1e-3)
    height = (len(picture.rows) + 2) * _ROW_HEIGHT

    def x(at_s: float) -> float:
        return _SVG_LEFT + (at_s - picture.begin_s) / span_s * (_SVG_WIDTH - _SVG_LEFT - 10)

    shapes = []
    for number, row in enumerate(picture.rows, start=1):
        y = number * _ROW_HEIGHT
        name = html.escape(_label(row))
        shapes.append(f'<text x="4" y="{y + 11}">{name}</text>')
        begin, end = x(row.started_s), x(row.ended_s)
        shapes.append(f'<rect x="{begin:.1f}" y="{y + 7}" width="{end - begin:.1f}" height="2" fill="#c5cbd3"/>')
        shapes += [
            f'<rect x="{x(at_s):.1f}" y="{y + 3}" width="1.5" height="10" fill="#2f6fb3"/>' for at_s, _ in row.arrivals
        ]
        colour = "#b3261e" if row.failed else "#14723b"
        shapes.append(f'<circle cx="{end:.1f}" cy="{y + 8}" r="3" fill="{colour}"/>')
    for mark in picture.marks:
        at = x(mark.at_s)
        title = html.escape(f"{mark.fault} {mark.victim}, {mark.phase}")
        shapes.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="12" y2="{height}" stroke="#b3261e"><title>{title}</title></line>'
        )
        shapes.append(f'<text x="{at + 3:.1f}" y="11" fill="#b3261e">{html.escape(mark.fault)}</text>')
    shapes.append(f'<text x="{_SVG_LEFT}" y="{height - 3}">0 s</text>')
    shapes.append(f'<text x="{_SVG_WIDTH - 50}" y="{height - 3}">{span_s:.1f} s</text>')
    return f'<svg viewBox="0 0 {_SVG_WIDTH} {height}" role="img">{"".join(shapes)}</svg>'
