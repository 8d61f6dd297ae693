"""Whether the README's example holds beyond “/”: eight fillers one by one, and as a sample of fillers.

python experiments/first/other_fillers.py
"""

import mechattn as ma
from mechattn.render.words import percent, percent_words

FILLERS = ("/", "-", "?", "*", "+", "=", ".", ",")


def main() -> None:
    conditions = {text: ma.MeaninglessTokens(text, count=55) for text in FILLERS}
    result = ma.run("toy:llama", ma.load_prompts("word-problems", limit=64), conditions)
    print(
        "| 55 × | attention to the question | uniform | heads that lose less, more |\n|---|---|---|---|"
    )
    for text in FILLERS:
        found = result.verdict(text)
        heads = f"{int(found.above.sum())}, {int(found.below.sum())} of {found.above.size}"
        print(
            f"| `{text}` | {percent_words(found.change)} | {percent(found.null.estimate)} | {heads} |"
        )
    heads = result.across(list(FILLERS))
    less, new = int(((heads["mean"] > 0) & (heads.q < 0.05)).sum()), int((heads.new_low > 0).sum())
    more = int(((heads["mean"] < 0) & (heads.q < 0.05)).sum())
    print(
        f"\nOver other fillers and prompts, {less} of {len(heads)} heads lose less than uniform attention would and "
        f"{more} more (q < 0.05). For one new filler on one new prompt, a 95 % interval says so of {new} heads."
    )


if __name__ == "__main__":
    main()
