"""The register is what it says it is: fixed, versioned, and of measures and figures that exist."""

import inspect
from dataclasses import replace

import pytest

from mechattn import render
from mechattn.claims import measures
from mechattn.claims.described import register_markdown
from mechattn.claims.plan import WORDS
from mechattn.claims.protocol import (
    PROTOCOL,
    arm_conditions,
    attention_conditions,
    length_conditions,
    place_conditions,
    slash_for,
)
from mechattn.claims.register import CLAIMS, DIGESTS, VERSION, digest
from mechattn.claims.rules import Rule

BY_KEY = {claim.key: claim for claim in CLAIMS}


def test_a_changed_rule_is_a_new_version():
    """Where this fails, the register was changed: add one to VERSION, and its digest to DIGESTS; keep the old ones."""
    assert DIGESTS[VERSION] == digest()
    assert list(DIGESTS) == list(range(1, VERSION + 1))
    assert len(set(DIGESTS.values())) == len(DIGESTS)


def with_part(claim, **changes):
    part = claim.parts[0]
    return replace(claim, parts=(replace(part, rule=replace(part.rule, **changes)), *claim.parts[1:]))


@pytest.mark.parametrize(
    "change",
    [
        lambda claim: with_part(claim, line=claim.parts[0].rule.line + 1e-6),
        lambda claim: with_part(claim, margin=0.021),
        lambda claim: with_part(claim, side="above"),
        lambda claim: replace(claim, says=claim.says + " "),
        lambda claim: replace(claim, by_definition=""),
        lambda claim: replace(claim, parts=claim.parts * 2),
    ],
)
def test_whatever_is_changed_changes_the_digest(change):
    claims = (change(CLAIMS[0]), *CLAIMS[1:])
    assert claims[0] != CLAIMS[0]
    assert digest(claims) != digest()


def test_the_protocol_and_the_order_are_in_it():
    assert digest(CLAIMS[::-1]) != digest() != digest(CLAIMS[1:])
    for changes in ({"count": 56}, {"draws": 4}, {"lengths": (10,)}, {"arms": PROTOCOL.arms[1:]}):
        assert digest(protocol=replace(PROTOCOL, **changes)) != digest()


def test_claims_are_of_what_there_is(tokenizer):
    assert len(BY_KEY) == len(CLAIMS)
    conditions = {"baseline", *attention_conditions(slash := slash_for(tokenizer)), *arm_conditions("LlamaForCausalLM")}
    conditions |= {*length_conditions(slash, tokenizer), *place_conditions(slash)}
    quantities = {"self_share", "self_mass", "first_share", "first_mass"}
    for claim in CLAIMS:
        assert claim.needs in {*WORDS, "activations"}
        assert not claim.figure or inspect.isfunction(getattr(render, claim.figure.partition(":")[0]))
        for measure in filter(None, (claim.control, *(part.measure for part in claim.parts))):
            assert measure.of in {*measures.OF_PROMPTS, *measures.OF_ANSWERS}
            assert set(measure.conditions) <= conditions | quantities
        assert all(isinstance(part.rule, Rule) for part in claim.parts)
        assert all(part.rule.margin >= 0 for part in claim.parts)


def test_every_claim_of_the_issue_that_is_not_by_definition_has_a_margin_against_random_weights():
    for claim in CLAIMS:
        if claim.needs in ("attention", "activations") and not claim.by_definition:
            assert all(part.rule.margin > 0 for part in claim.parts), claim.key


def test_arm_is_that_of_the_family():
    forms = {
        name: arm_conditions(name)["arm"].intervention for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "GPT2")
    }
    assert [(one.form, one.c, one.p1) for one in forms.values()] == [
        ("released_llama", 0.32, 90.0),
        ("released_qwen2", 0.13, 99.5),
        ("paper", 0.13, 99.5),
    ]
    assert arm_conditions("GPT2")["direction"].intervention.control == "random_direction"


def test_the_filler_is_what_the_tokenizer_can_make(tokenizer):
    assert (slash_for(tokenizer).count, slash_for(tokenizer).separator) == (55, " ")

    def blanks_apart(text, add_special_tokens=True):
        return {"input_ids": [ord(letter) for letter in text]}

    blanks_apart.decode = lambda ids: "".join(map(chr, ids))
    made = slash_for(blanks_apart)
    assert (made.count, made.separator) == (55, " "), "28 of “/” and 27 blanks are 55 tokens"

    def pairs(text, add_special_tokens=True):
        return {"input_ids": [0, 0] * text.count("/")}

    pairs.decode = lambda ids: "/"
    assert (slash_for(pairs).count, slash_for(pairs).separator) == (56, " ")


def test_the_documentation_has_every_claim_and_its_line():
    text = register_markdown()
    assert digest() in text
    for claim in CLAIMS:
        assert f"### {claim.title}" in text
        assert claim.supported_by.replace("|", "\\|") in text
    assert "| rule | change: below −2.0 % |" in text
    assert "| further than random weights | by 2.0 % at least, and by more than they differ among themselves |" in text
    assert register_markdown(CLAIMS[:1]) != text
