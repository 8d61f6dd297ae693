"""Pictures of four tokens for the concept pages, all from one fixed example: docs/images/concepts/*.svg.

python experiments/pictures.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

OUT = Path(__file__).parents[1] / "docs" / "images" / "concepts"

# The example: scores of one head before the softmax, a row a query, a column a key. They are such that the numbers with
# two digits add up as they stand in a picture.
TOKENS = ["Solve", "it:", "how", "many"]
SEGMENTS = ["system", "system", "question", "question"]
SCORES = [[0.0], [0.2, 0.0], [0.4, 0.9, 0.0], [0.0, 0.4, 1.4, 0.0]]
INSERTED = ["/", "/"]
TO_INSERTED = [
    [],
    [],
    [0.2, 0.0],
    [-0.4, -0.2],
]  # the first two tokens stand before them and see neither
SINK = [3.0, 0.0, 0.0, 0.0]  # added to the scores of each key
PLACE = 2
RESIDUAL, UPDATE = (4.0, 0.0), (-0.8, 1.4)
ACTIVATIONS = [-0.28, 0.05, 1.1, -0.08, -0.21, 0.62, 0.02, -0.13, 1.6, 0.09, -0.26, 0.35]
THRESHOLD = 0.15
RIGHT = ["11011111", "11001101"]  # problems by condition: the baseline, then slash

MID = 'p<tspan dy="4" font-size="10">mid</tspan><tspan dy="-4"> </tspan>'
BLUE, ORANGE = "#3d8bc9", "#e07b39"
STYLE = f"""
text {{ font: 14px system-ui, sans-serif; fill: #333a44 }}
.small {{ font-size: 12px }}
.ink {{ stroke: #333a44; fill: none }}
.dot {{ fill: #333a44 }}
.blue {{ fill: {BLUE} }} .orange {{ fill: {ORANGE} }}
.blue-line {{ stroke: {BLUE}; stroke-width: 2; fill: none }}
.orange-line {{ stroke: {ORANGE}; stroke-width: 2; fill: none }}
.grey-line {{ stroke: #8a919c; fill: none }} .dashed {{ stroke-dasharray: 4 4 }}
@media (prefers-color-scheme: dark) {{
  text, .dot {{ fill: #d9dce3 }} .ink {{ stroke: #d9dce3 }}
}}"""

Matrix = Sequence[Sequence[float]]


def softmax(scores: Sequence[float]) -> list[float]:
    """Probabilities."""
    powers = [math.exp(score) for score in scores]
    return [power / sum(powers) for power in powers]


def pattern() -> Matrix:
    """Attention without inserted tokens; each row has the keys that the query sees."""
    return [softmax(row) for row in SCORES]


def inserted_pattern() -> Matrix:
    """Attention of the original queries with inserted tokens; scores of the original keys are as they were."""
    return [
        softmax([*row[:PLACE], *more, *row[PLACE:]])
        for row, more in zip(SCORES, TO_INSERTED, strict=True)
    ]


def sink_pattern() -> Matrix:
    """Attention with the first key's scores raised."""
    return [
        softmax([score + more for score, more in zip(row, SINK, strict=False)]) for row in SCORES
    ]


def received(attention: Matrix, include_self: bool) -> list[float]:
    """Mean down each column over the queries after the key, or from the key on; NaN where there are none."""
    found = []
    for key in range(len(attention)):
        column = [attention[q][key] for q in range(key + (not include_self), len(attention))]
        found.append(sum(column) / len(column) if column else math.nan)
    return found


def scales() -> list[float]:
    """λ of each query: what is left to the original keys."""
    return [
        1 - sum(row[PLACE : PLACE + len(more)])
        for row, more in zip(inserted_pattern(), TO_INSERTED, strict=True)
    ]


def flow() -> dict[str, float]:
    """From the question's queries to each segment: mean over queries of the sum over its keys."""
    segments = [*SEGMENTS[:PLACE], *["inserted"] * len(INSERTED), *SEGMENTS[PLACE:]]
    rows = inserted_pattern()[PLACE:]
    return {
        name: sum(p for row in rows for p, of in zip(row, segments, strict=False) if of == name)
        / len(rows)
        for name in dict.fromkeys(segments)
    }


def focus() -> dict[str, float]:
    """What the last query's row says."""
    row = pattern()[-1]
    first, second = sorted(row, reverse=True)[:2]
    return {
        "concentration": first - second,
        "distance": sum(p * (len(row) - 1 - key) for key, p in enumerate(row)),
    }


def update() -> dict[str, float]:
    """Magnitude and orientation of the update."""
    (a, b), (c, d) = RESIDUAL, UPDATE
    return {
        "magnitude": math.hypot(c, d) / math.hypot(a, b),
        "orientation": (a * c + b * d) / (math.hypot(a, b) * math.hypot(c, d)),
    }


class Picture:
    """An SVG that grows by shapes."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height, self.parts = width, height, []

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{words}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, kind: str = "ink", opacity: float = 1
    ) -> None:
        shade = "" if opacity == 1 else f' fill-opacity="{opacity:.2f}"'
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{kind}"{shade}/>'
        )

    def line(
        self, x: float, y: float, to_x: float, to_y: float, kind: str = "ink", head: bool = False
    ) -> None:
        end = f' marker-end="url(#{kind.split("-")[0].split(" ")[0]})"' if head else ""
        self.parts.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" class="{kind}"{end}/>')

    def path(self, shape: str, kind: str = "ink", head: bool = False) -> None:
        end = f' marker-end="url(#{kind.split("-")[0]})"' if head else ""
        self.parts.append(f'<path d="{shape}" class="{kind}"{end}/>')

    def dot(self, x: float, y: float, kind: str = "dot", radius: float = 4) -> None:
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" class="{kind}"/>')

    def svg(self) -> str:
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" class="{kind}"/></marker>'
            for name, kind in (("ink", "dot"), ("blue", "blue"), ("orange", "orange"))
        )
        size = (
            f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        )
        start = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
        return "\n".join(
            [start, f"<style>{STYLE}\n</style>", f"<defs>{heads}</defs>", *self.parts, "</svg>\n"]
        )


CELL, ROW = 52, 34


def number(value: float) -> str:
    """Two digits, or a dash."""
    return "–" if math.isnan(value) else f"{value:.2f}".replace("-", "−")


def square(
    picture: Picture,
    x: float,
    y: float,
    attention: Matrix,
    keys: Sequence[str],
    inserted: range = range(0),
    cell: int = CELL,
) -> None:
    """A pattern: queries down, keys across; inserted columns in orange."""
    for key, token in enumerate(keys):
        picture.text(x + (key + 0.5) * cell, y - 8, token)
    for query, row in enumerate(attention):
        picture.text(x - 8, y + (query + 0.5) * ROW + 5, TOKENS[query], anchor="end")
        for key, value in enumerate(row):
            across, down = x + key * cell, y + query * ROW
            picture.box(
                across + 1,
                down + 1,
                cell - 2,
                ROW - 2,
                "orange" if key in inserted else "blue",
                0.08 + 0.6 * value,
            )
            picture.text(across + cell / 2, down + ROW / 2 + 5, number(value))


def received_attention() -> Picture:
    """The mean of each column, over the queries after the key."""
    picture = Picture(520, 250)
    x, y = 70, 50
    square(picture, x, y, pattern(), TOKENS)
    picture.text(x + 2 * CELL, 16, "keys", "small")
    picture.text(x - 8, y - 8, "queries", "small", "end")
    for key, value in enumerate(received(pattern(), include_self=False)):
        across = x + key * CELL
        if key < 3:
            picture.box(
                across + 1, y + (key + 1) * ROW + 1, CELL - 2, (3 - key) * ROW - 2, "orange-line"
            )
        picture.line(
            across + CELL / 2,
            y + 4 * ROW + 4,
            across + CELL / 2,
            y + 4 * ROW + 22,
            "orange-line",
            head=True,
        )
        picture.text(across + CELL / 2, y + 4 * ROW + 40, number(value))
    picture.text(
        x + 4 * CELL + 14, y + 4 * ROW + 40, "received: mean of each frame", anchor="start"
    )
    picture.text(x + 4 * CELL + 14, y + 2.6 * ROW, "framed: the queries", "small", "start")
    picture.text(x + 4 * CELL + 14, y + 2.6 * ROW + 16, "after the key", "small", "start")
    return picture


def affine_shift() -> Picture:
    """Without and with inserted columns; λ is what the orange ones leave."""
    picture = Picture(640, 250)
    keys, cell = [*TOKENS[:PLACE], *INSERTED, *TOKENS[PLACE:]], 45
    x, y = 54 + 4 * cell + 64, 60
    square(picture, 54, y, pattern(), TOKENS, cell=cell)
    square(picture, x, y, inserted_pattern(), keys, range(PLACE, PLACE + len(INSERTED)), cell)
    picture.text(54 + 2 * cell, 22, "A: without inserted tokens")
    picture.text(x + 3 * cell, 22, "A′: with two inserted tokens")
    picture.text(x + 6 * cell + 26, y - 8, "λ")
    for query, scale in enumerate(scales()):
        picture.text(x + 6 * cell + 26, y + (query + 0.5) * ROW + 5, number(scale))
    scale = scales()[-1]
    words = f"“many”: output′ = {number(scale)} · output + Σσ; the orange cells, {number(1 - scale)} in all, weight Σσ."
    picture.text(320, 230, words)
    return picture


def segment_flow() -> Picture:
    """The rows of the question, added up by segment."""
    picture = Picture(520, 200)
    x, y = 110, 50
    keys = [*TOKENS[:PLACE], *INSERTED, *TOKENS[PLACE:]]
    rows, found = inserted_pattern()[PLACE:], flow()
    for key, token in enumerate(keys):
        picture.text(x + (key + 0.5) * CELL, y - 8, token)
    for query, row in enumerate(rows):
        picture.text(x - 8, y + (query + 0.5) * ROW + 5, TOKENS[PLACE + query], anchor="end")
        for key, value in enumerate(row):
            kind = "orange" if key in (2, 3) else "blue"
            picture.box(
                x + key * CELL + 1, y + query * ROW + 1, CELL - 2, ROW - 2, kind, 0.08 + 0.6 * value
            )
            picture.text(x + (key + 0.5) * CELL, y + (query + 0.5) * ROW + 5, number(value))
    bottom = y + len(rows) * ROW
    for place, (name, value) in enumerate(found.items()):
        left, right = x + 2 * place * CELL + 4, x + 2 * (place + 1) * CELL - 4
        picture.path(f"M{left:g} {bottom + 6}v8H{right:g}v-8")
        picture.text((left + right) / 2, bottom + 32, name, "small")
        picture.text((left + right) / 2, bottom + 52, number(value))
    picture.text(x - 8, bottom + 52, "flow", anchor="end")
    picture.text(x + 3 * CELL, 16, "keys", "small")
    return picture


def attention_focus() -> Picture:
    """One row: its two largest values, and how far back it looks."""
    picture = Picture(640, 230)
    row, base = pattern()[-1], 150
    for key, value in enumerate(row):
        x = 60 + key * 80
        top = sorted(row, reverse=True).index(value) < 2
        picture.box(x, base - 200 * value, 44, 200 * value, "orange" if top else "blue")
        picture.text(x + 22, base - 200 * value - 6, number(value))
        picture.text(x + 22, base + 20, TOKENS[key])
        picture.text(x + 22, base + 42, f"{len(row) - 1 - key}", "small")
    picture.line(40, base, 380, base)
    picture.text(40, base + 42, "q − k", "small", "end")
    picture.text(60 + 3 * 80 + 22, base + 64, "the query", "small")
    first, second = sorted(row, reverse=True)[:2]
    found = focus()
    words = [
        f"concentration {number(first)} − {number(second)}",
        f"= {number(found['concentration'])}",
        "distance "
        + " + ".join(f"{len(row) - 1 - key}·{number(p)[1:]}" for key, p in enumerate(row[:-1])),
        f"= {number(found['distance'])} positions",
    ]
    for place, line in enumerate(words):
        picture.text(386, 50 + 22 * place + 10 * (place > 1), line, "small", "start")
    return picture


def attention_sinks() -> Picture:
    """One column takes most of each row."""
    picture = Picture(480, 240)
    x, y = 70, 40
    square(picture, x, y, sink_pattern(), TOKENS)
    bottom = y + 4 * ROW
    picture.box(x + 1, y + 1, CELL - 2, 4 * ROW - 2, "orange-line")
    for key, value in enumerate(received(sink_pattern(), include_self=True)):
        picture.text(x + (key + 0.5) * CELL, bottom + 26, number(value))
    picture.text(x - 8, bottom + 26, "α", anchor="end")
    alpha = received(sink_pattern(), include_self=True)[0]
    picture.text(x + 4 * CELL + 14, bottom + 26, "mean over q ≥ k", "small", "start")
    picture.text(
        x, bottom + 54, f"α of “{TOKENS[0]}” is {number(alpha)} > 0.3: a sink.", anchor="start"
    )
    return picture


def head_updates() -> Picture:
    """The update at the tip of the residual stream, with its parts along and across."""
    picture = Picture(620, 220)
    unit, x, y = 80, 40, 170
    tip, end = x + unit * RESIDUAL[0], (x + unit * (RESIDUAL[0] + UPDATE[0]), y - unit * UPDATE[1])
    picture.line(x, y, tip, y, "blue-line", head=True)
    picture.line(tip, y, *end, "orange-line", head=True)
    picture.line(*end, end[0], y, "grey-line dashed")
    picture.line(tip, y, tip + 110, y, "grey-line dashed")
    angle = math.acos(update()["orientation"])
    bend = (tip + 34 * math.cos(angle), y - 34 * math.sin(angle))
    picture.path(f"M{tip + 34:g} {y}A34 34 0 0 0 {bend[0]:.1f} {bend[1]:.1f}")
    picture.text(tip + 32, y - 28, f"{math.degrees(angle):.0f}°", anchor="start")
    picture.text(x + 90, y - 10, "r, the residual stream")
    picture.text(
        (tip + end[0]) / 2 + 12, (y + end[1]) / 2 - 18, "Δ, what the head adds", anchor="start"
    )
    picture.text((tip + end[0]) / 2, y + 20, f"parallel {number(UPDATE[0] / RESIDUAL[0])}", "small")
    picture.text(
        end[0] - 6,
        (y + end[1]) / 2,
        f"orthogonal {number(UPDATE[1] / RESIDUAL[0])}",
        "small",
        "end",
    )
    found = update()
    picture.text(390, 32, f"magnitude = ‖Δ‖ / ‖r‖ = {number(found['magnitude'])}", anchor="start")
    picture.text(
        390,
        56,
        f"orientation = cos {math.degrees(angle):.0f}° = {number(found['orientation'])}",
        anchor="start",
    )
    return picture


def mlp_activations() -> Picture:
    """Twelve channels of one token and the band of near-zero."""
    picture = Picture(560, 230)
    zero, unit = 160, 85
    picture.box(50, zero - unit * THRESHOLD, 400, 2 * unit * THRESHOLD, "orange", 0.35)
    picture.line(50, zero, 450, zero, "grey-line")
    near = [abs(value) <= THRESHOLD for value in ACTIVATIONS]
    for channel, value in enumerate(ACTIVATIONS):
        x = 66 + 33.5 * channel
        picture.line(
            x, zero, x, zero - unit * value, "orange-line" if near[channel] else "blue-line"
        )
        picture.dot(x, zero - unit * value, "orange" if near[channel] else "blue")
    picture.text(44, zero - unit * THRESHOLD, "τ", anchor="end")
    picture.text(44, zero + unit * THRESHOLD + 10, "−τ", anchor="end")
    share = sum(near) / len(near)
    picture.text(
        250, 210, f"{sum(near)} of {len(near)} channels lie within ±τ: near_zero = {number(share)}"
    )
    picture.text(460, zero + 5, "channels", "small", "start")
    return picture


def conditions() -> Picture:
    """The four variants: which keys “many” sees, and which position ids the tokens have."""
    picture = Picture(640, 260)
    keys = [*TOKENS[:PLACE], *INSERTED, *TOKENS[PLACE:]]
    count = len(INSERTED)
    shifted = list(range(len(keys)))
    kept = [*range(PLACE), *range(PLACE - count, PLACE), *range(PLACE, len(TOKENS))]
    variants = [
        ("slash", 0, 0, True, shifted),
        ("slash.unshifted()", 330, 0, True, kept),
        ("slash.masked()", 0, 130, False, shifted),
        ("slash.masked().unshifted(): the baseline", 330, 130, False, kept),
    ]
    for name, x, y, visible, ids in variants:
        picture.text(x + 4, y + 18, name, anchor="start")
        for place, (token, position) in enumerate(zip(keys, ids, strict=True)):
            left, inserted = x + 4 + 50 * place, place in range(PLACE, PLACE + count)
            kind = ("orange" if visible else "orange-line dashed") if inserted else "blue"
            picture.box(left, y + 62, 46, 26, kind, 0.35 if visible or not inserted else 1)
            picture.text(left + 23, y + 80, token)
            picture.text(left + 23, y + 106, str(position), "small")
            if place < len(keys) - 1 and (visible or not inserted):
                last, lift = x + 4 + 50 * (len(keys) - 1) + 23, 10 + 7 * (len(keys) - 1 - place)
                line = "orange-line" if inserted else "blue-line"
                picture.path(
                    f"M{last} {y + 62}C{last} {y + 62 - lift} {left + 23} {y + 62 - lift} {left + 23} {y + 61}",
                    line,
                )
    return picture


def interventions() -> Picture:
    """One block, and where each intervention acts."""
    picture = Picture(640, 230)
    y = 120
    steps = [
        ("q, k, v", 90),
        ("pattern A", 205),
        ("z", 315),
        ('W<tspan dy="4" font-size="10">O</tspan>', 400),
        ("MLP", 500),
    ]
    picture.line(4, y + 60, 630, y + 60, "ink", head=True)
    picture.text(8, y + 80, "residual stream", "small", "start")
    for place, (name, x) in enumerate(steps):
        width = 90 if place == 1 else 64
        picture.box(x - width / 2, y - 18, width, 36)
        picture.text(x, y + 5, name)
    for (_, a), (_, b), half, next_half in zip(
        steps[:3], steps[1:4], (32, 45, 32), (45, 32, 32), strict=True
    ):
        picture.line(a + half, y, b - next_half, y, "ink", head=True)
    for start, end in ((90, 400), (500, 560)):
        picture.line(start, y + 60, start, y + 18, "ink", head=True)
        picture.path(
            f"M{end} {y + 18}V{y + 59}" if end == 400 else f"M532 {y}H{end}V{y + 59}",
            "ink",
            head=True,
        )
    acts = [
        (90, 40, "KVPatch", "k, v of inserted tokens"),
        (205, 76, "AttentionKnockout", "edges removed"),
        (315, 40, "AffineAttention, HeadAblation", "λz + Σσ; 0 or the mean"),
        (500, 76, "ARM", "activations near zero"),
    ]
    for x, top, name, what in acts:
        picture.text(x, top - 18, name)
        picture.text(x, top - 2, what, "small")
        picture.line(x, top + 4, x, y - 20, "orange-line", head=True)
    return picture


def two_runs(picture: Picture, y: float) -> None:
    """The tokens of the run without inserted tokens above those with, at the same distance."""
    for place, token in enumerate(TOKENS):
        x = 110 + 66 * (place if place < PLACE else place + len(INSERTED))
        picture.box(x, y, 60, 28, "blue", 0.35)
        picture.text(x + 30, y + 19, token)
        picture.line(x + 30, y + 28, x + 30, y + 84, "blue-line", head=True)
        picture.box(x, y + 86, 60, 28, "blue", 0.35)
        picture.text(x + 30, y + 105, token)
    for place, token in enumerate(INSERTED):
        x = 110 + 66 * (PLACE + place)
        picture.box(x, y + 86, 60, 28, "orange", 0.35)
        picture.text(x + 30, y + 105, token)


def patching() -> Picture:
    """Tokens of two runs, aligned by origin."""
    picture = Picture(560, 160)
    two_runs(picture, 16)
    picture.text(98, 35, "baseline", anchor="end")
    picture.text(98, 121, "slash", anchor="end")
    picture.text(110 + 66 * 3, 66, "one head’s output", "small")
    picture.text(110 + 66 * 3, 82, "at each original token", "small")
    picture.text(110, 152, "origin", "small", "end")
    for place in range(6):
        origin = (
            place
            if place < PLACE
            else place - len(INSERTED)
            if place >= PLACE + len(INSERTED)
            else -1
        )
        picture.text(140 + 66 * place, 152, number_of(origin), "small")
    return picture


def number_of(origin: int) -> str:
    """With a real minus sign."""
    return str(origin).replace("-", "−")


def evaluation() -> Picture:
    """The same problems under two conditions; only those on which they differ say something."""
    picture = Picture(560, 170)
    for row, (name, right) in enumerate(zip(("baseline", "slash"), RIGHT, strict=True)):
        picture.text(90, 45 + 40 * row, name, anchor="end")
        for place, answer in enumerate(right):
            x = 104 + 46 * place
            picture.box(
                x,
                24 + 40 * row,
                38,
                32,
                "blue" if answer == "1" else "ink",
                0.35 if answer == "1" else 1,
            )
            picture.text(x + 19, 45 + 40 * row, "✓" if answer == "1" else "✗")
    pairs = list(zip(*RIGHT, strict=True))
    for place, (first, second) in enumerate(pairs):
        picture.text(123 + 46 * place, 16, str(place + 1), "small")
        if first != second:
            picture.box(100 + 46 * place, 20, 46, 80, "orange-line")
    lost, won = pairs.count(("1", "0")), pairs.count(("0", "1"))
    words = f"Framed: b₁₀ = {lost} right in the baseline alone, b₀₁ = {won} right with slash alone."
    picture.text(20, 128, words, anchor="start")
    coins, fewer = lost + won, min(lost, won)
    chances = [math.comb(coins, heads) / 2**coins for heads in range(fewer + 1)]
    p = min(2 * sum(chances) - chances[-1], 1)
    picture.text(
        20,
        150,
        f"p_mid = 2 · F({fewer}) − f({fewer}) = {number(p)}, with {coins} coins.".replace(
            "p_mid", MID
        ),
        anchor="start",
    )
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    made.__name__.replace("_", "-"): made
    for made in (
        received_attention, affine_shift, segment_flow, attention_focus, attention_sinks, head_updates, mlp_activations,
        conditions, interventions, patching, evaluation,
    )
}  # fmt: skip


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    for name, made in PICTURES.items():
        (OUT / f"{name}.svg").write_text(made().svg(), encoding="utf-8")
        print(OUT / f"{name}.svg")
