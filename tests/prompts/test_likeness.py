"""Prompts that repeat each other are named in a warning; varied ones are not."""

import re
from dataclasses import replace

import pytest

import mechattn as ma
from mechattn.errors import PromptError
from mechattn.prompts.prompt import as_prompts, likeness_of
from mechattn.results.result import alike_words

COPIES = [ma.Prompt("Tom has 3 apples. How many?", id=str(n)) for n in range(6)]
TEMPLATE = [
    f"{name} has {n} apples and buys {n + 2} more."
    for name, n in zip(["Tom", "Ann", "Eli", "Zoe"], range(4))
]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (COPIES, r'6 prompts follow one template.* \("@ has # apples. @ many\?" 6 times\)'),
        (
            as_prompts(TEMPLATE),
            "4 prompts follow one template, apart from numbers and names.*@ has # apples and buys # more.* 4 times",
        ),
    ],
)
def test_what_repeats_is_named(prompts, message):
    assert re.search(message, likeness_of(prompts))


def test_token_ids_are_no_numbers():
    assert not likeness_of([ma.Prompt(tokens=(1, n, 2, n), id=str(n)) for n in range(4)])
    copies = [ma.Prompt(tokens=(1, 2, 3), id=str(n)) for n in range(4)]
    assert re.match(r'4 prompts follow one template.*\("1 2 3" 4 times\)', likeness_of(copies))


def test_varied_prompts_are_left_alone():
    assert not likeness_of(ma.load_prompts("word-problems", limit=64))
    assert not likeness_of(as_prompts(TEMPLATE[:3]))


def test_the_cost_is_named_and_groups_end_it():
    assert likeness_of(COPIES).endswith("up to 2.4 times too narrow")  # √6
    assert likeness_of(as_prompts(TEMPLATE)).endswith("up to 2.0 times too narrow")

    # 51 of one template and 49 alone: √((51² + 49) / 100), not √(100 / 50).
    alone = [ma.Prompt("z" * n, id=f"alone {n}") for n in range(1, 50)]
    copies = [replace(COPIES[0], id=str(n)) for n in range(51)]
    assert likeness_of(copies + alone).endswith("up to 5.1 times too narrow")

    # Negative control: groups of one say nothing.
    groups_of_one = [replace(prompt, group=prompt.id) for prompt in COPIES]
    assert likeness_of(groups_of_one).startswith("6 prompts follow one template")
    assert not likeness_of([replace(prompt, group="apples") for prompt in COPIES])


def test_a_run_says_it_once_and_where_it_was_called(toy):
    words = r"6 prompts follow one template.*Prompt\(group=…\)"
    with pytest.warns(UserWarning, match=words) as said:
        ma.run(toy, COPIES, layers=[0])
    assert [w.filename for w in said if "6 prompts follow one template" in str(w.message)] == [
        __file__
    ]


def test_unnamed_prompts_are_numbered_and_names_are_unique():
    made = as_prompts([ma.Prompt("one"), ma.Prompt("two")])
    assert [prompt.id for prompt in made] == ["0", "1"]
    with pytest.raises(
        PromptError, match="several prompts have the id 'a'; give every prompt its own"
    ):
        as_prompts([ma.Prompt("one", id="a"), ma.Prompt("two", id="a")])

    with pytest.raises(PromptError, match="several prompts have the id '0'"):
        as_prompts([ma.Prompt("one"), ma.Prompt("two"), ma.Prompt("three", id="a")])


def test_a_result_reports_likeness_of_its_parts(toy):
    conditions, named = {"slash": ma.MeaninglessTokens(count=5)}, as_prompts(TEMPLATE)
    made = ma.run(toy, named, conditions, layers=[0])
    whole = "4 prompts follow one template, apart from numbers and names"
    assert ma.render.verdict_words(made).partition("0.05). ")[2].startswith(whole)
    assert made.compare("slash").attrs["alike"].startswith(whole)
    assert f". {whole}" in made.methods()
    assert "4 prompts (much alike, so intervals are too narrow)" in ma.render.caption(
        ma.render.changes(made)
    )
    some = made.sel(prompt=["0", "1", "2"])
    assert (
        ma.render.verdict_words(some)
        .partition("0.05). ")[2]
        .startswith(f"In the whole run, {whole}")
    )
    others = [replace(prompt, id=f"more {prompt.id}") for prompt in named]
    merged = ma.merge_results([made, ma.run(toy, others, conditions, layers=[0])])
    assert alike_words(merged).startswith(f"In parts of it, {whole}")
    varied = ma.run(toy, ma.load_prompts("word-problems", limit=3), conditions, layers=[0])
    assert not alike_words(varied)
    assert "alike" not in ma.render.caption(ma.render.changes(varied))
