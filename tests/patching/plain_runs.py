"""Forward passes of plain transformers, in which what modules read and write is seen or replaced."""

from functools import cache, partial

import torch
from transformers import AutoModelForCausalLM

from mechattn.model.checkpoint import toy_folder

W_O = "model.layers.{}.self_attn.o_proj"


@cache
def plain_toy(name="toy:llama", attention="eager"):
    """A toy in float64 as transformers has it; like ours it computes norms in float32."""
    model = AutoModelForCausalLM.from_pretrained(
        toy_folder(name), dtype=torch.float64, attn_implementation=attention
    )
    return model.eval()


def plain_logits(model, tokens, reading=None, writing=None):
    """Logits [pos d_vocab].

    ``reading`` and ``writing`` have, by the name of a module, a function of what it is given, or of what it
    returns, [pos …]; unless that returns None, the model goes on with it.
    """

    def before(change, module, inputs):
        value = change(inputs[0][0])
        if value is not None:
            return (value[None], *inputs[1:])

    def after(change, module, inputs, out):
        is_tuple = isinstance(out, tuple)
        value = change(out[0][0] if is_tuple else out[0])
        if value is not None:
            return (value[None], *out[1:]) if is_tuple else value[None]

    handles = []
    for name, change in (reading or {}).items():
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(partial(before, change)))
    for name, change in (writing or {}).items():
        module = model.get_submodule(name)
        handles.append(module.register_forward_hook(partial(after, change)))
    logits = model(torch.as_tensor(tokens)[None], use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return logits
