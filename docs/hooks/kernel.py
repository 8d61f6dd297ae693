"""Runs before the first cell of a tutorial or notebook: figures as plain divs, files in a scratch folder of its own."""

import html
import os
import tempfile
import warnings

import plotly.io
import tqdm.std
from plotly.io.base_renderers import MimetypeRenderer


class Divs(MimetypeRenderer):
    """The figure alone. The script is on the page once, put there by docs/hooks/site.py."""

    def to_mimebundle(self, figure: dict) -> dict:
        options = {
            "include_plotlyjs": False,
            "include_mathjax": False,
            "full_html": False,
            "validate": False,
        }
        return {
            "text/html": plotly.io.to_html(
                figure, default_width="100%", config={"responsive": True}, **options
            )
        }


plotly.io.renderers["divs"] = Divs()
plotly.io.renderers.default = "divs"
os.chdir(tempfile.mkdtemp(dir=os.environ["TUTORIALS_SCRATCH"]))


def frame(view: object) -> str:
    """A view as it would be saved, not packed as for a notebook: the site replaces its script by the shared one."""
    style = f"width:100%;height:{view.height}px;border:0"
    return f'<iframe srcdoc="{html.escape(view.page())}" style="{style}"></iframe>'


formatter = get_ipython().display_formatter.formatters["text/html"]  # noqa: F821
formatter.for_type_by_name("mechattn.render.html_views", "View", frame)

# A progress bar helps someone who waits; on a page it is noise.
warnings.filterwarnings("ignore", message="IProgress not found")
started = tqdm.std.tqdm.__init__
tqdm.std.tqdm.__init__ = lambda self, *args, **options: started(
    self, *args, **(options | {"disable": True})
)
