"""What ``ma.measure`` cannot take: shapes, lengths, bounds of scores."""

import pytest
import torch

import mechattn as ma
from mechattn.errors import OptionError

Q = torch.zeros(2, 4, 5, 8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": Q[:, :3]}, r"the shapes \[\[2, 4, 5, 8\], \[2, 3, 5, 8\]\]: give .* \[batch, head"),
        ({"v": Q[:, :2]}, "the number of heads of k and v may be a divisor"),
        ({"lengths": [5, 6]}, "give 2 whole numbers from 1 to 5"),
        ({"lengths": [2.5, 3]}, "give 2 whole numbers"),
        ({"lengths": [[1], [2, 3]]}, "give 2 whole numbers"),
        ({"q": Q[0], "k": Q[0]}, r"the shapes .*give float tensors \[batch, head"),
        ({"counted": torch.ones(2, 5)}, "counted has the dtype torch.float32: give a boolean"),
        (
            {"segments": {"first": torch.ones(5, dtype=bool)}},
            r"first has the shape \[5\]: give a tensor \[batch",
        ),
        (
            {"scores": ma.AttentionScores(alibi=torch.ones(3))},
            r"alibi has the shape \[3\]: give .* \[4\]",
        ),
        ({"scores": ma.AttentionScores(sinks=torch.ones(1))}, r"sinks has the shape \[1\]"),
    ],
)
def test_shapes(changed, message):
    arguments = {"q": Q, "k": Q} | changed
    with pytest.raises(OptionError, match=message):
        ma.measure(**arguments)


@pytest.mark.parametrize(
    "option", [{"window": 0}, {"softcap": -1.0}, {"softcap": "30"}, {"scale": 1e999}]
)
def test_bounds_of_scores(option):
    with pytest.raises(OptionError, match="give a"):
        ma.AttentionScores(**option)
