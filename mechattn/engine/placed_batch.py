"""A batch on the devices of the measured layers: which rows an intervention acts on, and which rows
of attention belong beside each other."""

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
    """A batch that is copied to each device that holds a measured layer."""

    model: HookedModel
    placed: Batch  # on the device where the model takes its input
    windows: Windows
    devices: Mapping[int, torch.device]  # of the measured layers
    copies: Mapping[torch.device, Batch]
    batches: Mapping[int, Batch]  # on the layer's device, as the layer reads it
    prompt_ids: tuple[str, ...]

    @classmethod
    def of(
        cls,
        model: HookedModel,
        batch: Batch,
        windows: Windows,
        prompt_ids: Sequence[str],
    ) -> PlacedBatch:
        """Copy a batch to where it is needed: once for each device, as a copy waits for a GPU.

        Args:
            model: The model, which may lie on several devices.
            batch: A batch on the CPU.
            windows: The window of each measured layer; None where it sees all keys.
            prompt_ids: The id of each prompt of the run, which the rows of a batch index.
        """
        home = device_of(model)
        devices = {layer: device_of(model.blocks[layer]) for layer in windows}
        copies = {device: batch.to(device) for device in {home, *devices.values()}}
        batches = {layer: copies[device].as_read_by(layer) for layer, device in devices.items()}

        return cls(
            model=model,
            placed=copies[home],
            windows=windows,
            devices=devices,
            copies=copies,
            batches=batches,
            prompt_ids=tuple(prompt_ids),
        )

    @property
    def heads(self) -> int:
        """The number of heads of a layer."""
        return int(self.model.cfg.n_heads)

    def layer_pairs(self, layer: int) -> Pairs:
        """Each sequence of the layer's batch with its baseline."""
        pairs = pairs_of(self.copies[self.devices[layer]])
        return replace(pairs, batch=self.batches[layer])

    def name_of_row(self, row: int) -> str:
        """A row of the batch, for messages."""
        prompt, condition = self.placed.rows[row]
        return f'prompt {self.prompt_ids[prompt]} with the condition "{condition}"'

    def interventions(self) -> list[tuple[Intervention, Target]]:
        """Each intervention of each condition, in order, with the tokens that it acts on.

        Returns:
            An intervention once for all rows of a condition that have the same interventions, with
            these rows as its target.
        """
        batch = self.placed
        # By identity: a condition may make other interventions for each prompt.
        rows_of: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        for row, (_, condition) in enumerate(batch.rows):
            interventions = batch.interventions[row]
            if interventions:
                rows_of[(condition, *map(id, interventions))].append(row)

        # An original token by its place in the baseline, an inserted one by −1 − its place in the
        # sequence. Random draws are keyed by it, so a token has the same ones in every batch.
        positions = torch.where(batch.original, batch.origin, -1 - batch.positions)

        with_targets = []
        for rows in rows_of.values():
            index = torch.tensor(rows, device=batch.tokens.device)
            ids = tuple(self.prompt_ids[batch.rows[row][0]] for row in rows)
            target = Target(index, ids, positions[index], batch.segment[index])
            for intervention in batch.interventions[rows[0]]:
                with_targets.append((intervention, target))
        return with_targets


@dataclass(frozen=True, eq=False)
class PairedLayer:
    """What the blocks of one layer have in common: the baselines' attention, and values."""

    number: int  # of the layer
    pairs: Pairs  # which sequence is paired with which baseline
    window: Window  # the number of keys that a query sees; None for all
    baseline: AnyRows  # the attention of the baselines
    v: Float[Tensor, "batch kv_head pos d_head"]  # values of the sequences
    # The same for their original tokens alone, in the order of the baseline
    v_aligned: Float[Tensor, "batch kv_head original d_head"]

    def rows(self, rows: Rows) -> PairedRows:
        """The block together with the baseline's rows of the same queries, computed (or looked up)
        on demand.

        Args:
            rows: A block of the batch's attention.

        Returns:
            The block of the paired sequences, their columns in the baseline's order, and the
            baseline's rows of the same original tokens.
        """
        pairs = self.pairs
        keys = rows.keys
        pattern = rows.pattern
        count = pairs.reach[rows.queries.stop - 1]  # of original tokens up to the last query

        # The pattern's columns in the order of the baseline's tokens, 0 for those of other blocks.
        place = pairs.place[:, :count]
        is_in_block = pairs.original[:, :count] & (place >= keys.start) & (place < keys.stop)
        column = (place - keys.start).clamp(0, pattern.shape[-1] - 1)[:, None, None]
        aligned = pattern.gather(-1, column.expand(*pattern.shape[:3], -1))

        # An inserted query has none in the baseline: what its row holds is not used.
        queries = pairs.batch.origin[:, rows.queries].clamp(min=0)
        return PairedRows(
            layer=self.number,
            pattern=pattern,
            aligned=aligned * is_in_block[:, None, None],
            baseline=self.baseline.rows(queries, count),
            v=self.v[:, :, keys],
            v_aligned=self.v_aligned[:, :, :count],
            v_baseline=self.baseline.v[:, :, :count],
            segment=pairs.segment[:, :count],
            queries=rows.queries,
            keys=keys,
            batch=pairs.batch,
            window=self.window,
        )


def paired_layer(
    number: int, attention: AnyRows | None, pairs: Pairs, window: Window
) -> PairedLayer:
    """What a layer's blocks share, made at its first block.

    Args:
        number: The number of the layer.
        attention: The attention of the whole batch, or None if it cannot be asked for.
        pairs: Which sequence is paired with which baseline, on the layer's device.
        window: The number of keys that a query sees; None for all.

    Raises:
        ModelError: Single rows and values cannot be asked for.
    """
    if attention is None:
        raise ModelError(
            f"layer {number} shows no hook_v by head, so outputs with and without inserted tokens"
            " cannot be compared"
        )

    # The values of the original tokens, in the order of the baseline.
    v = attention.v
    place = pairs.place[:, None, :, None].expand(-1, v.shape[1], -1, v.shape[3])
    v_aligned = v.gather(2, place)

    return PairedLayer(number, pairs, window, attention.of(pairs.baseline), v, v_aligned)
