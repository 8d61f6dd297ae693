"""What mkdocs needs besides plugins: processes for tutorials, API headings, one copy of each script, no network."""

import ast
import base64
import gzip
import html
import json
import os
import re
import shutil
import tempfile
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from mkdocs_jupyter import convert
from mkdocs_jupyter.nbconvert2 import nb2html
from nbconvert.preprocessors import ExecutePreprocessor
from nbformat.v4 import new_output

SCRIPTS = ("plotly", "circuitsvis")
CALLED_BY_THE_ENGINE = (
    "!^(quantities|options|coords|captures|problem|start|add|add_.*|values|calibrated|check|check_sequence|acting"
    "|marked|which|recorded|source_of)$"
)
AT_ONCE = 2  # notebooks, with one thread each
IMPORTED = (
    "transformer_lens.model_bridge",
    "plotly.io.base_renderers",
    "mechattn.render.draw",
    "scipy.stats",
    "xarray",
    "zarr",
)
running = {}  # by path: the page of a notebook, when it has run
run_in_kernel = ExecutePreprocessor.preprocess
scratch = tempfile.TemporaryDirectory(prefix="mechattn-docs-")


def on_config(config):
    """Kernels start with docs/hooks/kernel.py, each in a scratch folder of its own."""
    startup = Path(scratch.name, "ipython", "profile_default", "startup")
    startup.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("kernel.py"), startup / "00-site.py")
    files = Path(scratch.name, "files")
    files.mkdir(exist_ok=True)
    os.environ |= {"IPYTHONDIR": str(startup.parents[1]), "TUTORIALS_SCRATCH": str(files)}
    os.environ |= {
        "JUPYTER_PLATFORM_DIRS": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return config


def on_files(files, config):
    """When the first notebook is asked for, all start to run, some at a time, each in a fork of this process.

    What they import is imported once, here. First steps, a notebook that users open, runs in a kernel.
    """
    paths = [
        file.abs_src_path for file in files if config.plugins["mkdocs-jupyter"].should_include(file)
    ]
    running.clear()

    def ahead(path, **options):
        if not running:
            for name in IMPORTED:
                import_module(name)
            pool = get_context("fork").Pool(AT_ONCE, maxtasksperchild=1)
            for each in sorted(paths, key=_is_short):
                running[each] = pool.apply_async(nb2html, (each,), options)
            pool.close()
        return running[path].get()

    convert.nb2html = ahead
    ExecutePreprocessor.preprocess = _run


def _is_short(path):
    """Whether a notebook runs toys alone; the others take longest, so they start first."""
    return "real:smollm2" not in Path(path).read_text(encoding="utf-8")


def _run(preprocessor, notebook, resources, km=None):
    """Run the cells in this process; a notebook that names a kernel runs in it."""
    if "kernelspec" in notebook.metadata:
        return run_in_kernel(preprocessor, notebook, resources, km)
    shell = InteractiveShell.instance()
    shell.run_cell(Path(__file__).with_name("kernel.py").read_text("utf-8")).raise_error()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            with shell.display_trap, capture_output() as shown:
                shell.run_cell(cell.source).raise_error()
            for name in ("stdout", "stderr"):
                if text := getattr(shown, name):
                    cell.outputs.append(new_output("stream", name=name, text=text))
            cell.outputs += [
                new_output("display_data", output.data, metadata=output.metadata)
                for output in shown.outputs
                if output.data  # a figure that has shown itself leaves nothing
            ]
    return notebook, resources


def on_page_markdown(markdown, page, config, files):
    """Fill in what a page takes from the code: rooms, figures, headings of the API."""
    if page.file.src_uri == "gallery.py":  # figures need the width
        page.meta["hide"] = ["toc"]
    for name, members in (("figures", _figures), ("conditions", _conditions)):
        marker = f"<!-- {name} -->"
        if marker in markdown:
            entries = [f"::: {member.__module__}.{member.__name__}" for member in members()]
            markdown = markdown.replace(marker, "\n\n".join(entries))
    if page.file.src_uri.startswith("api/"):
        typed = partial(_typed, page=page.file.src_uri)
        markdown = re.sub(r"^::: (\S+)$", typed, markdown, flags=re.MULTILINE)
    for marker, table in (("<!-- rooms -->", _rooms), ("<!-- figure options -->", _figure_options)):
        if marker in markdown:
            markdown = markdown.replace(marker, table())
    return markdown


def on_post_page(output, page, config):
    """A tutorial's page: no link to a CDN, and one copy of each script for the whole site."""
    if "jupyter-wrapper" not in output:
        return output
    up = "../" * page.url.count("/")
    tags = {name: f'<script src="{up}assets/{name}.min.js"></script>' for name in SCRIPTS}

    def shared(frame: re.Match) -> str:
        text = html.unescape(frame[1])
        if packed := re.search(r'atob\("([^"]*)"\)', text):  # as a notebook holds it
            text = gzip.decompress(base64.b64decode(packed[1])).decode("utf-8")
        for name, tag in tags.items():
            text = text.replace(f"<script>{_script(name)}</script>", tag)
        return f'srcdoc="{html.escape(text)}"'

    output = re.sub(r'srcdoc="([^"]*)"', shared, _without_cdn(output))
    output = re.sub(
        r'href="((?!\w+:)[^"#]+)\.(?:md|py)(#[^"]*)?"', r'href="\1.html\2"', output
    )  # nobody else does
    figures = tags["plotly"] if "plotly-graph-div" in output else ""
    return output.replace("</head>", f"{figures}</head>", 1)


def on_post_build(config):
    """The scripts, as installed; the theme's loader of mermaid, which no page uses, is pointed nowhere."""
    for name in SCRIPTS:
        Path(config.site_dir, "assets", f"{name}.min.js").write_text(
            _script(name), encoding="utf-8"
        )
    for bundle in Path(config.site_dir, "assets", "javascripts").glob("bundle.*.js"):
        text = re.sub(
            r"https://unpkg\.com/[^\"]*",
            "data:text/javascript,",
            bundle.read_text(encoding="utf-8"),
        )
        bundle.write_text(text, encoding="utf-8")


def _typed(entry: re.Match, page: str) -> str:
    """An entry of the API, headed by what users type: ``ma.run``, ``ma.render.accuracy``, else the name to import."""
    import mechattn as ma

    home, name = entry[1].rsplit(".", 1)
    thing = getattr(import_module(home), name)
    spaces = {"ma": ma} | {
        f"ma.{space}": getattr(ma, space)
        for space in ("analyses", "conditions", "interventions", "render")
    }
    public = [
        f"{space}.{name}" for space, held in spaces.items() if getattr(held, name, None) is thing
    ]
    options = (
        {"heading": public[0], "toc_label": public[0]}
        if public
        else {"heading": entry[1], "toc_label": name}
    )
    if name == "Result":  # its methods that ask the rooms above stand in a class of their own
        options["inherited_members"] = True
    if page in ("api/analyses.md", "api/interventions.md"):
        options["filters"] = ["!^_", CALLED_BY_THE_ENGINE]
    if page == "api/protocols.md":  # methods are a level below the table of contents
        options["heading_level"] = 3
    return f"{entry[0]}\n    options: {json.dumps(options)}"


def _figures() -> list:
    """The functions that draw figures, as they are declared."""
    from mechattn.render.figure_declaration import FIGURES

    return [declared.draw for declared in FIGURES.values()]


def _figure_options() -> str:
    """What a config can say of each kind of figure."""
    from mechattn.render.figure_declaration import FIGURES

    lines = ["| kind of figure | options |", "|---|---|"]
    for name, declared in FIGURES.items():
        if declared.draws_results:
            options = ", ".join(f"`{option}`" for option in declared.takes)
            lines.append(f"| `{name}` | {options} |")
    return "\n".join(lines)


def _conditions() -> list:
    """What ``ma.conditions`` offers."""
    from mechattn import conditions

    return [member for name, member in vars(conditions).items() if not name.startswith("_")]


def _rooms() -> str:
    package, lines = Path(__file__).parents[2] / "mechattn", []
    for room in sorted({path.parent for path in package.rglob("*.py")}):
        modules = sorted(path for path in room.glob("*.py") if path.name != "__init__.py")
        if modules:
            name = room.relative_to(package.parent).as_posix()
            lines.append(f"\n### {name}\n\n| file | what is in it |\n|---|---|")
            lines += [f"| `{path.name}` | {_first_line(path)} |" for path in modules]
    return "\n".join(lines)


def _first_line(path: Path) -> str:
    words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return words.split("\n\n")[0].replace("\n", " ").replace("|", "\\|").replace("``", "`")


def _script(name: str) -> str:
    from mechattn.render.html_views import view_script

    return view_script(name)


def _without_cdn(output: str) -> str:
    """What nbconvert adds for MathJax and mermaid: neither is used, and both point at a CDN."""
    output = re.sub(
        r"<!-- Load mathjax -->.*?<!-- End of mathjax configuration -->",
        "",
        output,
        flags=re.DOTALL,
    )
    return re.sub(
        r'<script type="module">(?:(?!</script>).)*?mermaid.*?</script>',
        "",
        output,
        flags=re.DOTALL,
    )
