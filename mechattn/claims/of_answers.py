"""What the paper says of answers."""

from mechattn.claims.claim import PAPER, Claim, Measure, Part
from mechattn.claims.rules import Rule

_POINT = "by 1 point at least"
_PAIRED = "Greedy answers to the same problems: right ones with it less right ones without (Newcombe's interval)."


def _gain(name: str, condition: str, to: str = "baseline") -> Part:
    return Part(Measure(name, "accuracy_apart", (condition, to), "points"), Rule("above", 0.01, 0.0))


CLAIMS = (
    Claim(
        key="tokens_help",
        title="Meaningless tokens raise accuracy",
        says="More problems are solved with 55 “/” between system prompt and question.",
        where=f"{PAPER}, tables 1, 2 and 5",
        published="+2.3, +2.0, +0.3 points",
        published_of=(
            "MATH-500: Qwen2.5-Math-7B 72.3 → 74.6, 1.5B 63.9 → 65.9, Llama-3.1-8B-Instruct 41.8 → 42.1; AIME 2024: "
            "23.1 → 23.3 (Qwen2.5-Math-7B), 7.9 → 9.9 (Llama)"
        ),
        supported_by=f"A higher accuracy than without, {_POINT}.",
        measured=_PAIRED,
        null="No difference",
        control=Measure("a random sentence less none", "accuracy_apart", ("sentence", "baseline"), "points"),
        parts=(_gain("“/” less none", "slash"),),
        needs="answers",
        deviation="",
    ),
    Claim(
        key="arm_helps",
        title="ARM raises accuracy",
        says="More problems are solved with ARM in the first MLP.",
        where=f"{PAPER}, section 4",
        published="",
        supported_by=f"A higher accuracy than without, {_POINT}.",
        measured=_PAIRED,
        null="No difference",
        control=Measure("a random change of the same size", "accuracy_apart", ("direction", "baseline"), "points"),
        parts=(_gain("ARM less none", "arm"),),
        needs="answers",
        deviation="One setting of ARM, the published one of the family, in place of the best of many for each task.",
    ),
    Claim(
        key="length_rises_then_falls",
        title="Some help, more harm",
        says="Accuracy rises with the number of tokens, and falls sharply when they are too many.",
        where=f"{PAPER}, figure 8; 0 to 70 tokens",
        published="a rise, then a sharp drop",
        supported_by=f"Higher with 40 tokens than with none, and lower with 70 than with 40, both {_POINT}.",
        measured=(
            "Greedy answers to the same problems, with 0, 10, 25, 40, 55 and 70 tokens; two differences fixed here."
        ),
        null="No difference",
        control=Measure("10 less none", "accuracy_apart", ("count=10", "baseline"), "points"),
        parts=(_gain("40 less none", "count=40"), _gain("40 less 70", "count=40", "count=70")),
        needs="length",
        deviation="",
    ),
    Claim(
        key="best_before_the_question",
        title="Best between system prompt and question",
        says="Where the tokens stand matters; between system prompt and question is best.",
        where=f"{PAPER}, table 4",
        published="75.0 % for 69.6, 51.2, 0",
        published_of="MATH-500: none 72.4, start 69.6, between 75.0, end 0, random 51.2",
        supported_by=f"More right there than at the start, at random and at the end, each {_POINT}.",
        measured="Greedy answers to the same problems, 55 “/” at each place; three differences.",
        null="No difference",
        control=Measure("at the end less none", "accuracy_apart", ("place=before_answer", "baseline"), "points"),
        parts=(
            _gain("less at the start", "slash", "place=start"),
            _gain("less at random", "slash", "place=random"),
            _gain("less at the end", "slash", "place=before_answer"),
        ),
        needs="place",
        deviation="",
    ),
    Claim(
        key="pass_at_k",
        title="More solved in several tries",
        says="With several sampled answers more problems are solved with ARM: a higher pass@k.",
        where=f"{PAPER}, figure 6",
        published="",
        supported_by=f"A higher chance that one of the answers is right, {_POINT}.",
        measured="pass@k without bias, k the number of samples, with ARM less without, at temperature 1.",
        null="No difference",
        control=Measure("“/” less none", "pass_at_k", ("slash", "baseline"), "points"),
        parts=(Part(Measure("ARM less none", "pass_at_k", ("arm", "baseline"), "points"), Rule("above", 0.01, 0.0)),),
        needs="samples",
        deviation="Fewer samples a problem than the 20 of the released code.",
    ),
)
