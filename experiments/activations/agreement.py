"""Do tokens, ARM, the scale and the shift change the first MLP's activations in the same direction? Prints a table.

python experiments/activations/agreement.py [model …]
"""

import sys

import mechattn as ma

COLUMNS = ["model", "other", "cosine", "cosine_low", "cosine_high", "n"]


def table(name: str):
    model = ma.load_model(name)
    prompts = ma.load_prompts("word-problems", limit=64)
    slash = ma.MeaninglessTokens("/", count=55)
    as_inserted = ma.record_affine(model, prompts, slash, layers=0)
    arm = ma.interventions.ARM(form="released_llama", c=0.13, p1=95.0)
    conditions = {
        "slash": slash,
        "scale and shift": ma.Baseline(intervention=as_inserted),
        "scale": ma.Baseline(intervention=as_inserted.only("scale")),
        "shift": ma.Baseline(intervention=as_inserted.only("shift")),
        "masked": slash.masked(),
        "sentence": ma.RandomSentence(count=55),
        "arm": ma.Baseline(intervention=arm),
        "random direction": ma.Baseline(
            intervention=ma.interventions.ARM(
                form="released_llama", c=0.13, p1=95.0, control="random_direction"
            )
        ),
    }
    result = ma.run(model, prompts, conditions, [ma.analyses.MlpActivations()], layers=[0])
    made = result.agreement("slash", "scale and shift")
    change = result.compare("slash", quantity="token_change", matched=False, columns="all")
    print(
        f"{name}: the tokens change the activations by {100 * change.value.iloc[0]:.1f} % of their norm"
    )
    return made.assign(model=name)[COLUMNS]


if __name__ == "__main__":
    for name in sys.argv[1:] or ["toy:llama", "toy:qwen2", "toy:gemma3", "toy:falcon"]:
        print(table(name).round(3).to_string(index=False))
