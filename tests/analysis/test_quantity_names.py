"""The analyses of the package can be measured together: no two of them name a quantity alike."""

import dataclasses
import inspect

import pytest

import mechattn as ma
from mechattn.analysis.analysis import AnalysisBase
from mechattn.engine.request_checks import checked_analyses
from mechattn.errors import OptionError


def with_every_option():
    """One of each analysis, with every option that adds quantities."""
    analyses = []
    for kind in vars(ma.analyses).values():
        is_analysis = inspect.isclass(kind) and issubclass(kind, AnalysisBase)
        if not is_analysis or not dataclasses.is_dataclass(kind):
            continue  # a base class for analyses of one's own
        names = {field.name for field in dataclasses.fields(kind)}
        options = dict.fromkeys(names & {"per_query", "half_mass"}, True)
        analyses.append(kind(**options))
    return analyses


def test_all_analyses_can_be_measured_together():
    analyses = with_every_option()
    assert {"attention_focus", "score_decomposition", "head_updates"} <= {a.name for a in analyses}
    assert checked_analyses(analyses) == analyses


def test_two_with_a_name_in_common_are_noticed():
    class Twin(ma.analyses.AttentionFocus):
        name = "twin"

    with pytest.raises(OptionError, match="both measure a quantity named"):
        checked_analyses([ma.analyses.AttentionFocus(), Twin()])
