"""A batch on the devices of the measured layers, the targets of its interventions, and its
sequences paired with their baselines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.analysis.analysis import PairedRows, Window
from mechattn.errors import ModelError
from mechattn.functional.attention import AnyRows, Rows
from mechattn.interventions.intervention import Intervention, Target
from mechattn.model.hooked import HookedModel, device_of
from mechattn.prompts.token_sequences import Batch, Pairs, pairs_of

Windows = Mapping[int, Window]  # of the measured layers


@dataclass(frozen=True)
class PlacedBatch:
    """A batch, copied to each device that holds a measured layer."""

    model: HookedModel
    input_batch: Batch  # on the device where the model takes its input
    windows: Windows
    devices: Mapping[int, torch.device]  # of the measured layers
    copies: Mapping[torch.device, Batch]
    layer_batches: Mapping[int, Batch]  # on the layer's device, as the layer reads it
    prompt_ids: tuple[str, ...]

    @classmethod
    def of(
        cls,
        model: HookedModel,
        batch: Batch,
        windows: Windows,
        prompt_ids: Sequence[str],
    ) -> PlacedBatch:
        """Copy a batch once to each device, because each copy waits for a GPU.

        Args:
            model: The model, which may lie on several devices.
            batch: A batch on the CPU.
            windows: The number of keys that a query of each measured layer sees; None for all.
            prompt_ids: The id of each prompt of the run; the rows of a batch hold indices of it.
        """
        input_device = device_of(model)
        devices = {layer: device_of(model.blocks[layer]) for layer in windows}
        copies = {device: batch.to(device) for device in {input_device, *devices.values()}}
        layer_batches = {
            layer: copies[device].as_read_by(layer) for layer, device in devices.items()
        }

        return cls(
            model=model,
            input_batch=copies[input_device],
            windows=windows,
            devices=devices,
            copies=copies,
            layer_batches=layer_batches,
            prompt_ids=tuple(prompt_ids),
        )

    @property
    def heads(self) -> int:
        """The number of heads of a layer."""
        return int(self.model.cfg.n_heads)

    def layer_pairs(self, layer: int) -> Pairs:
        """Each sequence of the layer's batch with its baseline."""
        pairs = pairs_of(self.copies[self.devices[layer]])
        return replace(pairs, batch=self.layer_batches[layer])

    def name_of_row(self, row: int) -> str:
        """The prompt and the condition of a row, for messages."""
        prompt, condition = self.input_batch.rows[row]
        return f'prompt {self.prompt_ids[prompt]} with the condition "{condition}"'

    def interventions(self) -> list[tuple[Intervention, Target]]:
        """The interventions of the batch, in order, each with the tokens that it acts on.

        Rows of a condition that have the same interventions share one target.
        """
        batch = self.input_batch
        # Keyed by identity, because a condition may give each prompt an intervention of its own.
        rows_by_interventions: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        for row, (_, condition) in enumerate(batch.rows):
            interventions = batch.interventions[row]
            if interventions:
                rows_by_interventions[(condition, *map(id, interventions))].append(row)

        # An original token has its position in the baseline, any other −1 − its position in the
        # sequence. Random draws depend on this number, so they are the same in every batch.
        positions = torch.where(batch.original, batch.origin, -1 - batch.positions)

        interventions_and_targets = []
        for rows in rows_by_interventions.values():
            row_indices = torch.tensor(rows, device=batch.tokens.device)
            target_ids = tuple(self.prompt_ids[batch.rows[row][0]] for row in rows)
            target = Target(
                row_indices, target_ids, positions[row_indices], batch.segment[row_indices]
            )
            for intervention in batch.interventions[rows[0]]:
                interventions_and_targets.append((intervention, target))
        return interventions_and_targets


@dataclass(frozen=True, eq=False)
class PairedLayer:
    """What the blocks of a layer share: the attention of the baselines, and the values."""

    layer: int
    pairs: Pairs  # which sequence is paired with which baseline
    window: Window  # the number of keys that a query sees; None for all
    baseline: AnyRows  # the attention of the baselines
    v: Float[Tensor, "batch kv_head pos d_head"]  # values of the sequences
    # Values of the original tokens, in the order of the baseline
    v_aligned: Float[Tensor, "batch kv_head original d_head"]

    def rows(self, rows: Rows) -> PairedRows:
        """Pair a block with the baseline's rows of the same queries.

        The baseline's rows are computed again, or looked up in a whole pattern.

        Args:
            rows: A block of the batch's attention.

        Returns:
            The block, its columns of original tokens in the baseline's order, and the baseline's
            rows of the same queries.
        """
        pairs = self.pairs
        keys = rows.keys
        pattern = rows.pattern
        # The number of original tokens up to the last query, in the sequence with the most.
        original_count = pairs.reach[rows.queries.stop - 1]

        # The columns in the order of the baseline's tokens; 0 for tokens outside this block.
        places = pairs.place[:, :original_count]
        is_in_block = (
            pairs.original[:, :original_count] & (places >= keys.start) & (places < keys.stop)
        )
        columns = (places - keys.start).clamp(0, pattern.shape[-1] - 1)[:, None, None]
        aligned_pattern = pattern.gather(-1, columns.expand(*pattern.shape[:3], -1))

        # An inserted query has no row in the baseline. It gets that of the first token, unused.
        queries = pairs.batch.origin[:, rows.queries].clamp(min=0)
        return PairedRows(
            layer=self.layer,
            pattern=pattern,
            aligned=aligned_pattern * is_in_block[:, None, None],
            baseline=self.baseline.rows(queries, original_count),
            v=self.v[:, :, keys],
            v_aligned=self.v_aligned[:, :, :original_count],
            v_baseline=self.baseline.v[:, :, :original_count],
            segment=pairs.segment[:, :original_count],
            queries=rows.queries,
            keys=keys,
            batch=pairs.batch,
            window=self.window,
        )


def paired_layer(
    layer: int, attention: AnyRows | None, pairs: Pairs, window: Window
) -> PairedLayer:
    """Gather what the blocks of a layer share.

    Args:
        layer: The layer.
        attention: The attention of the whole batch; None if the model shows no values by head.
        pairs: Which sequence is paired with which baseline, on the layer's device.
        window: The number of keys that a query sees; None for all.

    Raises:
        ModelError: ``attention`` is None.
    """
    if attention is None:
        raise ModelError(
            f"layer {layer} shows no hook_v by head, so outputs with and without inserted tokens"
            " cannot be compared"
        )

    # The values of the original tokens, in the order of the baseline.
    v = attention.v
    indices = pairs.place[:, None, :, None].expand(-1, v.shape[1], -1, v.shape[3])
    v_aligned = v.gather(2, indices)

    return PairedLayer(
        layer=layer,
        pairs=pairs,
        window=window,
        baseline=attention.of(pairs.baseline),
        v=v,
        v_aligned=v_aligned,
    )
