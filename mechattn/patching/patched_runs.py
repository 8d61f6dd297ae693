"""A prompt's two runs, with and without inserted tokens, and patching from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.model.head_parts import kv_heads_of, split_heads
from mechattn.model.hooked import HookedModel, attribute_set
from mechattn.model.hooks import blocks_of, keeping_nothing
from mechattn.model.patch.keys_values_z import changing_keys_values, changing_z
from mechattn.model.several_devices import device_of
from mechattn.prompts.token_sequences import TokenSequence

# Each head's output before W_O; its queries, keys and values before RoPE and norms (for heads with
# their own); its pattern [pos head key]; the residual stream after a layer, and what attention or
# the MLP adds to it, as one head.
Part = Literal["z", "q", "k", "v", "pattern", "resid_post", "attn_out", "mlp_out"]
OF_LAYER = ("resid_post", "attn_out", "mlp_out")  # parts without heads
Z = Float[Tensor, "pos head d_head"]
Where = tuple[int, int]  # layer, head
# A head, positions, and what to put there.
Change = tuple[Where, Int[Tensor, " place"], Float[Tensor, "place d_head"]]


@dataclass(frozen=True)
class Run:
    """One run of a sequence that ends in the reference answer: a part by layer, and the logits
    before the answer.

    ``origins`` are the original tokens that the other run has, too; ``blocks`` what each block of
    the model returned, and ``restarts`` whether passes may start at later layers with that.
    """

    sequence: TokenSequence
    z: Mapping[int, Z]
    logits: Float[Tensor, "1 answer d_vocab"]
    origins: Int[Tensor, " shared"]
    blocks: Sequence[Any] = ()
    restarts: bool = False

    @property
    def places(self) -> Int[Tensor, " shared"]:
        """The position of each original token that both versions have, in baseline order."""
        return places_of(self.sequence, self.origins)


def places_of(sequence: TokenSequence, origins: Int[Tensor, " shared"]) -> Int[Tensor, " shared"]:
    """The positions of tokens with these origins."""
    place_of_origin = torch.full((int(origins.max()) + 1,), -1)
    wanted = (sequence.origin >= 0) & (sequence.origin < len(place_of_origin))
    place_of_origin[sequence.origin[wanted]] = wanted.nonzero()[:, 0]
    return place_of_origin[origins]


@contextmanager
def changing(
    model: HookedModel, part: Part, layers: Mapping[int, Callable[[Tensor], Tensor]]
) -> Iterator[None]:
    """Replace a part of each layer [batch pos head d_head] by a function of it during forward
    passes.
    """
    with ExitStack() as stack:
        if part == "z":
            stack.enter_context(changing_z(model, layers))
        elif part in ("k", "v"):
            heads = kv_heads_of(model)
            changes = {
                layer: partial(_only, part, change, heads) for layer, change in layers.items()
            }
            stack.enter_context(changing_keys_values(model, changes))
        elif part == "q":
            for layer, change in layers.items():
                hook = model.hook_dict[f"blocks.{layer}.attn.hook_q"]
                by_head = partial(_by_head, change, int(model.cfg.n_heads))
                stack.callback(hook.register_forward_hook(by_head).remove)
        else:
            name, own_axes, head_axes = _HOOKS[part]
            to_heads = f"{own_axes} -> {head_axes}"
            from_heads = f"{head_axes} -> {own_axes}"
            for layer, change in layers.items():
                hook = model.hook_dict[name.format(layer)]
                reshaped = partial(_reshaped, change, to_heads, from_heads)
                stack.callback(hook.register_forward_hook(reshaped).remove)
        yield


# Hooks whose values have other axes than [batch pos head d_head], and those axes in that order.
_HOOKS = {
    "pattern": ("blocks.{}.attn.hook_pattern", "batch head query key", "batch query head key"),
    **{
        part: ("blocks.{}.hook_" + part, "batch pos d_model", "batch pos 1 d_model")
        for part in OF_LAYER
    },
}


def _only(
    part: Part, change: Callable[[Tensor], Tensor], heads: int, kind: str, x: Tensor
) -> Tensor:
    """Keys and values come to the same function; only one of the two is changed."""
    if kind != part:
        return x
    return change(split_heads(x, heads)).reshape(x.shape)


def _reshaped(
    change: Callable[[Tensor], Tensor],
    to_heads: str,
    from_heads: str,
    module: Any,
    inputs: Any,
    x: Tensor,
) -> Tensor:
    return rearrange(change(rearrange(x, to_heads)), from_heads)


def _by_head(
    change: Callable[[Tensor], Tensor], heads: int, module: Any, inputs: Any, x: Tensor
) -> Tensor:
    return change(split_heads(x, heads)).reshape(x.shape)


def read(
    model: HookedModel,
    sequence: TokenSequence,
    layers: Sequence[int],
    part: Part,
    origins: Int[Tensor, " shared"],
) -> Run:
    """Run a sequence without patching."""
    activations: dict[int, Z] = {}
    block_outputs: list[Any] = []

    def record_block(module: Any, inputs: Any, out: Any) -> None:
        block_outputs.append(out)

    def record(
        layer: int, z: Float[Tensor, "batch pos head d_head"]
    ) -> Float[Tensor, "batch pos head d_head"]:
        activations[layer] = z[0].detach()
        return z

    with ExitStack() as stack:
        records = {layer: partial(record, layer) for layer in layers}
        stack.enter_context(changing(model, part, records))
        for block in blocks_of(model):
            stack.callback(block.register_forward_hook(record_block).remove)
        logits = logits_of(model, sequence, 1)
    return Run(sequence, activations, logits, origins, block_outputs)


def restartable(model: HookedModel, run: Run, layers: Iterable[int]) -> Run:
    """The run, with whether passes may start at these layers: not where later ones use more than
    blocks return.
    """

    def gives_the_same(layer: int) -> bool:
        with _starting_at(model, layer, run.blocks, 1):
            return torch.equal(logits_of(model, run.sequence, 1), run.logits)

    later_layers = sorted(set(layers) - {0})
    try:
        restarts = all(gives_the_same(layer) for layer in later_layers)
    except Exception:
        # A block misses what an earlier one leaves it, such as shared keys: start at the first.
        return run
    return replace(run, restarts=restarts)


@contextmanager
def _starting_at(
    model: HookedModel, layer: int, blocks: Sequence[Any], rows: int
) -> Iterator[None]:
    """Let the blocks before a layer return what they returned before, for several rows, without
    computing it.
    """
    with ExitStack() as stack:
        for block, out in zip(blocks_of(model)[:layer], blocks, strict=False):
            stack.enter_context(attribute_set(block, "forward", partial(_returned, out, rows)))
        yield


def _returned(out: Any, rows: int, *inputs: Any, **options: Any) -> Any:
    """What a block returned for one row, for several."""
    if isinstance(out, tuple):
        return tuple(_returned(member, rows) for member in out)
    if isinstance(out, Tensor):
        return out.expand(rows, *out.shape[1:])
    return out


def logits_of(
    model: HookedModel, sequence: TokenSequence, rows: int, gradients: bool = False
) -> Float[Tensor, "row answer d_vocab"]:
    """Logits before each token of the answer, for several copies of a sequence in a batch."""
    device = device_of(model)
    tokens = sequence.tokens.to(device).expand(rows, -1)
    options: dict[str, Any] = dict(keeping_nothing(model))
    position_ids = sequence.position_ids
    if position_ids is not None and not torch.equal(position_ids, torch.arange(len(sequence))):
        options["position_ids"] = position_ids.to(device).expand(rows, -1)
        options["attention_mask"] = torch.ones_like(tokens)
    answer_places = sequence.of_segment("answer").nonzero()[:, 0].to(device)
    places_before = answer_places - 1
    unembedded = []  # whether the hook was called: not by every custom model

    def only_before_answer(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        stream, *other_inputs = inputs
        unembedded.append(True)
        return (stream[:, places_before.to(stream.device)], *other_inputs)

    with ExitStack() as stack:
        unembed: Any = getattr(model, "unembed", None)
        if unembed is not None:
            stack.callback(unembed.register_forward_pre_hook(only_before_answer).remove)
        stack.enter_context(torch.set_grad_enabled(gradients))
        stack.enter_context(_without_gradients_of_weights(model))
        logits = model(tokens, return_type="logits", **options)
    if not unembedded:
        logits = logits[:, places_before]
    return logits


@contextmanager
def _without_gradients_of_weights(model: HookedModel) -> Iterator[None]:
    """Let a pass keep nothing for gradients of weights, which would be most of its memory."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in weights:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)


def patched_logits(
    model: HookedModel, run: Run, changes_by_row: Sequence[Sequence[Change]], part: Part = "z"
) -> Float[Tensor, "row answer d_vocab"]:
    """Logits of a run with a part replaced in each row, which makes the changes of that row."""
    rows = len(changes_by_row)
    by_layer: dict[int, list[tuple[int, int, Tensor, Tensor]]] = {}
    for row, changes in enumerate(changes_by_row):
        for (layer, head), places, value in changes:
            by_layer.setdefault(layer, []).append((row, head, places, value))

    def replace_values(changes: list[tuple[int, int, Tensor, Tensor]], z: Tensor) -> Tensor:
        z = z.clone()
        for row, head, places, value in changes:
            z[row, places.to(z.device), head] = value.to(z)
        return z

    first_layer = 0
    if run.restarts:
        first_layer = min(by_layer, default=0)
    replacements = {layer: partial(replace_values, changes) for layer, changes in by_layer.items()}
    restarted = _starting_at(model, first_layer, run.blocks, rows)
    with changing(model, part, replacements), restarted:
        return logits_of(model, run.sequence, rows)


def read_with_gradients(
    model: HookedModel,
    sequence: TokenSequence,
    layers: Sequence[int],
    origins: Int[Tensor, " shared"],
    metric: Callable[[Run], Float[Tensor, " row"]],
) -> tuple[Run, dict[int, Z]]:
    """Run a sequence and compute the gradient of a metric with respect to every head's output at
    every token.
    """
    outputs: dict[int, Tensor] = {}

    def record(layer: int, z: Tensor) -> Tensor:
        outputs[layer] = z
        return z

    def begin_graph(module: Any, inputs: Any, out: Tensor) -> Tensor:
        return out.detach().requires_grad_()

    first_stream = model.hook_dict[f"blocks.{min(layers)}.hook_resid_pre"]
    records = {layer: partial(record, layer) for layer in layers}
    with ExitStack() as stack:
        stack.callback(first_stream.register_forward_hook(begin_graph).remove)
        stack.enter_context(changing_z(model, records))
        logits = logits_of(model, sequence, 1, gradients=True)
    value = metric(Run(sequence, {}, logits, origins))[0]
    gradients = torch.autograd.grad(value, [outputs[layer] for layer in layers])
    z_by_layer = {layer: z[0].detach() for layer, z in outputs.items()}
    run = Run(sequence, z_by_layer, logits.detach(), origins)
    return run, {layer: gradient[0] for layer, gradient in zip(layers, gradients, strict=True)}
