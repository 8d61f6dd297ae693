"""Views as HTML for a notebook or an offline page, and pages written completely or not at all."""

from __future__ import annotations

import base64
import gzip
import html
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from mechattn.errors import OutputError
from mechattn.render.draw import FONT
from mechattn.results.result import Result
from mechattn.store.atomic_writes import check_writable, write_whole

GENERATOR = '<meta name="generator" content="mechattn'  # in the head of each of our pages
_HEAD = 2**16  # bytes at the start of a file that must contain it, before any style or script
Script = Literal["circuitsvis", "plotly"]


@dataclass(frozen=True)
class View:
    """A view as HTML, which can be shown in a notebook or saved as an offline page.

    In a notebook it displays in its own frame, without network requests. ``body`` can be put into a page that already
    contains :func:`view_script`.

    Args:
        body: The HTML.
        height: The height of the frame, in pixels.
        script: The library whose script it needs, if any.
    """

    body: str
    height: int = 620
    script: Script | None = "circuitsvis"

    def page(self) -> str:
        """Return a complete HTML document that opens offline."""
        script = f"<script>{view_script(self.script)}</script>" if self.script else ""
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8">{GENERATOR}"><title>Attention</title>'
            f"<style>:root {{ color-scheme: light dark }} body {{ font-family: {FONT} }}</style></head>"
            f"<body>{script}{self.body}</body></html>"
        )

    def save(self, path: str | Path, force: bool = False) -> None:
        """Save the document to a file, completely or not at all.

        Args:
            path: The HTML file.
            force: Replace a file that mechattn did not write.

        Raises:
            OutputError: The path holds such a file, or cannot be written to.
        """
        save_page(path, self.page(), force)

    def __repr__(self) -> str:
        """One line: the HTML itself is for a notebook or a file."""
        drawn = f", drawn by {self.script}" if self.script else ""
        return f"View({len(self.body):,} characters of HTML{drawn}; .save(path) writes a page that opens offline)"

    def _repr_html_(self) -> str:
        # Packed, so that a notebook with ten views takes 5 MB and not 15; the browser unpacks it, without a request.
        packed = base64.b64encode(gzip.compress(self.page().encode("utf-8"), mtime=0)).decode()
        source = html.escape(_UNPACKS.replace("PACKED", packed), quote=True)
        return f'<iframe srcdoc="{source}" style="width:100%;height:{self.height}px;border:0"></iframe>'


_UNPACKS = """<!doctype html><meta charset="utf-8"><script>
(async () => {
  const bytes = Uint8Array.from(atob("PACKED"), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const page = await new Response(stream).text();
  document.open();
  document.write(page);
  document.close();
})();
</script>"""


@cache
def view_script(script: Script = "circuitsvis") -> str:
    """The script of circuitsvis (1.3 MB) or of plotly (4.5 MB), as installed; needed once per page."""
    if script == "plotly":
        import plotly.offline

        text = plotly.offline.get_plotlyjs()
    else:
        import circuitsvis

        text = (Path(circuitsvis.__file__).parent / "dist" / "cdn" / "iife.js").read_text(encoding="utf-8")
    return text.replace("</script", "<\\/script")


def in_script(json_text: str) -> str:
    """JSON that is safe in a script element, whatever tokens it contains."""
    return json_text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def prompt_tokens(result: Result, condition: str, prompt: int) -> list[str]:
    """The tokens of a prompt: as text for the first prompt, as ids for the others."""
    sequences = result["sequences"].sel(condition=condition)
    length = int((sequences.origin.isel(prompt=prompt) >= -1).sum())
    chosen = sequences.first_prompt_text if prompt == 0 else sequences.tokens.isel(prompt=prompt)
    return [str(token) for token in chosen.values[:length]]


def check_page_place(path: str | Path, force: bool = False) -> None:
    """Check that a page can be written here, before the run."""
    if not isinstance(path, (str, os.PathLike)):
        raise OutputError(f'{path!r} is not a path: give one such as "out/page.html"')
    path = Path(path)
    check_writable(path)
    if path.exists() and not (path.is_file() and (force or _is_ours(path))):
        raise OutputError(
            f"{path} exists and was not written by mechattn, so it is not replaced; choose another name, or give "
            f"--force (in Python force=True)"
        )


def save_page(path: str | Path, text: str, force: bool = False) -> Path:
    """Write a page completely or not at all; an existing page is kept until then."""
    path = Path(path)
    check_page_place(path, force)
    write_whole(path, lambda new: new.write_text(text, encoding="utf-8"))
    return path


def _is_ours(path: Path) -> bool:
    try:
        with open(path, "rb") as stored:
            head = stored.read(_HEAD).decode("utf-8", "replace")
    except OSError:
        return False
    return not head or GENERATOR in head.partition("<style")[0].partition("<script")[0]
