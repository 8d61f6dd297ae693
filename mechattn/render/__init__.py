"""From a result to something to look at: plotly figures and circuitsvis views. Nothing here computes a number."""

from mechattn.render.accuracy import accuracy as accuracy
from mechattn.render.accuracy import accuracy_map as accuracy_map
from mechattn.render.accuracy import accuracy_sweep as accuracy_sweep
from mechattn.render.accuracy import by_samples as by_samples
from mechattn.render.accuracy import diversity as diversity
from mechattn.render.activations import activation_histogram as activation_histogram
from mechattn.render.activations import activation_metrics as activation_metrics
from mechattn.render.activations import agreement as agreement
from mechattn.render.activations import near_zero_by_class as near_zero_by_class
from mechattn.render.affine_shift import scale_by_layer as scale_by_layer
from mechattn.render.affine_shift import shift_rank as shift_rank
from mechattn.render.change import change_map as change_map
from mechattn.render.change import sweep as sweep
from mechattn.render.change import two_by_two as two_by_two
from mechattn.render.explorer import attention_explorer as attention_explorer
from mechattn.render.focus import by_layer as by_layer
from mechattn.render.focus import heads_by_layer as heads_by_layer
from mechattn.render.heads import across_layers as across_layers
from mechattn.render.heads import meaningless_and_sentence as meaningless_and_sentence
from mechattn.render.patterns import attention_pattern as attention_pattern
from mechattn.render.received_attention import received_attention as received_attention
from mechattn.render.received_attention import verdict_words as verdict_words
from mechattn.render.updates import update_by_position as update_by_position
from mechattn.render.updates import update_histogram as update_histogram
from mechattn.render.updates import update_map as update_map
