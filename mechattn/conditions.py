"""What can be inserted into prompts, or done to them: the conditions that `ma.run` takes."""

from mechattn.prompts.conditions import Baseline as Baseline
from mechattn.prompts.conditions import Counting as Counting
from mechattn.prompts.conditions import Insertion as Insertion
from mechattn.prompts.conditions import MeaninglessTokens as MeaninglessTokens
from mechattn.prompts.conditions import RandomSentence as RandomSentence
from mechattn.prompts.conditions import RandomTokens as RandomTokens
from mechattn.prompts.conditions import RepeatedWord as RepeatedWord
from mechattn.prompts.conditions import RepeatQuestion as RepeatQuestion
from mechattn.prompts.conditions import ShuffledSentence as ShuffledSentence
from mechattn.prompts.conditions import Text as Text
from mechattn.prompts.counterparts import Counterpart as Counterpart
from mechattn.prompts.token_sequences import TokenSequence as TokenSequence
