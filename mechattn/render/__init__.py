"""From a result to something to look at: plotly figures and circuitsvis views. Nothing here computes a number."""

from mechattn.render.patterns import attention_pattern as attention_pattern
from mechattn.render.received_attention import received_attention as received_attention
from mechattn.render.received_attention import verdict_words as verdict_words
