"""The whole of it, on a tiny model with random weights: which nothing but a definition can support."""

import json
import re

import pytest
import torch

import mechattn as ma
from mechattn.claims import evidence_run, page, paper, probe
from mechattn.claims.register import CLAIMS, VERSION, digest
from mechattn.claims.verdicts import markdown
from mechattn.errors import ConditionError, Interrupted, ModelError, OptionError, OutputError, PromptTooLong

SMALL = {"limit": 6, "problems": 6, "samples": 2, "new_tokens": 4}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tokenizer):
    """A Qwen2 in the shape of the real one, eight heads for two of keys, its weights as before training."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-qwen2"
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=512, rope_theta=10000.0, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def judged(tiny, tmp_path_factory):
    """What a run says that was stopped before its answers, and gone on with: nothing was done twice."""
    out = tmp_path_factory.mktemp("out") / "paper"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence_run, "_answers", stopped)
        with pytest.raises(Interrupted):
            ma.paper(tiny, out, **SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper, "probed", never)
        patch.setattr(evidence_run, "random_weights", never)
        patch.setattr("mechattn.jobs.job.Worker.part", never)
        return ma.paper(tiny, out, **SMALL), out


def test_random_weights_support_nothing_but_what_holds_by_definition(judged):
    verdicts, _ = judged
    (of,) = verdicts.models
    assert [one.claim for one in of.judged] == list(CLAIMS)
    for one in of.judged:
        if one.outcome.word == "supported":
            assert one.claim.by_definition
            assert one.outcome.why == "it holds without any training"
    words = {one.claim.key: one.outcome.word for one in of.judged}
    assert words["attention_falls"] == words["arm_lowers_near_zero"] == words["shared_evenly"] == "supported"
    assert words["more_than_dilution"] == "contradicted"
    assert words["tokens_help"] == "cannot be told"
    assert "solves none of 6 problems" in of.judged[[c.key for c in CLAIMS].index("tokens_help")].outcome.why
    assert any("Another model" in words for words in of.deviations)


def test_json_markdown_and_table_say_the_same(judged):
    verdicts, out = judged
    stored = json.loads((out / "paper.json").read_text())
    assert (stored["register"]["version"], stored["register"]["digest"]) == (VERSION, digest())
    assert [claim["key"] for claim in stored["claims"]] == [claim.key for claim in CLAIMS]
    assert (out / "paper.md").read_text().strip() == markdown(stored) == str(verdicts)
    table = verdicts.table()
    assert table.verdict.tolist() == [claim["verdicts"]["tiny-qwen2"]["verdict"] for claim in stored["claims"]]
    assert "tiny-qwen2" in verdicts._repr_html_()
    assert str(out.parent) not in (out / "paper.json").read_text(), "no path of this machine"


def test_the_page_shows_every_verdict_and_asks_nobody(judged):
    verdicts, out = judged
    text = (out / "index.html").read_text()
    assert digest() in text
    head = text.partition('<section id="heads"')[0]
    for claim, one in zip(CLAIMS, verdicts.models[0].judged):
        assert f'id="claim-{claim.key}"' in text
        row = re.search(rf'<a href="#claim-{claim.key}">.*?</tr>', head, re.DOTALL)[0]
        assert one.outcome.word in row
        assert ("by definition" in row) == bool(claim.by_definition)
    assert not re.search(r'(?:src|href)="https?:', text)
    links = set(re.findall(r'href="#(section-\d+)"', head))
    assert links
    assert all(f'id="{link}"' in text for link in links)


def test_the_same_call_does_nothing_twice(judged, tiny, monkeypatch):
    verdicts, out = judged
    monkeypatch.setattr(paper, "write", unwritten)  # the page is that of the first call
    monkeypatch.setattr(paper, "probed", never)
    monkeypatch.setattr(evidence_run, "random_weights", never)
    monkeypatch.setattr("mechattn.jobs.job.Worker.part", never)
    monkeypatch.setattr("mechattn.evaluation.evaluate.answers", never)
    assert str(ma.paper(tiny, out, **SMALL)) == str(verdicts)
    with pytest.raises(OutputError, match="limit differs"):
        ma.paper(tiny, out, **(SMALL | {"limit": 5}))


def unwritten(*args):
    pass


def never(*args, **kwargs):
    raise AssertionError("this was done before")


@pytest.mark.slow
def test_shards_give_the_same(judged, tiny, tmp_path, monkeypatch):
    verdicts, _ = judged
    monkeypatch.setattr(paper, "write", unwritten)
    assert ma.paper(tiny, tmp_path, **SMALL, shard="1/2") is None
    monkeypatch.setattr(paper, "probed", never)
    monkeypatch.setattr("mechattn.jobs.job.Worker.part", never)  # one chunk of prompts: the first share has it
    assert ma.paper(tiny, tmp_path, **SMALL, shard="2/2") is None
    monkeypatch.setattr(evidence_run, "random_weights", never)
    monkeypatch.setattr("mechattn.evaluation.evaluate.answers", never)
    assert str(ma.paper(tiny, tmp_path, **SMALL)) == str(verdicts)


def stopped(*args):
    raise Interrupted("stopped")


def test_what_cannot_be_used_is_told_before_anything_is_loaded(tiny, tmp_path, monkeypatch):
    for module in (probe, evidence_run):
        monkeypatch.setattr(module, "load_model", never)
    with pytest.raises(ModelError, match="toy:lama"):
        ma.paper("toy:lama", tmp_path / "a")
    with pytest.raises(ModelError, match="there is no model"):
        ma.paper(["toy:llama", str(tmp_path / "nowhere" / "at-all")], tmp_path / "a")
    with pytest.raises(OptionError, match=r"a budget of 1 s is too small: .* needs"):
        ma.paper(tiny, tmp_path / "a", budget=1e-6)
    with pytest.raises(OptionError, match='such as "30min"'):
        ma.paper(tiny, tmp_path / "a", budget="soon")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "index.html").write_text("mine")
    with pytest.raises(OutputError, match="was not written by mechattn"):
        ma.paper(tiny, tmp_path / "b")
    assert not (tmp_path / "a" / "plan.json").exists()


def test_a_tokenizer_that_cannot_make_the_filler_is_told_before_anything_is_loaded(tiny, tmp_path, monkeypatch):
    def forty(text, add_special_tokens=True):
        return {"input_ids": [0] * 40 * text.count("/")}

    forty.decode = lambda ids: "/"
    monkeypatch.setattr(probe, "tokenizer_named", lambda name: forty)
    monkeypatch.setattr(probe, "load_model", never)
    with pytest.raises(ConditionError, match=r"tiny-qwen2: no whole number of '/' gives about 55 tokens"):
        ma.paper(tiny, tmp_path / "out")


def test_a_problem_that_is_too_long_is_told_before_anything_is_measured(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "run", never)
    with pytest.raises(PromptTooLong, match=r"500 new ones are allowed; .* takes 512. Give fewer new tokens"):
        ma.paper(tiny, tmp_path, **(SMALL | {"new_tokens": 500}))


def test_the_first_sentence_counts_what_holds_in_all_models(judged):
    verdicts, _ = judged
    said = page.answer(verdicts)
    free = [
        one for one in verdicts.models[0].judged if not one.claim.by_definition and one.claim.where.startswith("arXiv")
    ]
    contradicted = [one.claim.title for one in free if one.outcome.word == "contradicted"]
    assert f"Of the paper’s {len(free)} claims that could fail, 0 are supported in this model; " in said
    assert f"{len(contradicted)} are contradicted" in said
    assert said.count(";") == len(contradicted)
