"""What ``ma.measure`` cannot take: shapes, lengths, masks, options, statistics."""

import pytest
import torch

import mechattn as ma
from mechattn.errors import OptionError

Q = torch.zeros(2, 4, 5, 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"q": Q[0]}, r"q is torch.float32 \(4, 5, 8\); give floating-point numbers"),

        ({"k": Q.int()}, r"k is torch.int32 \(2, 4, 5, 8\); give floating-point numbers"),
        ({"k": Q[:, :3]}, "a number of heads of k that divides that of q"),
        ({"k": Q[:, :, :4]}, "with equal numbers of positions"),
        ({"v": Q[:, :2]}, "only the last axis may differ"),
        ({"alibi": torch.zeros(3)}, "alibi is .* give one number for each of 4 heads"),

        ({"lengths": [5, 6]}, "give a whole number from 1 to 5 for each of 2 sequences"),


        ({"counted": torch.ones(2, 5)}, r"counted is torch.float32 \(2, 5\); give torch.bool"),
        ({"segments": {"a": torch.ones(2, 4, dtype=torch.bool)}}, r"a is torch.bool \(2, 4\); give torch.bool \(2, 5\)"),
        ({"window": 0}, "window=0: give a number of keys"),

        ({"statistics": "entropy"}, "statistics='entropy': give a list of"),


        ({"statistics": ["mass"]}, '"mass" needs segments='),
        ({"statistics": ["output"]}, '"output" needs the values v'),
    ],
)  # fmt: skip
def test_bad_input(given, message):
    given = {"q": Q, "k": Q} | given
    of_scores = {
        name: given.pop(name) for name in ("alibi", "sinks", "window", "softcap") if name in given
    }
    with pytest.raises(OptionError, match=message):
        ma.measure(given.pop("q"), given.pop("k"), scores=ma.AttentionScores(**of_scores), **given)
