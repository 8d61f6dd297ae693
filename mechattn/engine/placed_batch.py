"""A batch on the devices of the measured layers, and which of its rows an intervention acts on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from mechattn.analysis.analysis import Window
from mechattn.interventions.intervention import Intervention, Target
from mechattn.model.hooked import HookedModel
from mechattn.model.several_devices import device_of
from mechattn.prompts.token_sequences import Batch, Pairs, pairs_of

Windows = Mapping[int, Window]  # of the measured layers


@dataclass(frozen=True)
class PlacedBatch:
    """A batch that is copied to each device that holds a measured layer."""

    model: HookedModel
    placed: Batch  # where the model takes it
    windows: Windows
    devices: Mapping[int, torch.device]  # of the measured layers
    copies: Mapping[torch.device, Batch]
    pairs: Mapping[torch.device, Pairs | None]  # of a condition with the baseline, if needed
    prompt_ids: tuple[str, ...]

    @classmethod
    def of(
        cls,
        model: HookedModel,
        batch: Batch,
        windows: Windows,
        prompt_ids: Sequence[str],
        needs_pairs: bool,
    ) -> PlacedBatch:
        """Copy a batch to where it is needed: once for each device, as a copy waits for a GPU.

        Args:
            model: The model, which may lie on several devices.
            batch: A batch on the CPU.
            windows: The window of each measured layer; None where it sees all keys.
            prompt_ids: The id of each prompt of the run, which the rows of a batch index.
            needs_pairs: Whether an analysis compares each sequence with its baseline.
        """
        home = device_of(model)
        devices = {layer: device_of(model.blocks[layer]) for layer in windows}
        copies = {device: batch.to(device) for device in {home, *devices.values()}}

        pairs: dict[torch.device, Pairs | None] = dict.fromkeys(copies)
        if needs_pairs:
            pairs = {device: pairs_of(copy) for device, copy in copies.items()}

        return cls(
            model=model,
            placed=copies[home],
            windows=windows,
            devices=devices,
            copies=copies,
            pairs=pairs,
            prompt_ids=tuple(prompt_ids),
        )

    @property
    def heads(self) -> int:
        """The number of heads of a layer."""
        return int(self.model.cfg.n_heads)

    def at(self, layer: int) -> Batch:
        """The batch on the layer's device."""
        return self.copies[self.devices[layer]]

    def pairs_at(self, layer: int) -> Pairs:
        """The pairs on the layer's device, where an analysis needs them."""
        device = self.devices[layer]
        return cast(Pairs, self.pairs[device])

    def name_of_row(self, row: int) -> str:
        """A row of the batch, for messages."""
        prompt, condition = self.placed.rows[row]
        name = f"number {prompt}"
        if prompt < len(self.prompt_ids):
            name = self.prompt_ids[prompt]
        return f'prompt {name} with the condition "{condition}"'

    def interventions(self) -> list[tuple[Intervention, Target]]:
        """Each intervention of each condition, in order, with the tokens that it acts on.

        Returns:
            An intervention once for all rows of its condition, with these rows as its target.
        """
        batch = self.placed

        # The rows of each condition's first intervention, of its second, and so on.
        rows: dict[tuple[str, int], list[int]] = {}
        for row, of_row in enumerate(batch.interventions):
            _, condition = batch.rows[row]
            for order in range(len(of_row)):
                rows.setdefault((condition, order), []).append(row)

        # An original token by its place in the baseline, an inserted one by −1 − its place in the
        # sequence.
        places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        positions = torch.where(batch.origin >= 0, batch.origin, -1 - places)

        with_targets = []
        for (_, order), of_condition in rows.items():
            # The rows of a condition have the same interventions.
            first_row = of_condition[0]
            intervention = batch.interventions[first_row][order]

            index = torch.tensor(of_condition, device=batch.tokens.device)
            ids = tuple(self.prompt_ids[batch.rows[row][0]] for row in of_condition)
            target = Target(index, ids, positions[index], batch.segment[index])
            with_targets.append((intervention, target))

        return with_targets
