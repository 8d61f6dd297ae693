"""The whole of it, on a tiny model with random weights, which nothing but arithmetic can support."""

import json
import re
from pathlib import Path

import pytest
import torch

import mechattn as ma
from mechattn.claims import evidence, judge
from mechattn.claims.evidence import ClaimSettings
from mechattn.claims.register import read_register
from mechattn.claims.verdicts import markdown
from mechattn.errors import (
    Interrupted,
    MechattnError,
    ModelError,
    OptionError,
    OutputError,
    PromptTooLong,
)

REGISTER = Path(__file__).parent / "small.toml"
SMALL = {"limit": 6, "problems": 6, "samples": 3, "new_tokens": 4}
KEYS = [claim.key for claim in read_register(REGISTER).claims]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tokenizer):
    """A Qwen2 in the shape of the real one, eight heads for two of keys, its weights as before training."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-qwen2"
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=512, rope_theta=10000.0, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def judged_in(tiny, out, shard=None, **options):
    return ma.judge(REGISTER, tiny, out, ClaimSettings(**SMALL | options), shard=shard)


@pytest.fixture(scope="module")
def judged(tiny, tmp_path_factory):
    """What a run says that was stopped before its answers, and gone on with: no random model was drawn twice."""
    out = tmp_path_factory.mktemp("out") / "small"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence, "_answers", stopped)
        with pytest.raises(Interrupted):
            judged_in(tiny, out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence, "random_weights", never)
        return judged_in(tiny, out), out


def words(verdicts):
    return {one.claim.key: one.outcome.word for one in verdicts.models[0].judged}


def test_random_weights_are_not_told_from_random_weights(judged):
    verdicts, _ = judged
    found = words(verdicts)
    assert set(found) == set(KEYS)
    assert found["affine"] == "holds"
    assert found["falls"] == "no more than untrained", (
        "it falls by dilution, as it does in all of them"
    )
    assert found["helps"] == found["tries"] == "not testable here"
    assert "solves none of 6 problems" in verdicts.models[0].judged[KEYS.index("helps")].outcome.why
    assert not {"supported", "contradicted"} & set(found.values())
    falls = verdicts.models[0].judged[0]
    assert len(falls.parts[0].chance.draws) == 3
    assert falls.q == falls.outcome.p, "three tests, all of them 1"


def test_json_markdown_and_table_say_the_same(judged):
    verdicts, out = judged
    register = read_register(REGISTER)
    stored = json.loads((out / "verdicts.json").read_text())
    assert (stored["register"]["digest"], stored["register"]["code"]) == (
        register.digest,
        register.code,
    )
    assert [claim["key"] for claim in stored["claims"]] == KEYS
    assert (out / "verdicts.md").read_text().strip() == markdown(stored) == str(verdicts)
    assert verdicts.table().verdict.tolist() == [
        c["verdicts"]["tiny-qwen2"]["verdict"] for c in stored["claims"]
    ]
    assert "tiny-qwen2" in verdicts._repr_html_()
    assert str(out.parent) not in (out / "verdicts.json").read_text(), "no path of this machine"
    tables = re.findall(r"^\*\*(.*)\*\*$", markdown(stored), re.MULTILINE)
    assert [title.split()[0] for title in tables] == ["What", "What", "What", "Checks"], (
        "by origin, arithmetic apart"
    )
    assert not stored["models"][0]["exploratory"]


def test_the_page_shows_every_verdict_with_what_it_takes_and_asks_nobody(judged):
    verdicts, out = judged
    text = (out / "index.html").read_text()
    assert verdicts.register.digest in text
    head = text.partition('<section id="heads"')[0]
    for claim, one in zip(verdicts.register.claims, verdicts.models[0].judged):
        assert f'id="claim-{claim.key}"' in text
        row = re.search(rf'<a href="#claim-{claim.key}">.*?</tr>', head, re.DOTALL)[0]
        assert one.outcome.word in row
    behind = text.partition('id="claim-even"')[2].partition("</details>")[0]
    assert "at least 11.1 %, at most 100.0 %" in behind, "the attainable range: one of nine, or all"
    assert "in 3 draws" in behind
    assert "lines of a similar height" in behind
    assert "The source itself was not at hand" in behind
    assert "Exploratory" not in head
    assert not re.search(
        r'src="https?:|<link[^>]*href="https?:', text
    )  # a link may be followed, nothing is fetched
    links = set(re.findall(r'href="#(section-\d+)"', head))
    assert links
    assert all(f'id="{link}"' in text for link in links)


def test_the_first_sentence_counts_what_the_sources_state(judged):
    assert (judged[1] / "index.html").read_text().count(
        "2 claims that the sources state in this model: "
    ) == 1


def test_the_same_call_does_nothing_twice(judged, tiny, monkeypatch):
    verdicts, out = judged
    monkeypatch.setattr(judge, "write", nothing)  # the page is that of the first call
    monkeypatch.setattr(evidence, "random_weights", never)
    monkeypatch.setattr("mechattn.jobs.job.Worker.part", never)
    monkeypatch.setattr("mechattn.evaluation.evaluate.answers", never)
    assert str(judged_in(tiny, out)) == str(verdicts)
    with pytest.raises(OutputError, match="limit differs"):
        judged_in(tiny, out, limit=5)


def test_another_seed_draws_other_random_models(judged, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "write", nothing)
    other = judged_in(tiny, tmp_path, seed=1, without=["answers", "samples"])
    draws = [verdicts.models[0].judged[0].parts[0].chance.draws for verdicts in (judged[0], other)]
    assert not set(draws[0]) & set(draws[1])
    assert words(other)["helps"] == "cannot be told"
    assert (
        other.models[0].judged[KEYS.index("helps")].outcome.why
        == "answers was left out, as asked for"
    )


@pytest.mark.slow
def test_shards_give_the_same(judged, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "write", nothing)
    assert judged_in(tiny, tmp_path, shard="1/2") is None
    assert judged_in(tiny, tmp_path, shard="2/2") is None
    monkeypatch.setattr(evidence, "random_weights", never)
    monkeypatch.setattr("mechattn.evaluation.evaluate.answers", never)
    assert str(judged_in(tiny, tmp_path)) == str(judged[0])


def test_a_place_at_the_end_is_for_answers_alone(tmp_path):
    """Nothing of the prompt reads what is inserted at its end, but its answer does."""
    settings = ClaimSettings(**SMALL)
    (work,) = judge._checked(
        read_register("2510.01032"), ("toy:llama",), tmp_path, settings, force=False
    )
    place = work.runs["place"]
    assert list(work.conditions_of(place)) == place.conditions
    without = place.model_copy(update={"answers": False})
    assert list(work.conditions_of(without)) == [
        name for name in place.conditions if name != "place=before_answer"
    ]


def test_counts_are_those_that_there_are(tmp_path):
    problems = [{"q": f"What is {i} + 1?", "a": str(i + 1), "kind": f"k{i % 2}"} for i in range(40)]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, problems)))
    given = {"prompts": str(path), "field": "q", "answer_field": "a", "group_field": "kind"}

    def work(register, **more):
        settings = ClaimSettings(**given, **more)
        (found,) = judge._checked(
            read_register(register), ("toy:llama",), tmp_path, settings, force=False
        )
        return found

    assert work("2510.01032").problems[0].system.startswith("Please reason step by step"), (
        "that of the register"
    )
    found = work(REGISTER, system="S")
    counts = {name: row["of"] for name, row in judge._counts(found).items()}
    assert counts == {"first": 32, "answers": 40, "samples": 16}, (
        "100 problems of a file of 40 are 40"
    )
    assert (found.problems[0].system, found.problems[1].group, found.problems[1].solution) == (
        "S",
        "k1",
        "2",
    )


@pytest.mark.parametrize(
    ("given", "error", "why"),
    [
        ({"models": "toy:lama"}, ModelError, "toy:lama"),
        ({"models": ["toy:llama", "nowhere/at-all"]}, ModelError, "there is no model"),
        ({"models": ["toy:llama", "toy:llama"]}, OptionError, "given twice"),
        (
            {"without": "nothing"},
            OptionError,
            "there is no such run; there is first, answers, samples",
        ),
        ({"limit": 2}, OptionError, "limit=2"),
        ({"problems": True}, OptionError, "problems=True"),
        ({"samples": 1}, OptionError, "samples=1"),
        (
            {"new_tokens": 1000},
            PromptTooLong,
            r"1,000 new ones are allowed; toy:llama takes 1,024. Give fewer",
        ),
        ({"prompts": "no.jsonl"}, MechattnError, "no.jsonl"),
        ({"register": "no.toml"}, OptionError, "there is no register at"),
    ],
)
def test_what_cannot_be_used_is_told_before_anything_is_loaded(
    tmp_path, monkeypatch, given, error, why
):
    monkeypatch.setattr(evidence, "load_model", never)
    options = {"register": REGISTER, "models": "toy:llama"} | SMALL | given
    register, models = options.pop("register"), options.pop("models")
    with pytest.raises(error, match=why):
        ma.judge(register, models, tmp_path, ClaimSettings(**options))


def test_a_page_of_others_is_not_replaced(tmp_path):
    (tmp_path / "index.html").write_text("mine")
    with pytest.raises(MechattnError, match="was not written by mechattn"):
        ma.judge(REGISTER, "toy:llama", tmp_path)


def test_paper_is_the_register_that_is_shipped(monkeypatch):
    monkeypatch.setattr(judge, "judge", lambda *given, **options: (given, options))
    assert judge.paper("toy:llama", force=True) == (
        ("2510.01032", "toy:llama", "out/paper"),
        {"force": True},
    )


def nothing(*args):
    pass


def never(*args, **kwargs):
    raise AssertionError("this was done before")


def stopped(*args):
    raise Interrupted("stopped")
