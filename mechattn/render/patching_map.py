"""Maps patching effects by layer and head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mechattn.errors import OptionError
from mechattn.render import draw
from mechattn.render.declared import figure as declare
from mechattn.render.words import says

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from mechattn.patching.effects import Patching


@declare("patching")
def patching_map(patching: Patching) -> go.Figure:
    """Map mean patching effects by layer and head, or layer and segment; dots mark q < 0.05 (over the map).

    Red means that the answer's metric rose, blue that it fell. Heads that were not requested are empty.

    Args:
        patching: The result of ``patch``.

    Raises:
        OptionError: The effects are not of heads, or of layers by segment.
    """
    if patching.labels[0] != "layer" or len(patching.labels) != 2:
        raise OptionError(f"a map needs heads or layers in rows and columns; these are by {patching.labels}")
    across = patching.labels[1]
    table = patching.table(top=patching.effects.effect[0].size)
    names = ("effect", "low", "high", "q", "share", "random")
    at = [label for label in patching.effects[across].values.tolist() if label in set(table[across])]
    wide = {name: table.pivot(index="layer", columns=across, values=name)[at] for name in names}
    sure, known = wide["q"] < 0.05, bool(table.share.notna().all())
    hover = "effect %{z:.3g} [%{customdata[0]:.3g}, %{customdata[1]:.3g}]<br>q = %{customdata[2]:.2g}"
    hover += "; %{customdata[3]:.1%} of the whole effect" * known + "<br>random direction %{customdata[4]:.3g}"
    figure = draw.head_map(wide, "effect", "effect", hover, across)
    about, (whole, low, high) = patching.about, patching.whole
    note = (
        f"{about['metric']}; {about['direction']}, {about['method']}; n = {patching.units.words}; whole effect "
        f"{whole:+.3g} [{low:+.3g}, {high:+.3g}]"
    )
    heading = f"{about['model']}: patching effect by {across}"
    draw.title(figure, heading, note, max(320, 160 + 24 * len(sure)), top=110)
    top = table.iloc[0]
    return says(
        figure,
        f"{int(sure.values.sum())} of {len(table)} {across}s at q < 0.05. Largest: layer {top.layer:.0f} {across} "
        f"{table[across].iloc[0]}, {top.effect:+.3g} [{top.low:+.3g}, {top.high:+.3g}]"
        + f", {top.share:.0%} of the whole effect" * known
        + '; it was selected as the largest, so its interval is too optimistic (table(select="half") avoids this).',
    )
