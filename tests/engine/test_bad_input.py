"""Bad input is refused in the user's words, before any forward pass."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mechattn as ma
from mechattn.commands.figures import make_figures
from mechattn.commands.run_config import run_from_config
from mechattn.errors import (
    ConditionError,
    ModelError,
    OptionError,
    OutputError,
    PromptError,
    PromptTooLong,
)
from mechattn.model.patterns_at_hooks import check_pattern
from mechattn.prompts.prompt import as_prompts
from mechattn.prompts.tokenization import tokenize
from tests.figures_config import figures_config

TOM = "Tom has 3 apples."


def _toml(config):
    """JSON with "=" in the place of ":" is TOML, as inline tables."""
    rows = [
        f"{key} = {json.dumps(value, separators=(', ', ' = '))}" for key, value in config.items()
    ]
    return "\n".join(rows)


def test_the_forward_guard_can_fail(no_forward):
    with pytest.raises(pytest.fail.Exception, match="before the input was checked"):
        ma.run(no_forward, TOM)


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([], {}, PromptError, "no prompts"),
        ("   ", {}, PromptError, "empty question"),
        (torch.ones(3), {}, PromptError, r"integer tensor \[batch, pos\]"),
        (torch.tensor([[1]]), {}, PromptError, "single token"),
        (torch.tensor([[1, 5, 99999]]), {}, PromptError, "outside the vocabulary"),
        (
            [TOM, "word " * 1200],
            {},
            PromptTooLong,
            r'prompt 1 \("word.*1,\d\d\d tokens with the condition.*takes 1,024',
        ),
        (
            TOM,
            {"conditions": {"slash": ma.MeaninglessTokens(count=1020)}},
            PromptTooLong,
            r'with the condition "slash" \(1020 inserted\)',
        ),
        (ma.Prompt(TOM, template="chat"), {}, ModelError, "no chat template"),
        (
            ma.Prompt("Tom", system="Solve it."),
            {"conditions": {"x": ma.MeaninglessTokens(place="random")}},
            ConditionError,
            "one question token",
        ),
        (
            torch.tensor([[1, 5]]),
            {"analyses": ma.ReceivedAttention(skip_first=True)},
            PromptError,
            "no attention is received",
        ),
        (
            TOM,
            {"analyses": ma.ReceivedAttention(queries="answer")},
            PromptError,
            "no answer tokens",
        ),
        (
            TOM,
            {"conditions": {"baseline": ma.MeaninglessTokens()}},
            OptionError,
            "use another name",
        ),
        (
            TOM,
            {"conditions": {"arm": ma.interventions.ARM()}},
            OptionError,
            r"give ma\.Baseline\(intervention=ARM\(…\)\)",
        ),
        (
            TOM,
            {"conditions": {"arm": ma.interventions.ARM}},
            OptionError,
            r"give ma\.Baseline\(intervention=ARM\(…\)\)",
        ),
        (TOM, {"conditions": [ma.MeaninglessTokens()]}, OptionError, "conditions"),
        (TOM, {"layers": [4]}, OptionError, "layers 0 to 3"),
        (TOM, {"layers": "all"}, OptionError, "layers"),
        (TOM, {"memory": "lots"}, OptionError, "memory"),
        (
            TOM,
            {"engine": "fast"},
            OptionError,
            "choose one of 'auto', 'streaming', 'fused', 'hooks'",
        ),
        (TOM, {"analyses": []}, OptionError, "analyses"),
    ],
)
def test_what_run_refuses(no_forward, prompts, options, error, message):
    with pytest.raises(error, match=message):
        ma.run(no_forward, prompts, **options)


def test_unknown_model_says_what_was_tried():
    with pytest.raises(ModelError, match="toy:llama"):
        ma.load_model("toy:")
    with pytest.raises(
        ModelError, match=r"no model 'no/such-model'.*toy:llama.*loading it from the hub failed"
    ):
        ma.load_model("no/such-model")


def test_directory_without_config(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        ma.load_model(str(tmp_path))


def test_a_model_with_nan_is_refused_by_head(checkpoint):
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model.model.layers[1].self_attn.q_proj.weight.data[:8] = torch.nan  # head 0 of layer 1
    with pytest.raises(ModelError, match=r"(?s)not the model itself.*rows failed in layer 1"):
        ma.load_model(model, tokenizer=tokenizer)
    hooked = ma.load_model(model, tokenizer=tokenizer, verify=False)
    with pytest.raises(ModelError, match="layer 1, head 0: the attention of query 0 sums to 0"):
        ma.run(hooked, TOM)


def test_a_shifted_mask_is_refused(toy, monkeypatch):
    monkeypatch.setattr("mechattn.model.hooks.attention_window", lambda model, layer: 3)
    monkeypatch.setattr(toy._mechattn, "to_verify", False)
    with pytest.raises(ModelError, match=r"should not see \(a window of 3\)"):
        ma.run(toy, "Tom has 3 apples. How many apples does Tom have?", engine="hooks")


def test_nan_in_padding_hides_no_wrong_mask(toy):
    pattern = torch.tensor([[[[0, 1], [torch.nan, 0]]]])
    with pytest.raises(ModelError, match="attention of 1 to a key"):
        check_pattern(toy, 0, pattern, torch.tensor([[True, False]]), 1)


def test_a_model_without_attention_says_so(shared):
    with pytest.raises(ModelError, match="has no layer with attention"):
        ma.run(shared("Mamba (no attention)"), TOM)


def test_a_probe_of_nothing(toy):
    for length in (2, 8.5):
        with pytest.raises(OptionError, match=f"length={length}: give a whole number, at least 8"):
            ma.verify_model(toy, length=length)


@pytest.mark.parametrize("field", ["question", "solution", "counterpart", "other_answer"])
def test_half_of_a_surrogate_pair_is_no_text(field):
    with pytest.raises(PromptError, match="half of a surrogate pair"):
        ma.Prompt(**{"question": "Tom", field: "3 \ud800"})


def test_a_number_is_no_text():
    with pytest.raises(PromptError, match=r"has 5 where a text belongs.*\"5\""):
        ma.Prompt("Tom", id=5)


def test_a_mask_of_another_length_is_not_cut():
    encoding = {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1]]}
    with pytest.raises(
        PromptError, match=r"rows of \[3\] tokens, but attention_mask rows of \[2\]"
    ):
        as_prompts(encoding)


def test_an_option_that_transformer_lens_does_not_take():
    with pytest.raises(ModelError, match="colour"):
        ma.load_model("toy:llama", colour="red")


def test_token_ids_that_begin_otherwise_than_the_models_texts(no_forward, monkeypatch):
    bos = no_forward.tokenizer.bos_token_id
    with pytest.raises(
        PromptError, match=r"begin with 7, but this model reads text after a BOS token"
    ):
        ma.run(no_forward, torch.tensor([[7, 8, 9]]))
    monkeypatch.setattr(no_forward.cfg, "default_prepend_bos", False)
    with pytest.raises(PromptError, match=r"begin with the BOS token .*reads text without one"):
        ma.run(no_forward, torch.tensor([[bos, 8, 9]]))


def test_a_tokenizer_without_bos_where_one_is_asked_for(no_forward, monkeypatch):
    import copy

    without = copy.deepcopy(no_forward.tokenizer)
    without.bos_token = None
    monkeypatch.setattr(no_forward, "_tokenizer", without)
    with pytest.raises(ModelError, match="default_prepend_bos = False"):
        ma.run(no_forward, TOM)


def test_options_that_a_hooked_model_cannot_take(toy):
    for options in ({"dtype": torch.bfloat16}, {"device": "cpu"}, {"tokenizer": toy.tokenizer}):
        with pytest.raises(OptionError, match="keeps its tokenizer"):
            ma.load_model(toy, **options)


def test_padded_token_ids(no_forward):
    pad = no_forward.tokenizer.pad_token_id
    for row in ([5, 6, pad], [pad, 5, 6]):
        with pytest.raises(PromptError, match="padding token"):
            ma.run(no_forward, torch.tensor([row]))

    tokenizer = SimpleNamespace(pad_token_id=0, bos_token_id=0, eos_token_id=0)
    with pytest.raises(PromptError, match="padding token 0"):
        tokenize(ma.Prompt(tokens=[5, 0, 0]), SimpleNamespace(tokenizer=tokenizer, cfg=None))


def test_answers_that_are_not_there(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "What?", "sol": "4"}')
    with pytest.raises(PromptError, match=r"no field 'answer'.*answer="):
        ma.load_prompts(str(path), with_answer=True)
    assert ma.load_prompts(str(path))[0].solution is None
    assert ma.load_prompts(str(path), answer="sol")[0].solution == "4"
    with pytest.raises(PromptError, match="no field 'soll'"):
        ma.load_prompts(str(path), answer="soll")


def test_the_subset_of_a_dataset_follows_a_colon(monkeypatch):
    asked = []
    monkeypatch.setattr("mechattn.prompts.datasets.asked_once", lambda name: nullcontext())
    monkeypatch.setattr(
        "datasets.load_dataset",
        lambda *of, split: asked.append((*of, split)) or [{"question": "2?"}],
    )
    assert ma.load_prompts("some/problems:hard", split="train")[0].question == "2?"
    assert asked == [("some/problems", "hard", "train")]
    with pytest.raises(PromptError, match="there is no file of prompts at"):
        ma.load_prompts("C:/problems/hard")


@pytest.mark.parametrize(
    ("output", "message"), [("r1", r"is not a name"), ("taken.zarr", "is not a stored result")]
)
def test_a_place_for_the_result_is_checked_before_the_work(tmp_path, monkeypatch, output, message):
    monkeypatch.setattr("mechattn.commands.run_config.load_prompts", None)
    (tmp_path / "taken.zarr").mkdir()
    (tmp_path / "config.toml").write_text(
        'model = "toy:llama"\n[prompts]\nsource = "word-problems"\n'
        f"[output]\nresult = '{tmp_path / output}'\n"
    )
    with pytest.raises(OutputError, match=message):
        run_from_config(tmp_path / "config.toml")


def test_filler_of_fractional_tokens_names_its_tokens(no_forward):
    with pytest.raises(ConditionError, match=r"become \['hello'.*|become \[.*Use count="):
        ma.run(no_forward, TOM, {"x": ma.MeaninglessTokens("zebra")})


def test_head_out_of_range_gives_the_range(no_forward, slash_result):
    with pytest.raises(OptionError, match="0 to 7"):
        ma.pattern(no_forward, TOM, layer=0, heads=[8])
    with pytest.raises(OptionError, match="0 to 7"):
        ma.render.received_attention(slash_result, layer=0, heads=[0, 8])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "contains no prompts"),
        (["{}"], "no field 'question'"),
        (['{"question": ""}'], "no text in field 'question'"),
        (['{"question": "fine"}', "{broken"], "line 2 of .* is not JSON"),
        (["[1, 2]"], "line 1 of .* is not a JSON object"),
    ],
)
def test_files_of_prompts(tmp_path, lines, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(PromptError, match=message):
        ma.load_prompts(str(path))


def test_files_that_are_not_text_or_not_there(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes('{"question": "é"}'.encode("latin-1"))
    with pytest.raises(PromptError, match=r"line 1 of .*latin\.jsonl is not UTF-8 text .*save"):
        ma.load_prompts(str(tmp_path / "latin.jsonl"))
    with pytest.raises(PromptError, match="loading it from the hub failed"):
        ma.load_prompts("no/such-data-set")
    with pytest.raises(OptionError, match="limit=0"):
        ma.load_prompts("word-problems", limit=0)


def test_too_few_prompts_for_a_page_are_refused_early(tmp_path, monkeypatch):
    monkeypatch.setattr("mechattn.commands.figures.run", None)
    with pytest.raises(OptionError, match="at least 6 prompts"):
        make_figures(figures_config(tmp_path, ["toy:llama"], "word-problems", 5, 0, [0]))


def test_a_head_the_last_model_lacks_is_refused_early(tmp_path, monkeypatch):
    monkeypatch.setattr("mechattn.commands.figures.load_model", None)
    with pytest.raises(OptionError, match="layer 5 is out of range: toy:llama has layers 0 to 3"):
        make_figures(
            figures_config(tmp_path, ["toy:gemma3", "toy:llama"], "word-problems", 8, 5, [0])
        )
    with pytest.raises(ModelError, match="no model 'no/such-model'"):
        make_figures(
            figures_config(tmp_path, ["toy:llama", "no/such-model"], "word-problems", 8, 0, [0])
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modl": "toy:llama"}, "modl: there is no such key"),
        ({"output": {}}, r"output\.result: is missing"),
        (
            {"figures": [{"kind": "received_attention", "layer": "x"}]},
            r"figures\[0\]\.layer: Input should be a valid integer, not 'x'; figures\[0\]\.layer: Input",
        ),
        (
            {"figures": [], "output": {"result": "r.zarr", "page": "p.html", "heads": [57]}},
            "head 57 is out of range",
        ),
        (
            {"conditions": {"x": {"cuont": 5}}},
            r"conditions\.x\.cuont: there is no such key here \(did you mean 'count'\?\)",
        ),
        ({"figures": [{"kind": "chnage_map"}]}, r"did you mean 'change_map'"),
        (
            {"figures": [{"kind": "change_map", "condition": "dash"}]},
            r"no condition 'dash'; the conditions are baseline, slash",
        ),
        (
            {"figures": [{"kind": "scale_by_layer"}]},
            r"shows AffineShift, which is not among the analyses",
        ),
        ({"layers": [0, 5]}, "layer 5 is out of range: toy:llama has layers 0 to 3"),
    ],
)
def test_config_files(tmp_path, change, message):
    config = {
        "model": "toy:llama",
        "prompts": {"source": "word-problems"},
        "output": {"result": "r.zarr"},
    } | change
    path = tmp_path / "config.toml"
    path.write_text(_toml(config))
    with pytest.raises(OptionError, match=message):
        run_from_config(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ma.RandomSentence(0), "count=0: give a whole number, at least 1"),
        (lambda: ma.MeaninglessTokens(place="end"), "before_question"),
        (lambda: ma.MeaninglessTokens(""), "text='': give the text"),
        (lambda: ma.ReceivedAttention(queries="some"), "queries='some'"),
        (
            lambda: ma.sweep(ma.conditions.RandomTokens(), text=["/"]),
            "RandomTokens has no option 'text' to vary",
        ),
    ],
)
def test_options_that_cannot_be(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_config_file_that_is_not_there_or_not_toml(tmp_path):
    with pytest.raises(OptionError, match="no config file"):
        run_from_config(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("model = ")
    with pytest.raises(OptionError, match="is not TOML"):
        run_from_config(tmp_path / "bad.toml")


@pytest.mark.parametrize("given", ["received_attention", ma.ReceivedAttention])
def test_what_is_no_analysis(no_forward, given):
    with pytest.raises(
        OptionError,
        match=r"which is not an analysis \(.*\); give one such as ma\.ReceivedAttention\(\)",
    ):
        ma.run(no_forward, TOM, analyses=given)


def test_a_path_in_the_place_of_a_result(toy, tmp_path):
    result = ma.run(toy, TOM)
    with pytest.raises(OptionError, match=r"load it first: ma\.load_result\('r\.zarr'\)"):
        ma.merge_results([result, "r.zarr"])
    result.save(tmp_path / "r.zarr")
    with pytest.raises(OutputError, match=r"this folder contains r\.zarr"):
        ma.load_result(tmp_path)


@pytest.mark.parametrize("path", ["", "memory://", "memory:///", "file://"])
def test_a_path_that_names_nothing(path):
    with pytest.raises(OutputError, match=f'"{path}" names no folder and no address: give one'):
        ma.load_result(path)
    with pytest.raises(OutputError, match=r"a folder named 's3:': give an address as a text"):
        ma.load_result(Path("s3://bucket/r.zarr"))


@pytest.fixture(scope="module")
def baseline_alone(toy):
    """A result of two texts without a condition."""
    texts = [TOM, "A farmer has 12 cows."]
    analyses = [ma.ReceivedAttention(), ma.analyses.MlpActivations()]
    return ma.run(toy, texts, analyses=analyses, layers=[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda toy, r: ma.run(toy, "a b c", {"s": ma.MeaninglessTokens}),
            "'s' is <class .*MeaninglessTokens.*>; give an instance",
        ),
        (lambda toy, r: r.page("x" * 300 + ".html"), "File name too long"),
        (
            lambda toy, r: ma.interventions.HeadAblation((1, 4)),
            r"heads=\(1, 4\): give a tuple of \(layer, head\) pairs",
        ),
        (
            lambda toy, r: ma.render.received_attention(r, "0", [1]),
            "layer '0' was not measured",
        ),
        (
            lambda toy, r: ma.load_prompts("word-problem"),
            "did you mean 'word-problems'.*hub was not queried",
        ),
        (lambda toy, r: ma.render.activation_metrics(r), "has only the baseline; run it with"),
        (lambda toy, r: ma.load_model("toy:llama", n_devices=2), "n_devices=2 requires CUDA"),
    ],
)
def test_what_a_user_may_well_type(toy, baseline_alone, call, message):
    with pytest.raises(ma.MechattnError, match=message):
        call(toy, baseline_alone)
