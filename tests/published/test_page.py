"""The heads that the page draws."""

from dataclasses import replace

import mechattn as ma
from mechattn.published.page import changing_heads


def test_two_groups_are_too_few_to_choose_heads(toy, prompts):
    grouped = [replace(prompt, group=f"g{i % 2}") for i, prompt in enumerate(prompts[:8])]
    chosen = {}
    for name, given in (("single", prompts[:8]), ("grouped", grouped)):
        result = ma.run(toy, given, {"slash": ma.MeaninglessTokens()}, layers=0, keep="prompts")
        chosen[name] = changing_heads(result)
    assert chosen["grouped"] == [0, 1, 2] != chosen["single"]
