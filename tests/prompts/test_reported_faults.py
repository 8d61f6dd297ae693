"""Prompts as people bring them: kinds of fault from public reports, each with its right value."""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import mechattn as ma
from mechattn.axes import SEGMENTS
from mechattn.errors import PromptError
from mechattn.prompts.prompt import as_prompts
from mechattn.prompts.token_sequences import token_texts
from mechattn.prompts.tokenization import tokenize

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}no thoughts {% endif %}<|assistant|>"
)


@pytest.fixture
def chat_model(toy):
    tokenizer = copy.deepcopy(toy.tokenizer)
    tokenizer.chat_template = CHATML
    return SimpleNamespace(tokenizer=tokenizer, cfg=toy.cfg)


def text_in(sequence, model, segment):
    return model.tokenizer.decode(sequence.tokens[sequence.of_segment(segment)])


# Segments found by searching the rendered text.


def test_a_template_that_trims(chat_model):
    chat_model.tokenizer.chat_template = CHATML.replace("m.content", "m.content | trim")
    prompt = ma.Prompt("  How many?\n", system="Be brief.\n", template="chat")
    sequence = tokenize(prompt, chat_model)
    assert text_in(sequence, chat_model, "question").strip() == "How many?"
    assert text_in(sequence, chat_model, "system").strip() == "Be brief."


def test_a_template_that_rewrites_the_question_is_refused(chat_model):
    chat_model.tokenizer.chat_template = CHATML.replace("m.content", "m.content | upper")
    with pytest.raises(PromptError, match=r'changes the texts of prompt 0 .*use template="plain"'):
        tokenize(ma.Prompt("How many?", template="chat"), chat_model)


# Options of the template.


def test_template_options_reach_the_template(chat_model):
    plain = ma.Prompt("How many?", template="chat")
    options = ma.Prompt("How many?", template="chat", template_options={"enable_thinking": False})
    texts = [
        chat_model.tokenizer.decode(tokenize(prompt, chat_model).tokens)
        for prompt in (plain, options)
    ]
    assert "no thoughts" in texts[1]
    assert "no thoughts" not in texts[0]


# Any iterable is prompts.


def test_what_a_tokenizer_returns_is_read_as_token_ids(toy):
    texts = ["Tom has 3 apples.", "How many?"]
    first, second = (toy.tokenizer(text)["input_ids"] for text in texts)
    padding = [0] * (len(first) - len(second))
    padded = {
        "input_ids": torch.tensor([first, second + padding]),
        "attention_mask": torch.tensor([[1] * len(first), [1] * len(second) + padding]),
    }
    for given, expected in (
        (padded, [first, second]),
        (toy.tokenizer(texts), [first, second]),
        (np.array([first]), [first]),
    ):
        assert [list(prompt.tokens) for prompt in as_prompts(given)] == expected


def test_a_list_of_token_ids_is_kept_as_a_tuple():
    assert ma.Prompt(tokens=[7]).tokens == (7,)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"question": "How many?"}, r"a dict with \['question'\]"),
        ([{"question": "How many?"}], "prompt 0 is of type dict"),
        (3, "of type int"),
        (pd.DataFrame({"question": ["How many?"]}), "of type DataFrame"),
    ],
)
def test_other_containers_are_refused_by_their_type(prompts, message):
    with pytest.raises(PromptError, match=message):
        as_prompts(prompts)


def test_an_array_of_texts_is_read_as_texts():
    texts = ["What is 3 + 4?", "Add 2 and 9."]
    for array in (np.array(texts), np.array(texts, dtype=object)):
        assert [prompt.question for prompt in as_prompts(array)] == texts


# Control tokens inside a question.


def test_a_control_token_in_a_question_is_named(toy):
    with pytest.warns(
        UserWarning, match="contains '<eos>', which this tokenizer reads as a control"
    ):
        sequence = tokenize(ma.Prompt("What is <eos> for?"), toy)
    assert toy.tokenizer.eos_token_id in sequence.tokens


def test_a_control_token_can_be_read_as_text(toy, recwarn):
    sequence = tokenize(ma.Prompt("What is <eos> for?", split_special_tokens=True), toy)
    assert toy.tokenizer.eos_token_id not in sequence.tokens
    assert not recwarn
    assert {SEGMENTS[code] for code in sequence.segment.tolist()} == {
        "first",
        "question",
        "template",
    }


# Labels of characters that several tokens make up.


def decoded_bytes(token_ids):
    return bytes(token_ids).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("a你", ["a", "你 1/3", "你 2/3", "你 3/3"]),
        ("é!", ["é 1/2", "é 2/2", "!"]),
        ("🙂", ["🙂 1/4", "🙂 2/4", "🙂 3/4", "🙂 4/4"]),
    ],
)
def test_a_label_is_the_character_with_its_part(text, labels):
    assert token_texts(decoded_bytes, list(text.encode("utf-8"))) == labels


def test_bytes_that_are_no_character_have_their_token():
    assert token_texts(decoded_bytes, [228, 97]) == ["\ufffd (token 228)", "a"]


def test_a_token_that_ends_one_character_and_begins_another():
    pieces = {1: b"\xe4\xbd", 2: b"\xa0\xe5", 3: b"\xa5\xbd"}
    texts = token_texts(
        lambda ids: b"".join(pieces[i] for i in ids).decode("utf-8", "replace"), [1, 2, 3]
    )
    assert texts == ["你好 1/3", "你好 2/3", "你好 3/3"]


# Reference answers.


@pytest.mark.parametrize("answer", [["3", "4"], {"value": 3}, True])
def test_an_answer_that_is_not_text_is_refused(answer, tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"question": "How many?", "answer": "3"}, {"question": "How many?", "answer": answer}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    kind = type(answer).__name__
    with pytest.raises(PromptError, match=rf"prompt 1 .* answer of type {kind} in field 'answer'"):
        ma.load_prompts(str(path))


def test_a_named_answer_field_wins(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": 3, "solution": "worked"}))
    assert ma.load_prompts(str(path))[0].solution == "worked"
    assert ma.load_prompts(str(path), answer="answer")[0].solution == "3"
