"""The oracle of every interval over prompts: the t interval by its formula, in float64."""

import numpy as np
from scipy import stats


def t_interval(values):
    """The mean of one value a prompt, and the ends of its 95 % t interval."""
    values = np.asarray(values, dtype=np.float64)
    quantile = stats.t.ppf(0.975, len(values) - 1)
    half = quantile * values.std(ddof=1) / len(values) ** 0.5
    middle = values.mean()
    return np.array([middle, middle - half, middle + half])


def percent_change(ratios):
    """The change in percent and its interval, from each prompt's ratio: that of their logarithms."""
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    return 100 * np.expm1(t_interval(logs))
