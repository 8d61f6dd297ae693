"""Draws results as plotly figures and circuitsvis views; nothing here computes numbers."""

from mechattn.render.activation_figures import (
    activation_histogram as activation_histogram,
    activation_metrics as activation_metrics,
    agreement as agreement,
    near_zero_by_class as near_zero_by_class,
    update_by_position as update_by_position,
    update_histogram as update_histogram,
    update_map as update_map,
)
from mechattn.render.answer_figures import (
    accuracy as accuracy,
    accuracy_map as accuracy_map,
    by_samples as by_samples,
    diversity as diversity,
    dose_curves as dose_curves,
    while_answering as while_answering,
)
from mechattn.render.attention_figures import (
    change_map as change_map,
    received_attention as received_attention,
    received_by_model as received_by_model,
)
from mechattn.render.change_figures import changes as changes, verdicts as verdicts
from mechattn.render.html_views import explorer as explorer, pattern as pattern, received_text as received_text
from mechattn.render.layer_figures import (
    by_layer as by_layer,
    heads_by_layer as heads_by_layer,
    scale_by_layer as scale_by_layer,
)
from mechattn.render.patching_figures import (
    circuit_map as circuit_map,
    patching_effects as patching_effects,
    patching_map as patching_map,
)
from mechattn.render.print_size import figure_table as figure_table, for_paper as for_paper, write_image as write_image
from mechattn.render.words import verdict_words as verdict_words


def __dir__() -> list[str]:
    """The functions; not the files that they are in."""
    return sorted(name for name, thing in globals().items() if callable(thing) and not name.startswith("_"))
