"""What a budget leaves out, and what it must not."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from mechattn.claims import probe
from mechattn.claims.paper import paper
from mechattn.claims.plan import keep_plan, kept_plan, planned, words
from mechattn.claims.probe import Cost
from mechattn.claims.register import CLAIMS
from mechattn.claims.settings import Settings, named, seconds
from mechattn.errors import OptionError, OutputError
from mechattn.model.load import text_config
from mechattn.model.toys import load_tokenizer, toy_names
from mechattn.prompts.datasets import load_prompts

COST = Cost(load=1.0, prompt=0.5, answer=0.1, architecture="LlamaForCausalLM", count=55, separator=" ")
ATTENTION = 4 * (1.0 + 8 * 0.5)  # of eight prompts
STAGES = ["attention", "answers", "length", "place", "samples"]


def settings(tmp_path, **given):
    return Settings(("toy:llama",), tmp_path, **given)


def counts(plan):
    return {stage.of: stage.count for stage in plan.stages}


def test_without_a_budget_everything_runs(tmp_path):
    plan = planned(settings(tmp_path), {"toy:llama": COST})
    assert counts(plan) == {"attention": 32, "answers": 100, "length": 100, "place": 100, "samples": 40}
    expected = [4 * (1 + 32 * 0.5), 0.1 * 100 * 6, 0.1 * 100 * 4, 0.1 * 100 * 3, 0.1 * 40 * 4 * 3]
    assert [stage.seconds for stage in plan.stages] == pytest.approx(expected)
    assert plan.seconds == pytest.approx(sum(expected))
    assert sorted(key for stage in plan.stages for key in stage.claims) == sorted(claim.key for claim in CLAIMS)
    assert "left out" not in str(plan)


@pytest.mark.parametrize("budget", [20.5, 33.0, 41.0, 47.0, 60.0, 100.0, 200.0, 1000.0])
def test_a_budget_holds_and_leaves_out_by_priority(tmp_path, budget):
    plan = planned(settings(tmp_path, budget=budget), {"toy:llama": COST})
    assert plan.seconds <= budget + 1e-9
    there = [stage.of for stage in plan.stages if stage.count]
    assert there == STAGES[: len(there)], "what comes first is in"
    assert all(stage.count >= {"attention": 8, "samples": 8}.get(stage.of, 20) for stage in plan.stages if stage.count)
    more = planned(settings(tmp_path, budget=2 * budget), {"toy:llama": COST})
    assert all(counts(more)[of] >= counts(plan)[of] for of in STAGES)
    assert ("left out" in str(plan)) == (len(there) < 5)


def test_models_share_a_budget(tmp_path):
    two = replace(settings(tmp_path, budget=80.0), models=("toy:llama", "toy:qwen2"))
    alone = planned(settings(tmp_path, budget=40.0), {"toy:llama": COST})
    plan = planned(two, {"toy:llama": COST, "toy:qwen2": COST})
    for name in two.models:
        assert [s.count for s in plan.stages if s.model == name] == [s.count for s in alone.stages]


def test_too_small_a_budget_says_what_it_would_take(tmp_path):
    with pytest.raises(OptionError, match="a budget of 19 s is too small: toy:llama needs at least 20 s for 8 prompts"):
        planned(settings(tmp_path, budget=ATTENTION - 1), {"toy:llama": COST})
    planned(settings(tmp_path, budget=ATTENTION), {"toy:llama": COST})


def test_a_plan_is_kept_for_the_same_arguments_alone(tmp_path):
    asked = settings(tmp_path, budget=60.0)
    place = tmp_path / "plan.json"
    assert kept_plan(place, asked) is None
    plan = planned(asked, {"toy:llama": COST})
    keep_plan(place, asked, plan)
    assert kept_plan(place, asked) == plan
    with pytest.raises(OutputError, match=r"a run with other arguments \(seed differs\).*--fresh"):
        kept_plan(place, replace(asked, seed=1))
    place.write_text("{")
    with pytest.raises(OutputError, match="is not a plan"):
        kept_plan(place, asked)


@pytest.mark.parametrize(
    ("text", "expected"), [("30min", 1800), ("1.5 h", 5400), ("90s", 90), (7, 7), (None, None), ("2d", 172800)]
)
def test_a_length_of_time(text, expected):
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "30", "min", "-1h", "0s", 0, -3, float("inf"), float("nan"), True, "1 fortnight"])
def test_what_is_no_length_of_time(text):
    with pytest.raises(OptionError, match="budget="):
        seconds(text)


def test_words_of_time():
    assert [words(s) for s in (0.2, 59, 95, 600, 7200)] == ["1 s", "59 s", "1.6 min", "10.0 min", "2.0 h"]


def test_the_toys_by_default():
    assert sorted(named(None)) == sorted(toy_names())
    assert named("toy:qwen2") == ("toy:qwen2",)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"models": ()}, "at least one model"),
        ({"models": ("toy:llama", "toy:llama")}, "given twice"),
        ({"limit": 2}, "limit=2"),
        ({"problems": True}, "problems=True"),
        ({"samples": 1}, "samples=1"),
        ({"new_tokens": 0}, "new_tokens=0"),
    ],
)
def test_bad_arguments(tmp_path, given, why):
    with pytest.raises(OptionError, match=why):
        Settings(**({"models": ("toy:llama",), "out": tmp_path} | given))


def test_the_least_that_passes_take_is_a_bound_of_the_sizes(monkeypatch):
    """Fewer operations than the layers' matrices take, on the shortest prompt; none where that may not hold."""
    prompts = load_prompts("word-problems", limit=6)
    tokens = min(len(load_tokenizer("toy:llama")(prompt.question)["input_ids"]) for prompt in prompts)
    config = text_config("toy:llama")
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    native = AutoModelForCausalLM.from_config(config)
    in_layers = sum(p.numel() for name, p in native.named_parameters() if ".layers." in name and p.ndim == 2)
    monkeypatch.setattr(probe, "_speed", lambda: 1e6)
    asked = Settings(("toy:llama",), Path("out"), device="cpu")
    found = probe.least_seconds("toy:llama", asked, prompts, 10)
    loads = 4.0  # a second for the model, and for each of its three copies with random weights
    assert found - loads == pytest.approx(layers * 2 * (width**2 + width * inner) * tokens * 10 / 1e6)
    assert 0 < found - loads <= 2 * in_layers * tokens * 10 / 1e6
    assert probe.least_seconds("toy:llama", replace(asked, device="cuda"), prompts, 10) == loads
    config.num_experts = 4
    monkeypatch.setattr(probe, "text_config", lambda name: config)
    assert probe.least_seconds("toy:llama", asked, prompts, 10) == loads


def test_a_budget_below_the_loading_is_refused_before_a_weight_is_read(monkeypatch, tmp_path):
    monkeypatch.setattr("mechattn.claims.paper.probed", lambda *given: pytest.fail("a model was loaded"))
    with pytest.raises(OptionError, match=r"a budget of 8 s is too small: toy:llama needs at least .* 4 models share"):
        paper(["toy:llama", "toy:qwen2", "toy:gemma3", "toy:falcon"], out=tmp_path, budget="8s")
