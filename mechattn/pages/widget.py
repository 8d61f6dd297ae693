"""The page as a widget whose selection comes back to Python; needs the extra ``widget``."""

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
_TRAITS = ("selected", "prompt", "condition", "quantity")


class Browser(anywidget.AnyWidget):
    """The map of all heads; ``selected``, ``prompt``, ``condition`` and ``quantity`` are clicked.

    Setting ``selected`` to a head such as ``"L1H2"`` selects it in the page; ``prompt`` is that of
    the last pattern clicked, from 0. ``view`` is the page itself.

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
        self.view = view
        self.result = result
        self.maps = maps or result
        super().__init__(source=view.packed(), height=view.height, condition=result.conditions[-1])
        self.on_msg(self._heard)

    @traitlets.validate("selected", "prompt")
    def _check(self, proposal: Any) -> Any:
        value = proposal["value"]
        if proposal["trait"].name == "prompt":
            count = self.maps["sequences"].sizes["prompt"]
            if not 0 <= value < count:
                raise OptionError(f"prompt={value}: choose one of 0 to {count - 1}")
        elif value and self._head(value) is None:
            name = self.result.provenance["model"]["name"]
            raise OptionError(f'selected={value!r}: give a head of {name} such as "L0H2"')
        return value

    def _heard(self, _: Any, content: Any, buffers: Any = None) -> None:
        """Take over what the page says is selected; anything else is ignored."""
        if not isinstance(content, dict) or set(content) != set(_TRAITS):
            return
        before = {name: getattr(self, name) for name in _TRAITS}
        try:
            _set(self, content)
        except (OptionError, traitlets.TraitError):
            _set(self, before)

    def _head(self, name: str) -> tuple[int, int] | None:
        """The layer and head that a name such as "L0H2" means; None if the model has no such
        head."""
        match = _HEAD.fullmatch(name)
        if match is None:
            return None
        layer = int(match[1])
        head = int(match[2])
        model = self.result.provenance["model"]
        if layer >= model["layers"] or head >= model["heads"]:
            return None
        return layer, head

    def _selected_head(self) -> tuple[int, int]:
        head = self._head(self.selected)
        if head is None:
            raise OptionError(
                'no head is selected: click one, or set .selected to one such as "L0H2"'
            )
        return head

    def _contrast(self) -> Contrast:
        if self.condition == BASELINE:
            raise OptionError(
                "the baseline is shown, and nothing is compared: set .condition to another one"
            )
        return Contrast(self.result, self.condition, quantity=self.quantity)

    def table(self) -> pd.DataFrame:
        """Return the selected head's rows of ``result.compare``, of the page's condition and
        quantity."""
        layer, head = self._selected_head()
        table = self._contrast().table()
        return table[(table["layer"] == layer) & (table["head"] == head)]

    def prompts(self) -> pd.DataFrame:
        """Return ``Contrast.by_prompt`` of the selected head: prompts in which it does the most
        first."""
        layer, head = self._selected_head()
        return self._contrast().by_prompt(head_name(layer, head))

    def pattern(self, model: Any) -> View:
        """Return ``ma.pattern`` of the selected head on the selected prompt, with nothing
        inserted."""
        layer, head = self._selected_head()
        sequences = self.maps["sequences"].sel(condition=BASELINE).isel(prompt=self.prompt)
        is_token = sequences.origin.values >= -1  # below, beyond the end of the prompt
        token_ids = sequences.tokens.values[is_token].tolist()
        return pattern(model, Prompt(tokens=tuple(token_ids)), layer, [head])

    def page(self) -> str:
        """Return the page as a complete HTML document."""
        return self.view.page()

    def save(self, path: str | Path, force: bool = False) -> None:
        """Save the page; see :meth:`mechattn.render.html_views.View.save`."""
        self.view.save(path, force)


def _set(widget: Browser, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(widget, name, value)
