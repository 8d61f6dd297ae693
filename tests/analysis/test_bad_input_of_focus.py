"""Focus, updates, sinks and scores: what cannot be measured is said in words, before the model runs."""

import math

import pytest
import torch

import mechattn as ma
from mechattn.errors import ModelError, OptionError, PromptError
from mechattn.evaluation.evaluation import Evaluation
from tests.evaluation import by_hand
from tests.tiny_families import bridge_of, tiny_model

PROMPT = ma.Prompt(
    "Tom has 3 apples and 2 pears. How many fruits does Tom have?", "Count.", id="0", solution="5"
)


@pytest.mark.parametrize(
    ("analysis", "message"),
    [
        (ma.analyses.AttentionSinks(), "has 3 tokens; a sink must be seen by 16"),
        (ma.analyses.ScoreDecomposition(rank=2), "too few for a target of rank 2"),
    ],
)
def test_too_short(no_forward, analysis, message):
    with pytest.raises(PromptError, match=message):
        ma.run(no_forward, torch.tensor([[1, 5, 6]]), analyses=analysis)


def test_scores_of_a_model_that_rotates(no_forward):
    with pytest.raises(ModelError, match="RoPE"):
        ma.run(no_forward, PROMPT, analyses=ma.analyses.ScoreDecomposition())


@pytest.mark.parametrize("option", [{"threshold": 1.2}, {"massive": (1.0,)}, {"massive": 5}])
def test_options_of_sinks(option):
    with pytest.raises(OptionError, match=next(iter(option))):
        ma.analyses.AttentionSinks(**option)


def scaled_unlike_its_configuration(plain):
    plain.logit_scale = 0.5


def capped_unlike_its_configuration(plain):
    plain.lm_head.register_forward_hook(lambda module, given, out: 2 * torch.tanh(out / 2))


@pytest.mark.parametrize(
    ("family", "change"),
    [("Cohere", scaled_unlike_its_configuration), ("Llama", capped_unlike_its_configuration)],
)
def test_logits_made_in_an_unknown_way(family, change):
    plain = tiny_model(family)
    change(plain)
    model = bridge_of(plain, verify=False)
    with pytest.raises(
        ModelError, match=r"are not W_U · norm\(residual stream\), even with a factor or cap"
    ):
        ma.run(model, PROMPT, analyses=ma.analyses.DirectLogits())


def test_a_norm_after_attention_that_is_none(monkeypatch):
    """A part of what a tanh is given adds nothing of its own to what it gives."""
    plain = tiny_model("Gemma 3")
    model = bridge_of(plain, verify=False)
    monkeypatch.setitem(vars(model.blocks[1].ln1_post), "forward", torch.tanh)
    with pytest.raises(
        ModelError, match=r"the norm after attention of layer 1 is not a norm of the form γ · x / σ"
    ):
        ma.run(model, PROMPT, analyses=ma.analyses.DirectLogits())


def test_a_config_with_a_reading_that_was_not_measured(tmp_path):
    from mechattn.commands.run_config import read_config

    text = (
        'model = "toy:llama"\n[prompts]\nsource = "word-problems"\n[[analyses]]\nkind = "HeadUpdates"\n'
        '[[figures]]\nkind = "update_map"\nreading = "%s"\n[output]\nresult = "r.zarr"\npage = "p.html"\n'
    )
    for reading, message in (
        ("top_target", "update_map shows TopTargetUpdates, which is not among the analyses"),
        ("all", "reading: Input should be 'mixed' or 'top_target', not 'all'"),
    ):
        (tmp_path / "config.toml").write_text(text % reading)
        with pytest.raises(OptionError, match=message):
            read_config(tmp_path / "config.toml")


def test_an_evaluation_without_log_probabilities(tmp_path):
    """From a server that reports none."""
    answers = (by_hand.answer(0, logprob=math.nan), by_hand.answer(0, sample=1))
    Evaluation(answers, {}).save(tmp_path / "e.jsonl")
    read = ma.load_evaluation(tmp_path / "e.jsonl")
    assert [math.isnan(answer.logprob) for answer in read.answers] == [True, False]


class Misspelt(ma.analyses.BlockUpdates):
    """An analysis whose hook doesn't exist."""

    captures = ("hook_resid_pree",)


def test_a_misspelt_hook_is_refused(no_forward):
    with pytest.raises(
        OptionError, match=r"captures 'hook_resid_pree', which layer 0 of .* doesn't have"
    ):
        ma.run(no_forward, PROMPT, analyses=Misspelt())
