"""What the paper says of attention and of its output."""

from mechattn.claims.claim import PAPER, Claim, Measure, Part
from mechattn.claims.rules import Rule

_ALL_HEADS = "All heads of the layer and their mean, in place of three chosen heads."
_UNIFORM = "A head with uniform attention, prompt by prompt"
_FALL = (
    "Attention that each token of the question receives from the original tokens after it, layer 0, mean over heads: "
    "with 55 “/” over without, as a log-ratio."
)
_SENTENCE = Measure("the same with a random sentence", "fall", ("sentence", "baseline"))

CLAIMS = (
    Claim(
        key="attention_falls",
        title="Attention to the question falls",
        says="With meaningless tokens the meaningful ones receive less attention in the first layer.",
        where=f"{PAPER}, section 2; received attention of three heads of the first layer",
        published="−30 to −50 %",
        published_of="Llama-3.1-8B, by an automatic caption of its figure; that of Qwen2.5-Math-7B says a rise",
        supported_by="A fall of 2 % at least.",
        measured=_FALL,
        null="None: the next claim has it",
        control=_SENTENCE,
        parts=(Part(Measure("change", "fall", ("slash", "baseline")), Rule("below", -0.02, 0.02)),),
        needs="attention",
        deviation=_ALL_HEADS,
        by_definition=(
            "Attention is positive and sums to 1, so whatever is inserted takes some; uniform attention falls too."
        ),
        figure="received_attention",
    ),
    Claim(
        key="more_than_dilution",
        title="It falls further than dilution alone",
        says=(
            "Meaningless tokens redistribute attention: more is taken from the meaningful ones than their number takes."
        ),
        where=f"{PAPER}, section 2; no null is given",
        published="",
        supported_by="A fall that is further than that of uniform attention, by 2 % at least.",
        measured=_FALL + " Less the same under uniform attention.",
        null=_UNIFORM,
        control=Measure("the same with a random sentence", "fall_beyond_uniform", ("sentence", "baseline")),
        parts=(
            Part(
                Measure("change beyond uniform", "fall_beyond_uniform", ("slash", "baseline")),
                Rule("below", -0.02, 0.02),
            ),
        ),
        needs="attention",
        deviation=_ALL_HEADS,
        figure="change_map",
    ),
    Claim(
        key="at_peaks",
        title="It falls most at the peaks",
        says="The tokens that receive most lose most.",
        where=f"{PAPER}, section 2; received attention of three heads of the first layer",
        published="",
        supported_by=(
            "Peaks fall further than the other tokens of the question, by 2 % at least beyond uniform attention."
        ),
        measured=(
            "Layer 0, the question's tokens that eight or more come after: the tenth of them that receive most, by the "
            "geometric mean of both conditions; log-ratio there less that elsewhere, mean over heads, less "
            "the same under uniform attention."
        ),
        null=_UNIFORM,
        control=Measure("the same with a random sentence", "peaks", ("sentence", "baseline")),
        parts=(Part(Measure("peaks beyond the rest", "peaks", ("slash", "baseline")), Rule("below", -0.02, 0.02)),),
        needs="attention",
        deviation="Peaks are chosen on both conditions: chosen on the baseline alone they fall without any effect.",
        figure="received_attention",
    ),
    Claim(
        key="less_in_deeper_layers",
        title="Less so in deeper layers",
        says="The fall is a matter of the first layer; in the second and third it is smaller, or a rise.",
        where=f"{PAPER}; one head in the first three layers, without and with tokens",
        published="peaks 0.08 → 0.05 in the first",
        published_of="Qwen2.5-Math-7B, head 22, by an automatic caption: in the third layer peaks are often higher",
        supported_by="Layers 1 and 2 fall less far than layer 0, by 2 % at least beyond uniform attention.",
        measured="The log-ratio less that under uniform attention, mean of layers 1 and 2, less that of layer 0.",
        null=_UNIFORM + ", in each layer with its window",
        control=Measure("the same with a random sentence", "deeper", ("sentence", "baseline")),
        parts=(Part(Measure("deeper less first", "deeper", ("slash", "baseline")), Rule("above", 0.02, 0.02)),),
        needs="attention",
        deviation="All heads, in place of one.",
        figure="change_map",
    ),
    Claim(
        key="shared_evenly",
        title="The filler shares its attention evenly",
        says="Each inserted token gets a little, and about as much as the next.",
        where=f"{PAPER}, section 2; the shaded span of the lower row",
        published="0.03 to 0.08 each",
        published_of="Llama-3.1-8B, by an automatic caption of its figure",
        supported_by="An effective number of tokens of 90 % of their number at least.",
        measured="Layer 0: exp(entropy) of how the inserted tokens share what they receive, over their number.",
        null="Uniform attention: 100 %",
        control=Measure("a random sentence", "evenness", ("sentence",), "share"),
        parts=(Part(Measure("effective share", "evenness", ("slash",), "share"), Rule("above", 0.9, 0.0)),),
        needs="attention",
        deviation=_ALL_HEADS,
        by_definition=(
            "Keys of one repeated token differ in layer 0 by their position alone; a blind head shares evenly."
        ),
        figure="received_attention",
    ),
    Claim(
        key="sentence_uneven",
        title="A random sentence shares it unevenly",
        says="The tokens of a random sentence get attention unevenly.",
        where=f"{PAPER}, section 2; meaningless tokens against a random sentence",
        published="",
        supported_by="An effective share that is smaller than that of “/”, by 5 points at least.",
        measured="Layer 0: the effective share with “/” less that with a random sentence of as many tokens.",
        null="Uniform attention: 0; and random weights, as any head that sees content tells different tokens apart",
        control=None,
        parts=(
            Part(
                Measure("“/” less sentence", "evenness_apart", ("slash", "sentence"), "points"),
                Rule("above", 0.05, 0.05),
            ),
        ),
        needs="attention",
        deviation="Sentences drawn anew for each prompt; the published one is not known.",
        figure="received_attention",
    ),
    Claim(
        key="sentence_lower",
        title="A sentence takes more from the question",
        says="Beside meaningless tokens a random sentence leaves less attention to the meaningful ones.",
        where=f"{PAPER}, section 2; one head for each of three models",
        published="peaks 0.12 → 0.08",
        published_of="Qwen2.5-Math-7B; 0.55 → 0.35 for Gemma 3 4B; by automatic captions",
        supported_by="The question receives less with a sentence than with as many “/”, by 2 % at least.",
        measured="Layer 0, mean over heads: attention that the question receives with a sentence over that with “/”.",
        null="Equal: as many tokens are inserted",
        control=None,
        parts=(Part(Measure("sentence over “/”", "fall", ("sentence", "slash")), Rule("below", -0.02, 0.02)),),
        needs="attention",
        deviation="Sentences drawn anew for each prompt, of exactly as many tokens; all heads.",
        figure="change_map",
    ),
    Claim(
        key="affine_first_layer",
        title="Layer 0 is affine: λ · output + Σσ",
        says="Inserting the tokens is an affine map of attention's output, in the first layer.",
        where=f"{PAPER}, section 3",
        published="exact",
        supported_by="What the affine form misses is below 5 % of the output's norm.",
        measured="‖output′ − λ · output − Σσ‖ / ‖output′‖ of the question's tokens in layer 0, mean over heads.",
        null="0 where the original tokens keep their distances",
        control=Measure("total variation of attention", "total_variation_first", ("slash",), "share"),
        parts=(Part(Measure("missed", "affine_first", ("slash",), "share"), Rule("below", 0.05, 0.0)),),
        needs="attention",
        deviation="",
        by_definition=(
            "It is arithmetic where distances do not change; from the question to the system prompt they do."
        ),
        figure="scale_by_layer",
    ),
    Claim(
        key="affine_deeper",
        title="Deeper layers are affine as well",
        says="The same form, of all layers.",
        where=f"{PAPER}, section 3; no figure",
        published="exact",
        supported_by="What it misses is below 5 %, and less than with random weights by 5 points at least.",
        measured="The same from layer 1 on: mean over layers and heads.",
        null="Random weights: attention that is blind to content is nearly affine without any training",
        control=Measure("total variation of attention", "total_variation_deeper", ("slash",), "share"),
        parts=(Part(Measure("missed", "affine_deeper", ("slash",), "share"), Rule("below", 0.05, 0.05)),),
        needs="attention",
        deviation="",
        figure="scale_by_layer",
    ),
    Claim(
        key="one_lambda",
        title="λ is one number",
        says="The tokens scale attention by one λ.",
        where=f"{PAPER}, section 3",
        published="one number",
        supported_by="A standard deviation of λ over layers and heads below a tenth of its mean.",
        measured="λ of the question's tokens: standard deviation over layers and heads over their mean.",
        null="Uniform attention without windows: 0; so random weights have one λ too",
        control=Measure("the same with a random sentence", "scale_spread", ("sentence",), "share"),
        parts=(Part(Measure("spread of λ", "scale_spread", ("slash",), "share"), Rule("below", 0.1, 0.1)),),
        needs="attention",
        deviation="",
        figure="scale_by_layer",
    ),
)
