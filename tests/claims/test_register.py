"""Registers: what is shipped, what a user may write, and what is refused in the user's words."""

import re
from dataclasses import replace

import pytest

from mechattn.claims import rules
from mechattn.claims.evidence import conditions_for
from mechattn.claims.measures import MEASURES
from mechattn.claims.register import LONGEST_QUOTE, PAPER, SHIPPED, read_register
from mechattn.claims.verdicts import register_markdown
from mechattn.errors import ConditionError, OptionError

NAMES = sorted(path.stem for path in SHIPPED.glob("*.toml"))
GOOD = """
[register]
name = "mine"
title = "Mine"
sources = { paper = "A. Author, 2020" }

[conditions.slash]
text = "/"
count = 55

[runs.first]
conditions = ["slash"]
analyses = [{ kind = "ReceivedAttention" }]
layers = [0]
draws = 3
positions = "prompts"

[[claims]]
key = "falls"
title = "It falls"
quote = "it falls"
source = "paper"
where = "section 1"
origin = "stated"
needs = "first"

[[claims.parts]]
name = "change"
measure = "fall"
conditions = ["slash", "baseline"]
side = "below"
line = -0.02
margin = 0.02
"""
SECOND = GOOD[GOOD.index("[[claims]]") :]


def read(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return read_register(path)


def test_a_register_of_ones_own(tmp_path):
    register = read(tmp_path, GOOD)
    (claim,) = register.claims
    assert (claim.key, claim.parts[0].rule_of()) == (
        "falls",
        rules.Rule("below", -0.02, 0.02, -0.02),
    )
    assert not register.about.known
    figure = GOOD.replace('needs = "first"', 'needs = "first"\nfigure = "scale_by_layer"')
    assert read(tmp_path, figure).claims[0].figure == "scale_by_layer", "whatever a report can show"
    inferred = GOOD.replace(
        'quote = "it falls"\nsource = "paper"\nwhere = "section 1"\norigin = "stated"',
        'origin = "inferred"\nsays = "ours"',
    )
    assert read(tmp_path, inferred).claims[0].quote == ""


LINE, NAME, MEASURE, KIND = (
    "line = -0.02",
    'name = "mine"',
    'measure = "fall"',
    'kind = "ReceivedAttention"',
)
MARGIN, QUOTE = "margin = 0.02", 'quote = "it falls"'
NUMBER = "claims.0.parts.0.line: Input should be a valid number, not "


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (MEASURE, 'measure = "os.system"', "claims.falls: measure = 'os.system': there is no such measure; choose one of accuracy_apart"),
        (MEASURE, 'measure = "affine_missed"', "claims.falls: affine_missed takes affine_shift, which its run has not got (received_attention)"),
        ('"baseline"]', '"base"]', "claims.falls.conditions: there is no 'base' (did you mean 'baseline'?); there is baseline, slash"),
        (MARGIN, MARGIN + "\nrange = [0.0, 1.0]", "part 'change': the line -0.02 has to be a number within the range, 0.0 to 1.0"),
        (LINE + "\n", "", "claims.0.parts.0.line: is missing"),
        (LINE, "line = nan", "the line nan has to be a number within the range"),
        (LINE, "line = 1e400", "the line inf has to be a number within the range"),
        (LINE, "line = " + "9" * 500, NUMBER + "'" + "9" * 40 + "'"),
        (LINE, "line = " + "9" * 5000, "is not TOML: "),
        (LINE, "line = 1979-05-27", NUMBER + "'1979-05-27'"),
        (LINE, 'line = "exec(1)"', NUMBER + "'exec(1)'"),
        (MARGIN, "margin = -1.0", "claims.0.parts.0.margin: Input should be greater than or equal to 0, not '-1.0'"),
        (MARGIN, "margin = inf", "claims.0.parts.0.margin: Input should be a finite number, not 'inf'"),
        (MARGIN, MARGIN + '\ngains.SET = { m = 1e400 }', "the line inf has to be a number"),
        (MARGIN, MARGIN + '\nless = { measure = "eval" }', "claims.falls: measure = 'eval': there is no such measure"),
        (MARGIN, MARGIN + "\nless = { run = 1 }", "less.run: there is no such key here; the keys are measure, conditions, options"),
        (MARGIN, MARGIN + "\noptions = { __class__ = 1 }", "fall cannot be called like this: got an unexpected keyword argument '__class__'; it takes condition, to"),
        (MEASURE, 'measure = "fall_beyond_uniform"\noptions = { layers = "__dict__" }', "fall_beyond_uniform, layers = '__dict__': Input should be 'all', 'first', 'next'"),
        (MEASURE, 'measure = "peak_moved"\nless = { options = { layer = -1 } }\nrange = [-1.0, 1.0]', "peak_moved"),
        ('side = "below"', 'side = "under"', "side: Input should be 'above' or 'below', not 'under'"),
        (QUOTE, "", 'falls: a claim of others needs a quote, its source and where; or origin = "inferred"'),
        ('source = "paper"\n', "", 'falls: a claim of others needs a quote, its source and where; or origin = "inferred"'),
        ('source = "paper"\n', 'source = "book"\n', "claims.falls.source: there is no 'book'; there is paper"),
        (QUOTE, f'quote = "{"it " * 26}"', f"the quote has 26 words; quote at most {LONGEST_QUOTE}"),
        (QUOTE, 'quote = { py = "it" }', "claims.0.quote: Input should be a valid string, not"),
        (NAME, 'name = "../../etc/x"', "register.name: '../../etc/x': files are named after it, so use letters, digits"),
        (NAME, 'name = "/etc/x"', "register.name: '/etc/x': files are named after it, so use letters, digits"),
        ("[runs.first]", '[runs."../first"]', "'../first': files are named after it, so use letters, digits"),
        ('key = "falls"', 'key = "<b>"', "claims.0.key: '<b>': files are named after it, so use letters, digits"),
        ('needs = "first"', 'needs = "second"', "claims.falls.needs: there is no 'second'"),
        (KIND, 'kind = "os.system"', "analyses[0].kind = 'os.system': choose one of"),
        ('text = "/"', 'kind = "eval"', "conditions.slash.kind = 'eval': choose one of"),
        ('text = "/"', 'text = "/"\nintervention = { kind = "exec" }', "conditions.slash.intervention.kind = 'exec': choose one of ARM"),
        ("count = 55", "count = 1000000000000", "count=1000000000000: insert at most 1,000,000 tokens"),
        ("draws = 3", "draws = 1000000000", "runs.first.draws: Input should be less than or equal to 1000, not '1000000000'"),
        ("draws = 3", "draws = 3\nrun = 'x'", "runs.first.run: there is no such key here"),
        ("draws = 3", 'draws = 3\nprompts = "/etc/passwd"', "runs.first.prompts: Input should be 'problems', 'word-problems', 'recall' or 'repeated-random', not '/etc/passwd'"),
        ("layers = [0]", "layers = [-1]", "runs.first.layers.0: Input should be greater than or equal to 0, not '-1'"),
        ('text = "/"', 'text = ["/", "?"]', "conditions.slash: give one value for each option; a register has no sweeps"),
        ("layers = [0]", "layers = [0]\nanswers = true", "runs.first: give analyses, or answers = true"),
        ('key = "falls"', 'key = "falls"\nkey = "rises"', "is not TOML: Cannot overwrite"),
        ('key = "falls"', 'key = "falls"\nfigure = "write_image"', "claims.falls.figure: there is no 'write_image'"),
        ("[register]", "[[arms]]\nform = 'odd'\nc = 1.0\np1 = 99.0\n[register]", "arms[0]: form='odd': choose one of"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, old, new, why):
    """Names, numbers, types and paths that are none: nothing is run, and the message says what was given and what to give."""
    assert old in GOOD
    with pytest.raises(OptionError, match=re.escape(why)) as error:
        read(tmp_path, GOOD.replace(old, new, 1))
    assert "mine.toml" in str(error.value)


def test_a_rule_without_a_range_is_refused(tmp_path, monkeypatch):
    open_ended = replace(MEASURES["fall"], kind="share", range=None)
    monkeypatch.setitem(MEASURES, "fall", open_ended)
    with pytest.raises(
        OptionError, match="part 'change' has no range: give the smallest and the largest value"
    ):
        read(tmp_path, GOOD)
    assert read(tmp_path, GOOD + "range = [-1.0, 1.0]\n").claims
    with pytest.raises(
        OptionError, match=r"the line -0\.02 has to be a number within the range, 0\.0 to 1\.0"
    ):
        read(tmp_path, GOOD + "range = [0.0, 1.0]\n")


def test_keys_are_given_once(tmp_path):
    with pytest.raises(OptionError, match="the key 'falls' is given twice"):
        read(tmp_path, GOOD + SECOND)


def test_a_register_is_no_program(tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit")
    with pytest.raises(
        OptionError, match=r"is no register: give a TOML file, or one of 2510\.01032"
    ):
        read_register(tmp_path / "mine.py")
    with pytest.raises(OptionError, match="there is no register at"):
        read_register(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_shipped_is_sourced(name):
    register = read_register(name)
    assert register.about.name == name
    for claim in register.claims:
        assert claim.origin == "inferred" or 1 <= len(claim.quote.split()) <= LONGEST_QUOTE
        assert claim.identity or claim.null, claim.key
    text = register_markdown(register)
    for claim in register.claims:
        assert f"#### {claim.title}\n" in text
        assert claim.quote.replace("|", "\\|") in text
    assert register.digest in text


def test_the_digest_covers_the_file_and_all_code_that_decides(tmp_path, monkeypatch):
    one, other = read(tmp_path, GOOD), read_register(PAPER)
    assert one.digest != other.digest
    assert one.code == other.code
    assert read(tmp_path, GOOD + "# a comment\n").digest != one.digest
    modules = {measure.of.__module__ for measure in MEASURES.values()} | {rules.__name__}
    source = "mechattn.claims.register.inspect.getsource"
    import inspect

    getsource = inspect.getsource
    for changed in modules:
        monkeypatch.setattr(
            source, lambda m, changed=changed: getsource(m) + ("#" if m.__name__ == changed else "")
        )
        assert read_register(PAPER).code != one.code, changed


def arm_of(model, architecture, tokenizer):
    found = conditions_for(read_register(PAPER), model, architecture, tokenizer)
    (arm,) = found.made["arm"].interventions
    return arm.form, arm.c, arm.p1, " ".join(found.deviations)


def test_arm_is_that_of_the_model_by_name_else_of_its_family(tokenizer):
    assert arm_of("Qwen/Qwen2.5-Math-7B", "Qwen2ForCausalLM", tokenizer)[1:] == (0.1, 95.0, "")
    assert arm_of("Qwen/Qwen2.5-Math-1.5B", "Qwen2ForCausalLM", tokenizer)[1:] == (0.13, 99.5, "")
    assert arm_of("meta-llama/Llama-3.1-8B-Instruct", "LlamaForCausalLM", tokenizer)[:3] == (
        "released_llama",
        0.32,
        90.0,
    )
    form, c, p1, said = arm_of("someone/gemma-3-1b", "Gemma3ForConditionalGeneration", tokenizer)
    assert (form, c, p1) == ("gemma", 0.25, 85.0)
    assert (
        "ARM as for Gemma3 (c = 0.25, p1 = 85): the register has no values for gemma-3-1b." in said
    )
    assert arm_of("gpt2", "GPT2LMHeadModel", tokenizer)[0] == "paper"
    direction = conditions_for(read_register(PAPER), "gpt2", "", tokenizer).made["direction"]
    assert direction.interventions[0].control == "random_direction"


def test_the_filler_is_what_the_tokenizer_can_make(tokenizer):
    register = read_register(PAPER)
    made = conditions_for(register, "toy", "", tokenizer).made
    assert (made["slash"].count, made["slash"].separator, made["sentence"].count) == (55, " ", 55)

    def blanks_apart(text, add_special_tokens=True):
        return {"input_ids": [ord(letter) for letter in text]}

    blanks_apart.decode = lambda ids: "".join(map(chr, ids))
    slash = conditions_for(register, "toy", "", blanks_apart).made["slash"]
    assert (slash.count, slash.separator) == (55, " "), "28 of “/” and 27 blanks are 55 tokens"

    def pairs(text, add_special_tokens=True):
        return {"input_ids": [0, 0] * text.count("/")}

    pairs.decode = lambda ids: "/"
    found = conditions_for(register, "toy", "", pairs)
    unshifted = found.made["unshifted"].condition
    assert (found.made["slash"].count, found.made["sentence"].count, unshifted.count) == (
        56,
        56,
        56,
    )
    assert re.search(
        "slash: 56 “/” tokens in place of 55, with spaces between them.", " ".join(found.deviations)
    )

    def forty(text, add_special_tokens=True):
        return {"input_ids": [0] * 40 * text.count("/")}

    forty.decode = lambda ids: "/"
    with pytest.raises(ConditionError, match=r"toy: no whole number of '/' gives about 55 tokens"):
        conditions_for(register, "toy", "", forty)
