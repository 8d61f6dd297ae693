"""What decides the numbers is told in the same words on another day, and in other words when it is something else."""

import linecache
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import mechattn as ma
from mechattn.analysis import ANALYSES
from mechattn.interventions.ablation import HeadMeans
from mechattn.results.provenance import identity, versions
from tests.scripts import loaded

SLASH = ma.MeaninglessTokens(count=5)
OURS = [
    ma.RandomSentence(count=3),
    SLASH.masked().unshifted(),
    SLASH.under((ma.interventions.ARM(layers=(0, 1)), ma.interventions.ARM(c=0.2))),
    ma.Baseline(ma.interventions.HeadAblation(((0, 1),), HeadMeans({0: torch.ones(2, 3)}, 4))),
    ma.Baseline(ma.interventions.AffineAttention(scale=0.5)),
    [SLASH],
    (SLASH,),
    {"a": [1, 2.5, None, True, "é", b"x"]},
    *(kind() for kind in ANALYSES),
]


def test_what_is_ours_reads_as_it_is_written():
    for value in OURS:
        assert identity(value) == repr(value)


class Plain:
    """As a user writes one: no dataclass, no words of its own."""

    def __init__(self, strength=1.0, **more):
        self.strength = strength
        self.__dict__.update(more)


@dataclass
class Fields:
    direction: torch.Tensor
    hidden: float = field(default=1.0, repr=False)


class Words(Plain):
    def __repr__(self):
        return "always the same"


class Slots:
    __slots__ = "value"

    def __init__(self, value):
        self.value = value


class Colour(Enum):
    RED = 1
    BLUE = 2


def scaled(by):
    return lambda x: x * by


def on_one_line():
    return [
        lambda x: x + 1,
        lambda x: x + 2,
        lambda x: x.cos(),
        lambda x: [y + 1 for y in x],
        lambda x: [y + 2 for y in x],
    ]


def unset():
    return lambda: late
    late = 0


def with_default(x, by=2):
    return x * by


def with_keyword(by):
    return lambda x, *, by=by: x * by


DIFFERENT = [
    partial(scaled(2)), partial(scaled(3)), partial(with_keyword(2)), with_keyword(2), with_keyword(3),
    Plain(), Plain(2.0), Plain(more=1), Words(), Words(2.0), Slots(1), Slots(2), Colour.RED, Colour.BLUE,
    pd.DataFrame([1], None, ["a"]), pd.DataFrame([1], None, ["b"]), unset(), SLASH.under(Plain()), SLASH.under(Plain(2.0)),
    Fields(torch.ones(3)), Fields(torch.zeros(3)), Fields(torch.ones(3), hidden=2.0), Fields(np.ones(3)),
    Fields(torch.ones(3, dtype=torch.bfloat16)), with_default, partial(with_default, by=3),
    scaled(2), scaled(3), len, Plain, Plain(2.0).__init__, torch.float32, torch.float16, {1, 2}, {1, 3}, [1], (1,),
    *on_one_line(),
]  # fmt: skip


def test_different_things_have_different_words():
    words = [identity(value) for value in DIFFERENT]
    assert [word for word in words if words.count(word) > 1] == []
    assert not any(" at 0x" in word for word in words)


def test_the_same_again_has_the_same_words():
    def made():
        return Plain(
            2.0,
            direction=torch.arange(4.0),
            inner=[Plain(), SLASH],
            f=scaled(3),
            names={"a", "b"},
            objects=np.array([Plain()]),
        )

    assert identity(made()) == identity(made())
    assert repr(made()) != repr(made())  # negative control: these are two addresses


def test_what_holds_itself_comes_to_an_end():
    one = Plain()
    one.me = [one]
    assert identity(one).count("…") == 1


def own_module(path, text):
    """A module that is written anew."""
    path.write_text(text)
    return loaded(path, f"own_{path.stem}")


def test_another_source_is_another_class(tmp_path):
    text = "class Own:\n    def add(self, x):\n        return x + 1\nclass Heir(Own):\n    pass\n"
    first = own_module(tmp_path / "a.py", text)
    same = own_module(tmp_path / "b.py", text)
    other = own_module(tmp_path / "c.py", text.replace("+ 1", "+ 2"))
    for name in ("Own", "Heir"):
        words = identity(getattr(first, name)())
        assert words == identity(getattr(same, name)())
        assert words != identity(getattr(other, name)())
        assert words.startswith(f"{name}[source ")


def typed(text, cell=None):
    """A class of a notebook, whose cells Python remembers line by line; or of a text that nobody remembers."""
    if cell is not None:
        linecache.cache[cell] = (len(text), None, text.splitlines(True), cell)
    space = {"__name__": "__main__"}
    exec(compile(text, cell or "<typed>", "exec"), space)
    return space["Typed"]()


def test_notebook_and_sourceless_classes_have_an_identity():
    text = "class Typed:\n    def add(self, x):\n        return x + 1\n"
    other = text.replace("+ 1", "+ 2")
    assert identity(typed(text, "<cell 1>")) == identity(typed(text, "<cell 2>"))
    assert identity(typed(text, "<cell 1>")) != identity(typed(other, "<cell 3>"))
    assert identity(typed(text)).startswith("Typed[source ")
    assert identity(typed(text)) != identity(typed(other))


def test_no_word_depends_on_the_process(tmp_path):
    """The order of sets does, and addresses do."""
    code = (
        "from mechattn.results.provenance import identity\n"
        "class Own:\n    def __init__(self): self.names = {str(i) for i in range(9)}; self.f = lambda x: x in {'a', 'b', 'c'}\n"
        "print(identity([Own(), {'a', 'b', 'c'}]))\n"
    )
    (tmp_path / "own.py").write_text(code)
    said = {
        subprocess.run(
            [sys.executable, str(tmp_path / "own.py")], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(Path(ma.__file__).parents[1])},
        ).stdout
        for seed in (1, 2)
    }  # fmt: skip
    assert len(said) == 1


def test_torch_is_named_by_what_is_loaded():
    """The metadata of a package may be of another build, which lacks "+cpu"."""
    assert versions()["torch"] == torch.__version__
    assert versions()["mechattn"] == ma.__version__
