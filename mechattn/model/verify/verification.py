"""The parts of a verification: its probe, its tolerances and its report, which has a line for each
check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.errors import ModelError, OptionError
from mechattn.markup import table
from mechattn.model import hooks
from mechattn.model.hooked import HookedModel

# Lengths of the probe in tokens. Two passes over 8 tokens take little time compared with loading.
AT_LOADING = 8
PROBE = 24  # in ``verify_model``
LONGEST_PROBE = 136  # it may be lengthened to this, to go 8 tokens beyond a window of 128
ANOTHER_VERSION = "try another version of transformers or transformer-lens, or report it"

Logits = Float[Tensor, "pos d_vocab"]
Pairs = dict[Any, tuple[Tensor, Tensor]]  # by layer, the values at the hooks and those expected
Outcome = Literal["passed", "failed", "limited", "not checked"]

# The largest allowed differences, in units of the root mean square of the expected values. For
# logits, the difference is a root mean square at the worst position; for activations, it is that of
# the worst entry. The largest seen on 30 architectures with random weights and a toy were 1e-5 and
# 3e-6 in float32, 1e-2 and 5e-3 in float16, and 1e-1 and 3e-2 in bfloat16.
LOGIT_TOLERANCE = {
    torch.float64: 1e-4,  # norms and softmax are computed in float32 all the same
    torch.float32: 1e-3,
    torch.float16: 3e-2,
    torch.bfloat16: 2.5e-1,
}
ACTIVATION_TOLERANCE = {
    torch.float64: 2e-5,
    torch.float32: 2e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1.5e-1,
}
_LEAST_UNIT = 1e-12  # the unit if the root mean square is 0, so that it can be divided by
COLUMNS = ["check", "outcome", "difference", "tolerance", "compared"]


def what_to_try(dtype: torch.dtype) -> str:
    """The advice after a difference that, in half precision, may be due to rounding alone."""
    if dtype.itemsize > 2:
        return ANOTHER_VERSION
    return (
        "in half precision, rounding alone can do this where attention scores are large, as in"
        " Qwen2.5: load the model with dtype=torch.float32. If it differs there too,"
        f" {ANOTHER_VERSION}"
    )


@dataclass(frozen=True)
class Check:
    """One check of a verification.

    Args:
        name: The name of the check.
        outcome: "passed"; "failed" makes the model unusable; "limited" excludes the analyses that
            need this check; "not checked" if there was nothing to compare with.
        layer: The layer with the largest difference, if a layer failed.
        hooked: After a failure, the hooked model's number at the largest difference.
        expected: After a failure, the expected number at the largest difference.
        difference: The largest difference, in the unit of the tolerance.
        tolerance: The largest allowed difference.
        detail: What was compared, or why nothing could be compared.
        remedy: What to do after a failure.
        gate: If z is the mixed values times a gate, the name of the gate's function. None if layers
            have different ones.
    """

    name: str
    outcome: Outcome
    layer: int | None = None
    hooked: float | None = None
    expected: float | None = None
    difference: float | None = None
    tolerance: float | None = None
    detail: str = ""
    remedy: str = ""
    gate: str | None = None

    @property
    def printed_difference(self) -> str:
        """The difference as printed.

        If the check passed it is "within", because the number is due to rounding and depends on the
        CPU.
        """
        if self.outcome == "passed" and self.difference is not None:
            return "within"
        return _number(self.difference)

    def __str__(self) -> str:
        outcome = f"{self.name} {self.outcome}"
        if self.layer is not None:
            outcome += f" in layer {self.layer}"
        if self.hooked is not None and self.expected is not None:
            outcome += (
                f": {self.hooked:.5g} where {self.expected:.5g} is expected,"
                f" {self.printed_difference} apart (tolerance {self.tolerance:.2g})"
            )

        return ". ".join(filter(None, (outcome, self.detail, self.remedy)))


@dataclass(frozen=True)
class Report:
    """The report of a verification of a hooked model. It prints as a table."""

    model: str  # its name
    architecture: str
    dtype: str
    versions: str  # of transformer-lens and transformers
    checks: tuple[Check, ...]
    mended: tuple[str, ...] = ()  # the faults of the hooked model that were corrected, in words
    probe_length: int = AT_LOADING  # in tokens

    @property
    def passed(self) -> bool:
        """Whether no check failed. A check that is limited or was not made has not failed."""
        return not self._failures

    @property
    def not_checked(self) -> list[str]:
        """The checks that could not be made."""
        return [check.name for check in self.checks if check.outcome == "not checked"]

    @property
    def limited(self) -> dict[str, str]:
        """The checks that exclude some analyses of this model, with the reasons."""
        return {check.name: check.detail for check in self.checks if check.outcome == "limited"}

    def __getitem__(self, name: str) -> Check:
        for check in self.checks:
            if check.name == name:
                return check
        names = ", ".join(check.name for check in self.checks)
        raise OptionError(f"the report has no check {name!r}; it has {names}")

    def require(self) -> None:
        """Refuse a model with a failed check.

        Raises:
            ModelError: A check failed. The message lists the failed checks with their layers,
                numbers, tolerances and remedies.
        """
        if not self.passed:
            lines = "\n  ".join(self._failures)
            raise ModelError(
                f"{self.model} as hooked is not the model itself:\n  {lines}\nload_model(…,"
                " verify=False) loads it anyway; every result then records verified: false"
            )

    @property
    def _heading_lines(self) -> list[str]:
        """A line with the model and the verdict, and one for each corrected fault."""
        verdict = "passed" if self.passed else "FAILED"
        first_line = f"{self.model} ({self.architecture}, {self.dtype}; {self.versions}): {verdict}"
        return [first_line, *(f"mended: {fault}" for fault in self.mended)]

    @property
    def _table_rows(self) -> list[list[str]]:
        """The cells of each check, in the order of ``COLUMNS``."""
        return [
            [
                check.name,
                check.outcome,
                check.printed_difference,
                _number(check.tolerance),
                check.detail,
            ]
            for check in self.checks
        ]

    @property
    def _failures(self) -> list[str]:
        """A sentence for each failed check."""
        return [str(check) for check in self.checks if check.outcome == "failed"]

    def _repr_html_(self) -> str:
        caption = "; ".join([*self._heading_lines, *self._failures])
        return table(self._table_rows, caption, COLUMNS)

    def __str__(self) -> str:
        rows = [COLUMNS, *self._table_rows]
        columns = zip(*rows, strict=True)
        widths = [max(map(len, column)) for column in columns]
        widths[-1] = 0  # the last column is long, and needs no padding
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells))
        return "\n".join([*self._heading_lines, *lines, *self._failures])


def root_mean_square(values: Float[Tensor, ...]) -> float:
    """``√(mean of the squares)``."""
    return float(values.square().mean().sqrt())


def compare(
    name: str,
    pairs: Pairs,
    tolerance: float,
    detail: str,
    remedy: str = "",
    unit: float | None = None,
    summary: Callable[[Tensor], Any] = torch.max,
) -> Check:
    """Check that the values at the hooks differ from those expected by at most the tolerance.

    Differences are absolute. The outcome is "not checked" if there are no pairs.

    Args:
        name: The name of the check.
        pairs: By layer, the values at the hooks and those expected.
        tolerance: The largest allowed difference.
        detail: What is compared.
        remedy: What to do if they differ.
        unit: Differences are divided by this; by default by the root mean square of the layer's
            expected values.
        summary: From the differences of a layer's entries to the layer's difference; by default the
            largest counts.

    Returns:
        A check with the layer of the largest difference, and the numbers at its worst entry, if it
        failed.
    """
    if not pairs:
        return Check(name, "not checked", detail=f"{detail}: its hooks do not fire in any layer")

    entry_differences = {}
    layer_differences = {}
    for layer, (hooked, expected) in pairs.items():
        layer_unit = unit
        if layer_unit is None:
            layer_unit = max(root_mean_square(expected), _LEAST_UNIT)
        differences = (hooked - expected).abs() / layer_unit
        # NaN counts as an infinite difference, so it fails.
        entry_differences[layer] = differences.nan_to_num(nan=torch.inf)
        layer_differences[layer] = float(summary(entry_differences[layer]))

    worst_layer = max(layer_differences, key=layer_differences.__getitem__)
    largest = layer_differences[worst_layer]
    if largest <= tolerance:
        return Check(name, "passed", difference=largest, tolerance=tolerance, detail=detail)

    hooked, expected = pairs[worst_layer]
    worst_entry = int(entry_differences[worst_layer].argmax())
    return Check(
        name,
        "failed",
        layer=worst_layer,
        hooked=float(hooked.flatten()[worst_entry]),
        expected=float(expected.flatten()[worst_entry]),
        difference=largest,
        tolerance=tolerance,
        detail=detail,
        remedy=remedy,
    )


def compare_positions(
    name: str, hooked: Logits, expected: Logits, tolerance: float, detail: str, remedy: str = ""
) -> Check:
    """Check that the logits differ by at most the tolerance at every position.

    A position's difference is a root mean square, in units of that of all expected logits.
    """
    # A constant that is added to all logits of a position changes no probability. Centred
    # unembeddings add one.
    centred_hooked = hooked - hooked.mean(-1, keepdim=True)
    centred_expected = expected - expected.mean(-1, keepdim=True)
    unit = max(root_mean_square(centred_expected), _LEAST_UNIT)

    # Positions take the place of layers.
    pairs = dict(enumerate(zip(centred_hooked, centred_expected, strict=True)))
    check = compare(name, pairs, tolerance, detail, remedy, unit=unit, summary=root_mean_square)
    return replace(check, layer=None)


def as_limited(check: Check, detail: str) -> Check:
    """The same check; if it failed, it becomes "limited" and gets this detail."""
    if check.outcome != "failed":
        return check
    return replace(check, outcome="limited", detail=detail, remedy="")


def dtype_of(model: HookedModel) -> torch.dtype:
    """The dtype among a model's weights that has the widest tolerance."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    known_dtypes = dtypes & LOGIT_TOLERANCE.keys()  # quantised weights may be integers
    return max(known_dtypes, key=LOGIT_TOLERANCE.__getitem__, default=torch.float32)


def probe_tokens(model: HookedModel, length: int) -> Int[Tensor, "1 pos"]:
    """Random tokens that are not special, the same each time.

    The first is replaced by the BOS token if the model prepends one. There are more than ``length``
    if that is needed to reach beyond a window, and no more than the model's context.
    """
    probe_length = _probe_length(model, length)
    tokenizer = getattr(model, "tokenizer", None)
    vocab_size = model.cfg.d_vocab
    if tokenizer is not None:
        vocab_size = min(vocab_size, len(tokenizer))

    # More than needed, because special tokens are left out.
    drawn_count = 2 * max(probe_length, LONGEST_PROBE)
    generator = torch.Generator().manual_seed(0)
    drawn_tokens = torch.randint(vocab_size, (drawn_count,), generator=generator)
    special_tokens = set(getattr(tokenizer, "all_special_ids", ()))
    ordinary_tokens = [token for token in drawn_tokens.tolist() if token not in special_tokens]
    tokens = ordinary_tokens[:probe_length]

    bos = getattr(tokenizer, "bos_token_id", None)
    if getattr(model.cfg, "default_prepend_bos", False) and bos is not None:
        tokens[0] = bos
    return torch.tensor([tokens])


def _number(value: float | None) -> str:
    """A number with three digits; empty if there is none."""
    return "" if value is None else f"{value:.3g}"


def _probe_length(model: HookedModel, length: int) -> int:
    """The given length, or 8 more than the longest window that a probe can reach, within the
    model's context."""
    lengths = [length]
    for layer in hooks.attention_layers(model):
        window = hooks.attention_window(model, layer)
        if window is not None and window + 8 <= LONGEST_PROBE:
            lengths.append(window + 8)
    return min(max(lengths), int(model.cfg.n_ctx or LONGEST_PROBE))
