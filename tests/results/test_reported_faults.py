"""Runs that people resume: what the model reads must be what it read, token by token."""

import json
import shutil
from dataclasses import replace

import pytest

import mechattn as ma
from mechattn.errors import OptionError
from mechattn.jobs.job import Worker
from mechattn.jobs.resumable_run import chunks_folder, run_job
from mechattn.model.checkpoint import toy_folder

DATED = "Today is {}. {{% for m in messages %}}{{{{ m.content }}}}\n{{% endfor %}}"
QUESTIONS = ["Tom has 3 apples. How many?", "What is 3 + 4?"]


@pytest.fixture
def folder(tmp_path):
    """A toy whose chat template writes the date."""
    place = tmp_path / "toy"
    shutil.copytree(toy_folder("toy:llama"), place)
    write_date(place, "24 November")
    return place


def write_date(place, date):
    path = place / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(settings | {"chat_template": DATED.format(date)}), "utf-8")
    (place / "chat_template.jinja").unlink(missing_ok=True)


def job(folder):
    prompts = [ma.Prompt(text, template="chat") for text in QUESTIONS]
    return ma.Job(str(folder), prompts, chunk=1, verify=False)


def test_a_template_with_another_date_is_refused_with_the_difference(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("mechattn.jobs.job.stored_hash", lambda name: "the same weights")
    path = tmp_path / "result.zarr"
    first = job(folder)
    place = chunks_folder(path) / "00000.zarr"
    place.parent.mkdir()
    _, result = Worker(first).part(0)
    replace(result, provenance={**result.provenance, "job_decides": first.decides}).save(place)
    write_date(folder, "25 November")
    with pytest.raises(OptionError, match=r"token_ids was .*24 November.* is now .*25 November"):
        run_job(job(folder), path)


def test_another_template_gives_another_job(folder):
    before = job(folder).fingerprint
    write_date(folder, "25 November")
    assert job(folder).fingerprint != before


def test_answers_are_not_resumed_with_another_date(folder, tmp_path):
    prompts = [ma.Prompt(QUESTIONS[1], template="chat", solution="7")]
    path = tmp_path / "answers.jsonl"
    ma.evaluate(ma.load_model(str(folder), verify=False), prompts, new_tokens=2, out=path)
    write_date(folder, "25 November")
    with pytest.raises(OptionError, match=r"prompt 0 under .baseline. differs in its tokens"):
        ma.evaluate(ma.load_model(str(folder), verify=False), prompts, new_tokens=2, out=path)
