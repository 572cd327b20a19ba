"""Charts as SVG text: a frame with axes, and what is drawn in it. Colours and strokes are the style sheet's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from posthoc.evaluate.report.markup import element, text

__all__ = [
    "COLOURS",
    "Frame",
    "Points",
    "area",
    "dots",
    "marks",
    "polyline",
    "segments",
    "series_class",
    "swatch",
    "ticks",
]

COLOURS, DASHES, SHAPES = 8, 4, 6
"""How many the style sheet knows of each; together they tell 24 lines apart without colour, and 32 with it."""
RIGHT, TOP, BOTTOM = 10, 8, 34

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Frame:
    """A rectangle with axes. What is drawn in it is cut at its edges."""

    x: tuple[float, float]
    y: tuple[float, float]
    x_label: str
    y_label: str
    width: int = 340
    height: int = 240
    left: int = 46
    percent_y: bool = False
    root_y: bool = False
    """Heights by their square root, so that small shares are seen beside large ones."""
    x_ticks: tuple[float, ...] | None = None
    y_ticks: tuple[float, ...] | None = None

    @property
    def inner(self) -> tuple[float, float]:
        return self.width - self.left - RIGHT, self.height - TOP - BOTTOM

    def across(self, value: float) -> float:
        """From the left edge of the plot."""
        low, high = self.x
        return (value - low) / (high - low) * self.inner[0]

    def down(self, value: float) -> float:
        """From its upper edge."""
        low, high = self.y
        share = (value - low) / (high - low)
        return (1.0 - (math.sqrt(max(share, 0.0)) if self.root_y else share)) * self.inner[1]

    def place(self, xs: Iterable[float], ys: Iterable[float]) -> list[tuple[float, float]]:
        """Points of the plot, far ones brought near enough to be written; those that are not numbers are left out."""
        far = 4.0 * self.width
        return [
            (min(max(self.across(x), -far), far), min(max(self.down(y), -far), far))
            for x, y in zip(xs, ys, strict=True)
            if math.isfinite(x) and math.isfinite(y)
        ]

    def svg(self, body: str, title: str, description: str = "") -> str:
        """The whole chart."""
        width, height = self.inner
        # An inner <svg> cuts what is outside of it, without an id of a clip path.
        plot = f'<svg x="{self.left}" y="{TOP}" width="{short(width)}" height="{short(height)}">{body}</svg>'
        told = element("title", text(title)) + (element("desc", text(description)) if description else "")
        return (
            f'<svg class="chart" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{text(". ".join(filter(None, (title, description))))}">{told}{self._axes()}{plot}</svg>'
        )

    def _axes(self) -> str:
        width, height = self.inner
        base = TOP + height
        found: list[str] = []
        for tick in self.y_ticks or ticks(*self.y, 4):
            y = TOP + self.down(tick)
            label = f"{100 * tick:g}%" if self.percent_y else label_of(tick)
            found.append(f'<path class="grid" d="M{self.left} {short(y)}h{short(width)}"/>')
            found.append(
                f'<text class="tick" x="{self.left - 6}" y="{short(y + 3.5)}" text-anchor="end">{label}</text>'
            )
        for tick in self.x_ticks or ticks(*self.x, max(3, int(width // 60))):
            x = self.left + self.across(tick)
            found.append(f'<path class="axis" d="M{short(x)} {short(base)}v4"/>')
            found.append(
                f'<text class="tick" x="{short(x)}" y="{short(base + 15)}" text-anchor="middle">{label_of(tick)}</text>'
            )
        found.append(f'<path class="axis" d="M{self.left} {short(base)}h{short(width)}"/>')
        middle = self.left + width / 2
        found.append(
            f'<text class="label" x="{short(middle)}" y="{self.height - 4}" text-anchor="middle">'
            f"{text(self.x_label)}</text>"
        )
        if self.y_label:
            up = TOP + height / 2
            found.append(
                f'<text class="label" transform="translate(11 {short(up)}) rotate(-90)" text-anchor="middle">'
                f"{text(self.y_label)}</text>"
            )
        return "".join(found)


def ticks(low: float, high: float, count: int) -> list[float]:
    """About so many round numbers between two."""
    if not high > low:
        return [low]
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [0.0 if i == 0 else i * step for i in range(first, last + 1)]


def label_of(value: float) -> str:
    """A tick's number."""
    if value == 0.0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.6g}".replace("-", "−")
    return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e−").replace("e+", "e").replace("-", "−")


def short(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")  # plus zero: minus zero is written as zero


def series_class(index: int) -> str:
    """How the line of the method with this number looks: colour and dashes, never the same two twice under 32."""
    return f"s{index % COLOURS} d{(index + index // COLOURS) % DASHES}"


def polyline(points: Points, class_: str, label: str = "") -> str:
    """A line through points; its label is shown where the mouse rests on it."""
    if not points:
        return ""
    path = "L".join(f"{short(x)} {short(y)}" for x, y in points)
    title = element("title", text(label)) if label else ""
    return f'<path class="{class_}" d="M{path}">{title}</path>' if title else f'<path class="{class_}" d="M{path}"/>'


def area(points: Points, class_: str) -> str:
    """A filled outline."""
    return f'<path class="{class_}" d="M{"L".join(f"{short(x)} {short(y)}" for x, y in points)}Z"/>' if points else ""


def segments(lines: Iterable[Points], class_: str) -> str:
    """Many lines that look the same, in one element."""
    path = "".join("M" + "L".join(f"{short(x)} {short(y)}" for x, y in line) for line in lines if line)
    return f'<path class="{class_}" d="{path}"/>' if path else ""


def dots(points: Points, class_: str) -> str:
    """Points, as lines of no length with round ends: one element however many there are."""
    return f'<path class="{class_}" d="{"".join(f"M{short(x)} {short(y)}h0" for x, y in points)}"/>' if points else ""


def marks(points: Points, index: int, every: int = 1) -> str:
    """Signs on a line whose shape tells its method; lines begin at different points, so that theirs do not coincide."""
    chosen = [points[i] for i in range(index % every, len(points), every)]
    return f'<path class="mark s{index % COLOURS}" d="{"".join(shape(index % SHAPES, x, y) for x, y in chosen)}"/>'


def shape(kind: int, x: float, y: float) -> str:
    outlines = (
        ((-3, 0, "a3 3 0 1 0 6 0a3 3 0 1 0 -6 0z"),),
        ((-2.7, -2.7, "h5.4v5.4h-5.4z"),),
        ((0, -3.5, "l3.3 6h-6.6z"),),
        ((0, -3.8, "l3.2 3.8l-3.2 3.8l-3.2 -3.8z"),),
        ((-2.8, -2.8, "l5.6 5.6"), (2.8, -2.8, "l-5.6 5.6")),
        ((0, 3.5, "l3.3 -6h-6.6z"),),
    )
    return "".join(f"M{short(x + dx)} {short(y + dy)}{rest}" for dx, dy, rest in outlines[kind])


def swatch(index: int) -> str:
    """A bit of a method's line, for a legend."""
    line = polyline([(1, 7), (31, 7)], f"line {series_class(index)}")
    return f'<svg class="swatch" viewBox="0 0 32 14" aria-hidden="true">{line}{marks([(16, 7)], index)}</svg>'
