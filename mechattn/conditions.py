"""What can be inserted into prompts, or done to them: the conditions that `ma.run` takes."""

from mechattn.prompts.conditions import (
    Baseline as Baseline,
    Counting as Counting,
    Insertion as Insertion,
    MeaninglessTokens as MeaninglessTokens,
    RandomSentence as RandomSentence,
    RandomTokens as RandomTokens,
    RepeatedWord as RepeatedWord,
    RepeatQuestion as RepeatQuestion,
    ShuffledSentence as ShuffledSentence,
    Text as Text,
)
from mechattn.prompts.counterparts import Counterpart as Counterpart
from mechattn.prompts.token_sequences import Sequence as Sequence
