"""What the blog shows of attention without any inserted tokens."""

from mechattn.claims.claim import BLOG, Claim, Measure, Part
from mechattn.claims.rules import Rule

_OTHER = "Problems in place of one passage; all models in place of falcon-rw-1b. Layers by their share of the depth."
_EARLY = "the first sixth of the layers, one at least, as layers 0 to 3 are of 24"

CLAIMS = (
    Claim(
        key="itself_early",
        title="Early layers look at themselves",
        says="In early layers many tokens attend most to themselves, later few.",
        where=f"{BLOG}, figure 4",
        published="",
        supported_by="A larger share of tokens whose strongest target is themselves, by 5 points at least.",
        measured=f"Question, without tokens, mean over heads: the share in {_EARLY}, less that in the others.",
        null="Uniform attention has no largest; random weights are the null",
        control=Measure("attention to itself, early less late", "early_less_late", ("self_mass",), "points"),
        parts=(
            Part(
                Measure("early less late", "early_less_late", ("self_share",), "points"),
                Rule("above", 0.05, 0.05),
            ),
        ),
        needs="attention",
        deviation=_OTHER,
        figure="heads_by_layer:self_share",
    ),
    Claim(
        key="first_token_late",
        title="Later layers look at the first token",
        says="From the fifth layer on heads attend to the first token.",
        where=f"{BLOG}, figures 5 and 10",
        published="layers 4 to 23 of 24",
        supported_by=(
            "A larger share of tokens whose strongest target is the first one than early, by 5 points at least."
        ),
        measured=f"Question, without tokens, mean over heads: the share beyond {_EARLY}, less that before.",
        null="Uniform attention has no largest; random weights are the null",
        control=Measure("attention to the first token, late less early", "late_less_early", ("first_mass",), "points"),
        parts=(
            Part(
                Measure("late less early", "late_less_early", ("first_share",), "points"),
                Rule("above", 0.05, 0.05),
            ),
        ),
        needs="attention",
        deviation=_OTHER,
        figure="heads_by_layer:first_share",
    ),
    Claim(
        key="first_token_no_update",
        title="Heads at the first token write nothing",
        says="In later layers a head that attends to the first token has no impact on the hidden state.",
        where=f"{BLOG}, figure 10",
        published="",
        supported_by="A rank correlation over heads of attention to the first token with size of update below −0.2.",
        measured=(
            f"Question, without tokens, heads beyond {_EARLY}: Spearman's ρ of mass on the first token and ‖Δ‖ / ‖h‖."
        ),
        null="0; and random weights",
        control=None,
        parts=(Part(Measure("ρ over heads", "sink_and_update", (), "number"), Rule("below", -0.2, 0.1)),),
        needs="attention",
        deviation=_OTHER + " Not applicable where no head has a tenth of its attention there.",
    ),
    Claim(
        key="updates_small",
        title="A head changes the stream a little",
        says="How large updates are: each head adds a fraction of the hidden state's length.",
        where=f"{BLOG}, figure 7; the histogram's numbers are not known here",
        published="",
        supported_by="A mean size below half of the hidden state's.",
        measured="‖Δ‖ / ‖h‖ of each head at the question's tokens, without tokens, mean over layers and heads.",
        null="None",
        control=Measure("with “/”", "magnitude", ("slash",), "number"),
        parts=(Part(Measure("‖Δ‖ / ‖h‖", "magnitude", ("baseline",), "number"), Rule("below", 0.5, 0.0)),),
        needs="attention",
        deviation=_OTHER + " The line is ours.",
        by_definition="One of many writers is small beside the sum of all; random weights are as well.",
        figure="update_histogram",
    ),
    Claim(
        key="updates_across",
        title="It turns it rather than stretches it",
        says="How updates turn: they lie across the hidden state rather than along it.",
        where=f"{BLOG}, figures 8 and 9; the histogram's numbers are not known here",
        published="",
        supported_by="A mean |cosine| of update and hidden state below 0.3.",
        measured=(
            "|cos(Δ, h)|, of each head's mean over the question's tokens, without tokens; mean over layers and heads."
        ),
        null="None",
        control=Measure("with “/”", "turned", ("slash",), "number"),
        parts=(Part(Measure("|cos|", "turned", ("baseline",), "number"), Rule("below", 0.3, 0.0)),),
        needs="attention",
        deviation=_OTHER + " The line is ours.",
        by_definition="In many dimensions any two directions are nearly orthogonal; random weights do so as well.",
        figure="update_histogram:orientation",
    ),
)
