"""What attention to the question does in several trainings of one toy: a row each, and the interval over seeds.

python experiments/toys/trainings.py toy:llama out/toys/llama-1 out/toys/llama-0-without-filler
"""

import argparse
import re

import numpy as np
from scipy import stats

import mechattn as ma
from mechattn.render.words import percent, percent_words

SLASH, SENTENCE = ma.MeaninglessTokens("/", count=55), ma.RandomSentence(55)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--limit", type=int, default=64)
    given = parser.parse_args()
    prompts, found = ma.load_prompts("word-problems", limit=given.limit), {}
    for place in given.models:
        result = ma.run(
            place, prompts, {"slash": SLASH.fitted(ma.load_model(place)), "sentence": SENTENCE}
        )
        found[place] = [result.verdict(name) for name in ("slash", "sentence")]
    print(
        "| training | attention to the question, 55 “/” | a random sentence | uniform | heads above it |"
    )
    print("|---|---|---|---|---|")
    for place, (slash, sentence) in found.items():
        above = f"{int(slash.above.sum())} of {slash.above.size}"
        changes = f"{percent_words(slash.change)} | {percent_words(sentence.change)}"
        print(f"| {place} | {changes} | {percent(slash.null.estimate)} | {above} |")
    seeds = [
        np.log1p(slash.change.estimate)
        for place, (slash, _) in found.items()
        if not re.search("without", place)
    ]
    if len(seeds) >= 3:
        low, high = np.expm1(stats.ttest_1samp(seeds, 0).confidence_interval())
        mean = f"{percent(np.expm1(np.mean(seeds)))} [{percent(low)}, {percent(high)}]"
        print(f"\nOver {len(seeds)} trainings with filler: {mean}")


if __name__ == "__main__":
    main()
