"""ES modules as one script: what is imported is what another exports; libraries are packed as installed."""

import base64
import gzip
import re

import pytest

from mechattn.pages.embedded import MODULES, joined, packed_plotly, page_script, template
from mechattn.render.html_views import view_script


def test_modules_are_joined_without_sharing_names():
    made = joined(
        {
            "a": "export function f() { return g(); }\nconst g = () => 1;",
            "b": 'import { f } from "./a.js";\nconst g = f();',
        }
    )

    assert "import" not in made
    assert "export" not in made
    assert made.count("const g") == 2
    assert "const { f } = aModule;" in made
    assert "return { f };" in made


def test_every_import_names_what_an_earlier_module_exports():
    exported = {}
    for name in MODULES:
        text = template(f"{name}.js")
        for names, module in re.findall(
            r'^import \{ (.*) \} from "\./(\w+)\.js";$', text, re.MULTILINE
        ):
            assert set(names.split(", ")) <= exported[module], (name, module)
            for one in names.split(", "):
                assert len(re.findall(rf"\b{one}\b", text)) > 1, (
                    f"{name}.js imports {one} and does not use it"
                )
        exported[name] = set(
            re.findall(r"^export (?:async )?(?:function|const|let) (\w+)", text, re.MULTILINE)
        )

    assert not re.search(r"^(import|export) ", page_script(), re.MULTILINE)
    assert "/*COLOURS*/" not in page_script()


def lengths(text):
    """Lines of each function that stands by itself."""
    found = []
    start = None
    for number, line in enumerate(text.splitlines()):
        start = number if re.match(r"(export )?(async )?function ", line) else start
        if line == "}" and start is not None:
            found.append(number - start + 1)
            start = None
    return found


def test_the_length_of_a_function_is_noticed():  # negative control
    assert lengths("function f() {\n  return 1;\n}\nexport async function g() {\n}\n") == [3, 2]


@pytest.mark.parametrize("name", MODULES)
def test_scripts_keep_the_house_rules(name):
    text = template(f"{name}.js")
    assert text.startswith("// @ts-check\n// ")
    assert len(text.splitlines()) <= 400
    assert max(map(len, text.splitlines())) <= 120
    assert max(lengths(text), default=0) <= 40
    for asks in (
        "fetch(",
        "XMLHttpRequest",
        "innerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
    ):
        assert asks not in text, "nothing is asked for, and no text becomes markup"


def test_plotly_is_packed_as_installed():
    assert gzip.decompress(base64.b64decode(packed_plotly())).decode() == view_script("plotly")
