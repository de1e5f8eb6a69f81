"""Pictures of battles, drawn from a `Scene`.

`to_svg` and `to_rgb` run the same drawing code on different canvases, so a vector figure and a
frame of a video show the same picture. North, +y, is up.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple, TypeAlias
from xml.sax.saxutils import escape

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageColor, ImageDraw, ImageFont

from .scene import Outcome, Scene, SceneUnit, Side
from .terrain import Span, Terrain

MARGIN = 1.0
"""Cells of wall shown around the ground."""
SUPERSAMPLE = 3


def to_svg(scene: Scene, *, scale: float = 24.0) -> str:
    """A standalone SVG document; `scale` is the width of a cell."""
    layout = _Layout.of(scene.terrain, scale)
    canvas = _SvgCanvas()
    _draw_ground(canvas, layout, scene.terrain)
    _draw_battle(canvas, layout, scene)
    sides = f"{layout.width:g} {layout.height:g}"
    title = escape(f"{scene.map_name}, step {scene.step}")
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {sides}" '
        f'width="{layout.width:g}" height="{layout.height:g}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">'
    )
    return "\n".join((opening, f"<title>{title}</title>", *canvas.parts, "</svg>", ""))


def to_rgb(scene: Scene, *, size: int = 640) -> UInt8[np.ndarray, "H W 3"]:
    """A raster image with even sides; `size` is the longer side of the ground shown."""
    layout = _Layout.fitting(scene.terrain, size)
    canvas = _RasterCanvas(_ground_image(scene.terrain, size).copy())
    _draw_battle(canvas, layout, scene)
    return np.asarray(canvas.image.reduce(SUPERSAMPLE))


# Drawing: sizes of marks are in cells, those of the footer in parts of the picture's width.

COLOURS: dict[Side, str] = {"ally": "#4c9be8", "enemy": "#e8704c"}
RIMS: dict[Side, str] = {"ally": "#a9d2ff", "enemy": "#ffc0a8"}
WALL, EDGE, GROUND, CLIFF, CLIFF_LINE = "#11161d", "#4a5868", "#29323d", "#1c242d", "#3b4856"
PANEL, TEXT, MUTED = "#0c1015", "#e6ebf1", "#8f9bab"
INK, TROUGH, SHADE = "#0d1117", "#0d1117d0", "#00000050"
SHIELD, ENERGY, SPARK, MEND = "#7fdbff", "#c08cff", "#ffe08a", "#6ee79a"
HEALTH = ("#58d273", "#f2c14e", "#f25c54")
"""Of units in good health, of hurt ones, of those about to fall."""
OUTCOMES: dict[Outcome, str] = {
    "won": HEALTH[0], "lost": COLOURS["enemy"], "drawn": SPARK, "timeout": SPARK
}  # fmt: skip

RIM = 0.14
"""Width of a disc's rim, in parts of its radius."""

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]
Canvas: TypeAlias = "_SvgCanvas | _RasterCanvas"


class _Layout(NamedTuple):
    """From cells to pixels."""

    west: float
    north: float
    scale: float
    width: float
    height: float
    footer: float
    """Where the panel under the ground begins."""

    @classmethod
    def of(cls, terrain: Terrain, scale: float) -> _Layout:
        west, south, east, north = bounds(terrain)
        width = _even((east - west) * scale)
        ground = _even((north - south) * scale)
        return cls(west, north, scale, width, ground + _even(width * 0.118), ground)

    @classmethod
    def fitting(cls, terrain: Terrain, size: int) -> _Layout:
        west, south, east, north = bounds(terrain)
        return cls.of(terrain, size / max(east - west, north - south))

    def at(self, x: float, y: float) -> Point:
        return (x - self.west) * self.scale, (self.north - y) * self.scale

    def box(self, span: Span, grow: float = 0.0) -> tuple[Point, float, float]:
        """Top left corner, width and height of a span of cells."""
        y, x_from, x_to = span
        width, height = x_to - x_from + 2 * grow, 1 + 2 * grow
        return self.at(x_from - grow, y + 1 + grow), width * self.scale, height * self.scale


def bounds(terrain: Terrain) -> tuple[float, float, float, float]:
    """West, south, east and north end of what is worth showing."""
    spans = terrain.spans + terrain.cliffs
    return (
        min(x_from for _, x_from, _ in spans) - MARGIN,
        min(y for y, _, _ in spans) - MARGIN,
        max(x_to for _, _, x_to in spans) + MARGIN,
        max(y for y, _, _ in spans) + 1 + MARGIN,
    )


def _even(length: float) -> float:
    """Video codecs want even sides."""
    return 2.0 * max(round(length / 2), 1)


def _draw_ground(canvas: Canvas, layout: _Layout, terrain: Terrain) -> None:
    canvas.rect((0.0, 0.0), layout.width, layout.footer, WALL, kind="wall")
    # What the ground, drawn over it, leaves of the grown spans is an outline of them all.
    for span in terrain.spans + terrain.cliffs:
        canvas.rect(*layout.box(span, grow=0.09), EDGE, kind="edge")
    for span in terrain.spans:
        canvas.rect(*layout.box(span), GROUND, kind="ground")
    for span in terrain.cliffs:
        canvas.rect(*layout.box(span), CLIFF, kind="cliff")
        y, x_from, x_to = span
        for x in range(2 * x_from, 2 * x_to):
            ends = layout.at(x / 2, y + 0.0), layout.at(x / 2 + 0.5, y + 1.0)
            canvas.line(*ends, 0.07 * layout.scale, CLIFF_LINE, kind="hatch")


def _draw_battle(canvas: Canvas, layout: _Layout, scene: Scene) -> None:
    for unit in scene.units:
        if not unit.alive:
            _draw_fallen(canvas, layout, unit)
    attacks = list(scene.attacks())
    for unit, target in attacks:
        width = (0.2 if unit.sweep else 0.1) * layout.scale
        colour = MEND if unit.weapon == "heal" else COLOURS[unit.side]
        ends = layout.at(unit.x, unit.y), layout.at(target.x, target.y)
        canvas.line(*ends, width, colour + "b0", kind=f"attack {unit.side}")
    planes = ("ground", "cliff", "air")
    living = sorted((u for u in scene.units if u.alive), key=lambda u: planes.index(u.plane))
    for unit in living:
        _draw_unit(canvas, layout, unit)
    for unit, target in attacks:
        _draw_impact(canvas, layout, unit, target)
    for unit in living:
        _draw_bars(canvas, layout, unit)
    _draw_footer(canvas, layout, scene)


def _draw_fallen(canvas: Canvas, layout: _Layout, unit: SceneUnit) -> None:
    arm = 0.45 * unit.radius
    for lean in (-arm, arm):
        ends = layout.at(unit.x - arm, unit.y - lean), layout.at(unit.x + arm, unit.y + lean)
        canvas.line(*ends, 0.09 * layout.scale, COLOURS[unit.side] + "60", kind="fallen")


def _draw_unit(canvas: Canvas, layout: _Layout, unit: SceneUnit) -> None:
    x, y = layout.at(unit.x, unit.y)
    radius = unit.radius * layout.scale
    if unit.plane == "air":
        canvas.disc(layout.at(unit.x + 0.3, unit.y - 0.35), radius, SHADE, kind="shade")
    colour, rim = COLOURS[unit.side], RIMS[unit.side]
    canvas.disc((x, y), radius, colour, rim=rim, kind=f"unit {unit.side}")
    # A little low, clear of the bars.
    canvas.text((x, y + 0.1 * radius), unit.glyph, 1.25 * radius, INK, anchor="middle")


def _draw_impact(canvas: Canvas, layout: _Layout, unit: SceneUnit, target: SceneUnit) -> None:
    """Where an attack meets its target, all that shows of melee; of a beam, its sweep."""
    dx, dy = unit.x - target.x, unit.y - target.y
    distance = max(math.hypot(dx, dy), target.radius)
    if unit.sweep:
        across_x, across_y = -dy * unit.sweep / 2 / distance, dx * unit.sweep / 2 / distance
        start = layout.at(target.x - across_x, target.y - across_y)
        end = layout.at(target.x + across_x, target.y + across_y)
        canvas.line(start, end, 0.12 * layout.scale, SPARK + "d0", kind="sweep")
        return
    part = target.radius / distance
    at = layout.at(target.x + part * dx, target.y + part * dy)
    canvas.disc(at, 0.13 * layout.scale, MEND if unit.weapon == "heal" else SPARK, kind="spark")


def _draw_bars(canvas: Canvas, layout: _Layout, unit: SceneUnit) -> None:
    """Health, above it shield or energy, across the top of a unit that has lost any."""
    health = HEALTH[sum(unit.hp < part * unit.hp_max for part in (0.6, 0.3))]
    bars = [("health", unit.hp, unit.hp_max, health)]
    bars += [("shield", unit.shield, unit.shield_max, SHIELD)] if unit.shield > 0 else []
    bars += [("energy", unit.energy, unit.energy_max, ENERGY)] if unit.energy_max > 0 else []
    if unit.hp >= unit.hp_max and unit.shield >= unit.shield_max and not unit.energy_max:
        return
    width, height, pad = (layout.scale * part for part in (2 * unit.radius, 0.15, 0.04))
    left, bottom = layout.at(unit.x - unit.radius, unit.y + 0.6 * unit.radius)
    corner, tall = (left - pad, bottom - len(bars) * height - pad), len(bars) * height + pad
    canvas.rect(corner, width + 2 * pad, tall, TROUGH, kind="trough")
    for name, value, most, colour in bars:
        bottom -= height
        canvas.rect((left, bottom), width * min(value / most, 1), height - pad, colour, kind=name)


def _draw_footer(canvas: Canvas, layout: _Layout, scene: Scene) -> None:
    width, top = layout.width, layout.footer
    size, row, pad = width * 0.022, width * 0.034, width * 0.018
    canvas.rect((0.0, top), width, layout.height - top, PANEL, kind="panel")
    y = top + 0.8 * row
    canvas.text((pad, y), scene.map_name, size * 1.15, TEXT, anchor="start")
    words = f"step {scene.step} of {scene.limit}"
    words += "" if scene.total_reward is None else f" · return {scene.total_reward:.2f}"
    canvas.text((width * 0.3, y), words, size, MUTED, anchor="start")
    if scene.outcome:
        words, colour = scene.outcome.upper(), OUTCOMES[scene.outcome]
        canvas.text((width - pad, y), words, size * 1.15, colour, anchor="end")
    for side, colour in COLOURS.items():
        team, x, y = scene.of(side), pad, y + row
        for kind in dict.fromkeys(unit.kind for unit in team):
            x = _draw_tally(canvas, (x, y), size, [unit for unit in team if unit.kind == kind])
        part = sum(u.vitality for u in team) / sum(u.hp_max + u.shield_max for u in team)
        corner, length = (width * 0.8, y - size * 0.22), width * 0.2 - pad
        canvas.rect(corner, length, size * 0.44, GROUND, kind="trough")
        canvas.rect(corner, length * part, size * 0.44, colour, kind=f"team {side}")


def _draw_tally(canvas: Canvas, at: Point, size: float, squad: list[SceneUnit]) -> float:
    """How many of one type live; returns where the next tally may begin."""
    (x, y), unit = at, squad[0]
    words = f"{unit.kind.replace('_', ' ')} {sum(u.alive for u in squad)}/{len(squad)}"
    centre = (x + size * 0.55, y)
    canvas.disc(centre, size * 0.55, COLOURS[unit.side], kind="legend")
    canvas.text(centre, unit.glyph, size * 0.75, INK, anchor="middle")
    canvas.text((x + size * 1.5, y), words, size * 0.92, TEXT, anchor="start")
    return x + size * (2.4 + 0.56 * len(words))


# Canvases: shapes in pixels, y down. `kind` labels a shape where the format carries labels; text
# in the middle of something is bold.


class _SvgCanvas:
    def __init__(self) -> None:
        self.parts: list[str] = []

    def rect(self, at: Point, w: float, h: float, colour: str, *, kind: str) -> None:
        place = f'x="{at[0]:.2f}" y="{at[1]:.2f}" width="{w:.2f}" height="{h:.2f}"'
        self.parts.append(f'<rect class="{kind}" {place} {_paint("fill", colour)}/>')

    def disc(self, at: Point, r: float, colour: str, *, rim: str = "", kind: str) -> None:
        border = f' stroke="{rim}" stroke-width="{r * RIM:.2f}"' if rim else ""
        place = f'cx="{at[0]:.2f}" cy="{at[1]:.2f}" r="{r * (1 - RIM / 2) if rim else r:.2f}"'
        self.parts.append(f'<circle class="{kind}" {place} {_paint("fill", colour)}{border}/>')

    def line(self, start: Point, end: Point, width: float, colour: str, *, kind: str) -> None:
        place = f'x1="{start[0]:.2f}" y1="{start[1]:.2f}" x2="{end[0]:.2f}" y2="{end[1]:.2f}"'
        paint = f'{_paint("stroke", colour)} stroke-width="{width:.2f}"'
        self.parts.append(f'<line class="{kind}" {place} {paint}/>')

    def text(self, at: Point, words: str, size: float, colour: str, *, anchor: Anchor) -> None:
        weight = "bold" if anchor == "middle" else "normal"
        place = f'x="{at[0]:.2f}" y="{at[1] + 0.36 * size:.2f}" text-anchor="{anchor}"'
        font = f'font-size="{size:.2f}" font-weight="{weight}" fill="{colour}"'
        self.parts.append(f"<text {place} {font}>{escape(words)}</text>")


def _paint(attribute: str, colour: str) -> str:
    """Opacity apart from the colour: not every SVG reader knows eight-digit colours."""
    opacity = f' {attribute}-opacity="{int(colour[7:], 16) / 255:.2f}"' if colour[7:] else ""
    return f'{attribute}="{colour[:7]}"{opacity}'


class _RasterCanvas:
    """Draws enlarged; `Image.reduce` then smooths the edges."""

    def __init__(self, image: Image.Image):
        self.image = image
        self.brush = ImageDraw.Draw(image, "RGBA")

    def rect(self, at: Point, w: float, h: float, colour: str, *, kind: str) -> None:
        left, top = _enlarge(at)
        right, bottom = _enlarge((at[0] + w, at[1] + h))
        box = (round(left), round(top), round(right) - 1, round(bottom) - 1)
        if box[2] >= box[0] and box[3] >= box[1]:
            self.brush.rectangle(box, _ink(colour))

    def disc(self, at: Point, r: float, colour: str, *, rim: str = "", kind: str) -> None:
        radius = r * SUPERSAMPLE
        if rim:
            self.brush.circle(_enlarge(at), radius, _ink(rim))
            radius *= 1 - RIM
        self.brush.circle(_enlarge(at), radius, _ink(colour))

    def line(self, start: Point, end: Point, width: float, colour: str, *, kind: str) -> None:
        thickness = max(round(width * SUPERSAMPLE), 1)
        self.brush.line((_enlarge(start), _enlarge(end)), _ink(colour), thickness)

    def text(self, at: Point, words: str, size: float, colour: str, *, anchor: Anchor) -> None:
        corner = {"start": "lm", "middle": "mm", "end": "rm"}[anchor]
        stroke = size * SUPERSAMPLE / 30 if anchor == "middle" else 0
        place, ink = _enlarge(at), _ink(colour)
        self.brush.text(place, words, ink, _font(size), corner, stroke_width=stroke)


def _enlarge(at: Point) -> Point:
    return at[0] * SUPERSAMPLE, at[1] * SUPERSAMPLE


@functools.cache
def _ink(colour: str) -> tuple[int, ...]:
    return ImageColor.getrgb(colour)


@functools.cache
def _font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(max(size * SUPERSAMPLE, 1))


@functools.lru_cache(maxsize=8)
def _ground_image(terrain: Terrain, size: int) -> Image.Image:
    """The part of the picture that is the same in every frame."""
    layout = _Layout.fitting(terrain, size)
    sides = int(layout.width) * SUPERSAMPLE, int(layout.height) * SUPERSAMPLE
    image = Image.new("RGB", sides, WALL)
    _draw_ground(_RasterCanvas(image), layout, terrain)
    return image
