"""The mean change over several conditions, such as fillers, taken as a sample: does it hold for others?"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mechattn.contrast.table import check_same_cells, what_is_tested
from mechattn.errors import OptionError
from mechattn.stats.crossed import crossed
from mechattn.stats.intervals import FEWEST
from mechattn.stats.random_draws import false_discovery

if TYPE_CHECKING:
    import pandas as pd

    from mechattn.contrast.contrast import Contrast

FEWEST_CONDITIONS = 6  # with fewer, the interval is that of a t distribution with 4 degrees of freedom or less


def across(asked: Contrast, conditions: Seq[str]) -> pd.DataFrame:
    """See :meth:`mechattn.results.result.Result.across`."""
    import pandas as pd

    given = list(conditions) if isinstance(conditions, (list, tuple, dict)) else []
    if len(set(given)) < FEWEST_CONDITIONS or len(set(given)) < len(given):
        raise OptionError(
            f"conditions={conditions!r}: name at least {FEWEST_CONDITIONS} different ones. They are the sample, and "
            "from fewer nothing can be said about others; ma.sweep makes them"
        )
    tested = [what_is_tested(replace(asked, condition=asked.result.condition(name))) for name in given]
    units, labels = tested[0].units, tested[0].labels
    check_same_cells(tested, given)
    units.refuse_below(FEWEST)
    there = np.all([np.isfinite(one.values).all(0) for one in tested], axis=0)
    found = crossed(np.stack([one.values[:, there] for one in tested], axis=1), asked.level)
    made = pd.DataFrame({name: values[there] for name, values in labels.items()} | found._asdict())
    made.insert(made.columns.get_loc("p") + 1, "q", false_discovery(made.p.to_numpy()))
    made = made.assign(n=units.n, conditions=len(given))
    made.attrs = {
        "conditions": given,
        "quantity": asked.quantity,
        "segment": asked.segment or "all",
        "unit": units.unit,
    }
    made.attrs |= {"tested": tested[0].null, "level": asked.level, "family": f"{int(there.sum())} tests"}
    return made
