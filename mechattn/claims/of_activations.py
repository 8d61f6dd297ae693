"""What the paper says of the first MLP's activations, and of ARM."""

from mechattn.claims.claim import PAPER, Claim, Measure, Part
from mechattn.claims.rules import Rule

_THRESHOLD = (
    "The threshold is not published: here the lower quartile of |activation| of 16 other prompts, fixed before."
)
_NEAR = "Share of activations near zero, after the first MLP's nonlinearity, mean over the question's tokens"

CLAIMS = (
    Claim(
        key="fewer_near_zero",
        title="Fewer activations near zero",
        says="With the tokens fewer activations of the first MLP lie near zero.",
        where=f"{PAPER}, section 4; figures 4 and 7",
        published="",
        supported_by="A share that falls by 2 % at least.",
        measured=f"{_NEAR}: with 55 “/” over without, as a log-ratio.",
        null="No change; and random weights of the same architecture",
        control=Measure("the same with a random sentence", "near_zero", ("sentence",)),
        parts=(Part(Measure("change", "near_zero", ("slash",)), Rule("below", -0.02, 0.02)),),
        needs="activations",
        deviation=_THRESHOLD,
        figure="activation_metrics",
    ),
    Claim(
        key="arm_lowers_near_zero",
        title="ARM lowers their share too",
        says="ARM, which moves activations away from zero, has the same effect without any tokens.",
        where=f"{PAPER}, section 4; figures 4 and 7",
        published="",
        supported_by="A share that falls by 2 % at least.",
        measured=f"{_NEAR}: with ARM over without, as a log-ratio.",
        null="None: it is what ARM does",
        control=Measure("a random change of the same size", "near_zero", ("direction",)),
        parts=(Part(Measure("change", "near_zero", ("arm",)), Rule("below", -0.02, 0.02)),),
        needs="activations",
        deviation=f"{_THRESHOLD} ARM acts on each token, in place of the whole tensor with its padding.",
        by_definition="ARM replaces the smallest activations by larger ones.",
        figure="activation_metrics",
    ),
    Claim(
        key="arm_does_the_same",
        title="ARM does what the tokens do",
        says="ARM stands for the tokens: it changes activations as they do.",
        where=f"{PAPER}, section 4",
        published="",
        supported_by="A cosine of the two changes above 0.2, and more than with a random change, by 0.1 at least.",
        measured=(
            "Cosine of the two changes from the baseline, over the question's tokens and channels of the first MLP: "
            "whether they agree, and not only whether both lower a share."
        ),
        null="0, that of two changes without anything in common; and a random change of ARM's size",
        control=Measure("sentence and “/”", "agreement", ("slash", "sentence"), "number"),
        parts=(
            Part(Measure("cosine", "agreement", ("slash", "arm"), "number"), Rule("above", 0.2, 0.1)),
            Part(
                Measure("beyond a random change", "agreement_apart", ("slash", "arm", "direction"), "number"),
                Rule("above", 0.1, 0.1),
            ),
        ),
        needs="activations",
        deviation="ARM acts on each token, in place of the whole tensor with its padding.",
        figure="agreement",
    ),
)
