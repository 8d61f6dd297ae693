"""The file of statements: its quotes are short, and every name in it is known."""

import pytest

from mechattn.errors import OptionError
from mechattn.published.statements import SHIPPED, read_statements

TEXT = SHIPPED.read_text(encoding="utf-8")


def test_no_interval_has_two_words():
    for statement in read_statements().statements:
        sides = (statement.line - statement.opposite) * (
            1 if statement.direction == "above" else -1
        )
        assert sides >= 0, "no interval can be as published and opposite"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'quantities = ["received_by_segment"]',
            'quantities = ["recieved_by_segment"]',
            r"attention_falls.quantities = 'recieved_by_segment': choose one of .* \(did you mean 'received_by_segment'\?\)",
        ),

        ('direction = "below"', 'direction = "under"', "direction.*'above' or 'below'"),
        ('run = "answers"', 'run = "answers"\nquantities = ["l1"]', "answers have no quantities"),
        ("line = -2.0", 'lien = -2.0', r"lien.*there is no such key.*did you mean 'line'"),
        ('key = "attention_rises"', 'key = "attention_falls"', "'attention_falls' is given 2 times"),
        ('quote = "All heads', f'quote = "{"word " * 26}All heads', "it has 44 words; quote at most 25"),
    ],
)  # fmt: skip
def test_a_mistake_is_a_sentence(tmp_path, old, new, message):
    assert old in TEXT
    path = tmp_path / "statements.toml"
    path.write_text(TEXT.replace(old, new, 1), encoding="utf-8-sig")  # with a byte order mark
    with pytest.raises(OptionError, match=message):
        read_statements(path)
