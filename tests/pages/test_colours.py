"""One palette on pages and in figures, told apart with any colour blindness, in both lights."""

import json
import re

import numpy as np
import pytest

from mechattn.pages.embedded import page_script, template
from mechattn.render.draw import DARK, DIVERGING, WITH, WITHOUT

# Machado, Oliveira and Fernandes (2009), "A physiologically-based model for simulation of color vision deficiency":
# of linear RGB, where one kind of cone is missing.
BLIND = {
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
APART = 20  # of CIELAB; 2.3 is just noticeable


def linear(colour):
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    ) @ np.clip(rgb, 0, 1)
    x, y, z = (
        np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz / [0.95047, 1.0, 1.08883]
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(one, other, kind):
    matrix = np.array(BLIND.get(kind, np.eye(3)))
    return float(np.linalg.norm(lab(matrix @ linear(one)) - lab(matrix @ linear(other))))


@pytest.mark.parametrize("kind", ["none", *BLIND])
def test_less_none_and_more_are_told_apart(kind):
    for less, none, more in ([at for _, at in DIVERGING], [DARK[at] for _, at in DIVERGING]):
        assert distance(less, more, kind) > 2 * APART
        assert min(distance(less, none, kind), distance(none, more, kind)) > APART


def test_red_and_green_would_be_noticed():  # negative control
    assert distance("#d73027", "#1a9850", "none") > 4 * APART
    assert distance("#d73027", "#1a9850", "deutan") < 2 * APART


def test_the_page_has_the_figures_colours():
    held = json.loads(re.search(r"const COLOURS = (\{.*\});", page_script())[1])
    (_, less), (_, none), (_, more) = DIVERGING
    assert held["map"] == {
        "light": [none, less, more],
        "dark": [DARK[none], DARK[less], DARK[more]],
    }
    style = template("page.css")
    for name, colour in {"with": WITH, "without": WITHOUT}.items():
        assert re.findall(rf"--{name}: (#\w+)", style) == [colour, DARK[colour]]
