"""The page in a notebook as a widget whose selection comes back to Python; needs the extra ``widget``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from mechattn.axes import BASELINE, head_name
from mechattn.contrast.contrast import Contrast
from mechattn.errors import OptionError
from mechattn.pages.embedded import template
from mechattn.pages.show_prompt import pattern
from mechattn.prompts.prompt import Prompt
from mechattn.render.html_views import View
from mechattn.results.result import Result

if TYPE_CHECKING:
    import pandas as pd

_HEAD = re.compile(r"L(\d+)H(\d+)")
_CHOSEN = ("selected", "prompt", "condition", "quantity")


class Browser(anywidget.AnyWidget):
    """The map of all heads: what is clicked is in ``selected``, ``prompt``, ``condition`` and ``quantity``.

    Setting ``selected`` to a head such as ``"L1H2"`` selects it in the page; ``prompt`` is that of the last pattern
    clicked, from 0. ``view`` is the page itself.

    Raises:
        OptionError: ``selected`` is not a head of the model, or ``prompt`` not one of the prompts.
    """

    _esm = template("widget.js")
    source = traitlets.Unicode().tag(sync=True)
    height = traitlets.Int().tag(sync=True)
    selected = traitlets.Unicode().tag(sync=True)
    prompt = traitlets.Int(0).tag(sync=True)
    condition = traitlets.Unicode()
    quantity = traitlets.Unicode("received")

    def __init__(self, view: View, result: Result, maps: Result | None = None) -> None:
        self.view, self.result, self.maps = view, result, maps or result
        super().__init__(source=view.packed(), height=view.height, condition=result.conditions[-1])
        self.on_msg(self._heard)

    @traitlets.validate("selected", "prompt")
    def _known(self, proposal: Any) -> Any:
        value, model, count = (
            proposal["value"],
            self.result.provenance["model"],
            self.maps["sequences"].sizes["prompt"],
        )
        if proposal["trait"].name == "prompt":
            if not 0 <= value < count:
                raise OptionError(f"prompt={value}: choose one of 0 to {count - 1}")
        elif value and not (
            (at := self._at(value)) and at[0] < model["layers"] and at[1] < model["heads"]
        ):
            raise OptionError(f'selected={value!r}: give a head of {model["name"]} such as "L0H2"')
        return value

    def _heard(self, _: Any, content: Any, buffers: Any = None) -> None:
        """Take over what the page says is chosen; anything else is ignored."""
        if not isinstance(content, dict) or set(content) != set(_CHOSEN):
            return
        before = {name: getattr(self, name) for name in _CHOSEN}
        try:
            _set(self, content)
        except (OptionError, traitlets.TraitError):
            _set(self, before)

    def _at(self, name: str) -> tuple[int, int] | None:
        found = _HEAD.fullmatch(name)
        return (int(found[1]), int(found[2])) if found else None

    def _chosen(self) -> tuple[int, int]:
        if at := self._at(self.selected):
            return at
        raise OptionError('no head is selected: click one, or set .selected to one such as "L0H2"')

    def table(self) -> pd.DataFrame:
        """Return the rows of ``result.compare`` for the selected head, in the page's condition and quantity."""
        (layer, head), table = self._chosen(), self._asked().table()
        return table[(table["layer"] == layer) & (table["head"] == head)]

    def prompts(self) -> pd.DataFrame:
        """Return ``Contrast.by_prompt`` of the selected head: the prompts in which it does the most first."""
        return self._asked().by_prompt(head_name(*self._chosen()))

    def _asked(self) -> Contrast:
        if self.condition == BASELINE:
            raise OptionError(
                "the baseline is shown, and nothing is compared: set .condition to another one"
            )
        return Contrast(self.result, self.condition, quantity=self.quantity)

    def pattern(self, model: Any) -> View:
        """Return ``ma.pattern`` of the selected head on the selected prompt, without inserted tokens."""
        one = self.maps["sequences"].sel(condition=BASELINE).isel(prompt=self.prompt)
        ids = one.tokens.values[one.origin.values >= -1]
        return pattern(
            model, Prompt(tokens=tuple(ids.tolist())), (at := self._chosen())[0], [at[1]]
        )

    def page(self) -> str:
        """Return the page as a complete HTML document."""
        return self.view.page()

    def save(self, path: str | Path, force: bool = False) -> None:
        """Save the page; see :meth:`mechattn.render.html_views.View.save`."""
        self.view.save(path, force)


def _set(widget: Browser, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(widget, name, value)
