"""Draws results as plotly figures and circuitsvis views, and says their main numbers in words."""

from mechattn.render.activation_figures import activation_histogram as activation_histogram
from mechattn.render.activation_figures import activation_metrics as activation_metrics
from mechattn.render.activation_figures import agreement as agreement
from mechattn.render.activation_figures import near_zero_by_class as near_zero_by_class
from mechattn.render.answer_figures import accuracy as accuracy
from mechattn.render.answer_figures import by_samples as by_samples
from mechattn.render.answer_figures import dose_curves as dose_curves
from mechattn.render.answer_figures import while_answering as while_answering
from mechattn.render.attention_figures import received_attention as received_attention
from mechattn.render.budget_figures import attention_budget as attention_budget
from mechattn.render.change_figures import change_map as change_map
from mechattn.render.change_figures import changes as changes
from mechattn.render.circuit_figure import circuit_map as circuit_map
from mechattn.render.figure_table import figure_table as figure_table
from mechattn.render.focus_figures import focus_and_impact as focus_and_impact
from mechattn.render.html_views import pattern as pattern
from mechattn.render.html_views import received_text as received_text
from mechattn.render.layer_figures import by_layer as by_layer
from mechattn.render.layer_figures import heads_by_layer as heads_by_layer
from mechattn.render.layer_figures import scale_by_layer as scale_by_layer
from mechattn.render.model_figures import received_by_model as received_by_model
from mechattn.render.model_figures import verdicts as verdicts
from mechattn.render.patching_figures import patching_effects as patching_effects
from mechattn.render.patching_figures import patching_map as patching_map
from mechattn.render.print_size import caption as caption
from mechattn.render.print_size import for_paper as for_paper
from mechattn.render.print_size import write_image as write_image
from mechattn.render.update_figures import update_by_position as update_by_position
from mechattn.render.update_figures import update_histogram as update_histogram
from mechattn.render.update_figures import update_map as update_map
from mechattn.render.words import verdict_words as verdict_words


def __dir__() -> list[str]:
    """The names of the functions, without those of the modules that define them."""
    return sorted(
        name for name, value in globals().items() if callable(value) and not name.startswith("_")
    )
