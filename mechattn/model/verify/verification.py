"""A verification: its probe, its tolerances, and its report, with one line per check, both figures and a remedy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.errors import ModelError, OptionError
from mechattn.markup import table
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import attention_layers, attention_window

AT_LOADING = 8  # tokens: two passes over so few cost little compared with loading the weights
PROBE = 24
ANOTHER_VERSION = "try another version of transformers or transformer-lens, or report it"
_LONGEST_PROBE = 136
Logits = Float[Tensor, "pos vocabulary"]
Pairs = dict[Any, tuple[Tensor, Tensor]]  # by layer: what the hooks show, and what is expected
Outcome = Literal["passed", "failed", "limited", "not checked"]
# Largest difference of logits (root mean square at the worst position) and of activations (worst entry), in root mean
# squares of what is compared. The largest seen on 30 architectures with random weights and a toy: float32 1e-5 and
# 3e-6, float16 1e-2 and 5e-3, bfloat16 1e-1 and 3e-2.
TOLERANCE = {
    torch.float64: (1e-4, 2e-5),  # norms and softmax are computed in float32 all the same
    torch.float32: (1e-3, 2e-4),
    torch.float16: (3e-2, 2e-2),
    torch.bfloat16: (2.5e-1, 1.5e-1),
}
PROBABILITY = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_COLUMNS = (
    "check",
    "outcome",
    "layer",
    "hooked",
    "expected",
    "difference",
    "tolerance",
    "compared",
)


@dataclass(frozen=True)
class Check:
    """One check of a verification, with both figures.

    A failed check shows the figures at the place of the largest difference. For a passed check that place depends on
    rounding, and so on the CPU. A passed check therefore shows the largest figure of the last layer or position, and
    prints its difference as "within" the tolerance.

    Args:
        name: The name of the check.
        outcome: The outcome; "failed" makes the model unusable, "limited" only the analyses that need this identity.
        layer: The layer of the figures; None for the model as a whole.
        hooked: The figure of the hooked model.
        expected: The expected figure.
        difference: The largest difference over everything compared, in units of the tolerance's scale.
        tolerance: The largest allowed difference.
        detail: What was compared, or why nothing could be.
        remedy: What to do about it.
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

    @property
    def apart(self) -> str:
        """The difference as printed: "within" the tolerance, or the number (exact if the tolerance is 0)."""
        return "within" if self.outcome == "passed" and self.tolerance else _number(self.difference)

    def __str__(self) -> str:
        said = f"{self.name} {self.outcome}" + (
            "" if self.layer is None else f" in layer {self.layer}"
        )
        if self.hooked is not None and self.expected is not None:
            within = (
                f"within {self.tolerance:.2g}",
                f"{self.apart} apart (tolerance {self.tolerance:.2g})",
            )
            said += f": {self.hooked:.5g} where {self.expected:.5g} is expected, {within[self.apart != 'within']}"
        return ". ".join([said, self.detail, *([self.remedy] if self.remedy else [])])


@dataclass(frozen=True)
class Report:
    """The report of a verification of a hooked model; prints as a table."""

    model: str
    architecture: str
    dtype: str
    versions: str
    checks: tuple[Check, ...]
    mended: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no check failed; limited and unmade checks don't count as failed."""
        return not any(check.outcome == "failed" for check in self.checks)

    @property
    def not_checked(self) -> list[str]:
        """The checks that could not be made."""
        return [check.name for check in self.checks if check.outcome == "not checked"]

    @property
    def limited(self) -> dict[str, str]:
        """The checks that limit analyses of this model, with reasons."""
        return {check.name: check.detail for check in self.checks if check.outcome == "limited"}

    def __getitem__(self, name: str) -> Check:
        for check in self.checks:
            if check.name == name:
                return check
        raise OptionError(
            f"the report has no check {name!r}; it has {', '.join(check.name for check in self.checks)}"
        )

    def require(self) -> None:
        """Refuse a model with a failed check.

        Raises:
            ModelError: Lists each failed check with its layer, both figures, tolerance and remedy.
        """
        failed = [check for check in self.checks if check.outcome == "failed"]
        if failed:
            said = "\n  ".join(map(str, failed))
            raise ModelError(
                f"{self.model} as hooked is not the model itself:\n  {said}\n"
                "load_model(…, verify=False) loads it anyway; every result then records verified: false"
            )

    @property
    def _rows(self) -> list[list[str]]:
        rows = []
        for check in self.checks:
            layer = "" if check.layer is None else str(check.layer)
            figures = (
                _number(check.hooked),
                _number(check.expected),
                check.apart,
                _number(check.tolerance),
            )
            rows.append([check.name, check.outcome, layer, *figures, check.detail])
        return rows

    @property
    def _head(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return f"{self.model} ({self.architecture}, {self.dtype}; {self.versions}): {verdict}"

    def _repr_html_(self) -> str:
        caption = "; ".join([self._head, *(f"mended: {text}" for text in self.mended)])
        remedies = [
            [check.name, "what to do", *[""] * 5, check.remedy]
            for check in self.checks
            if check.remedy
        ]
        return table([*self._rows, *remedies], caption, _COLUMNS)

    def __str__(self) -> str:
        rows = [list(_COLUMNS), *self._rows]
        widths = [max(len(row[column]) for row in rows) for column in range(7)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
            for row in rows
        ]
        remedies = [f"{check.name}: {check.remedy}" for check in self.checks if check.remedy]
        return "\n".join(
            [self._head, *(f"mended: {text}" for text in self.mended), *lines, *remedies]
        )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def compare(
    name: str,
    pairs: Pairs,
    tolerance: float,
    detail: str,
    remedy: str,
    scale: float = 0.0,
    overall: bool = False,
) -> Check:
    """The largest difference over layers; relative to the root mean square unless ``scale`` is given.

    With ``overall``, a layer's difference is the root mean square of its entries', not the largest of them.
    """
    if not pairs:
        return Check(name, "not checked", detail=f"{detail}: its hooks do not fire in any layer")
    apart = {layer: _distances(*pair, scale) for layer, pair in pairs.items()}
    sizes = {
        layer: float(each.square().mean().sqrt() if overall else each.max())
        for layer, each in apart.items()
    }
    worst = max(sizes, key=lambda layer: sizes[layer])
    difference = sizes[worst]
    layer = worst if difference > tolerance else list(pairs)[-1]
    made = Check(name, "passed", layer, None, None, difference, tolerance, detail, remedy)
    return _with_figures(made, *pairs[layer], apart[layer])


def compare_positions(
    name: str, hooked: Logits, expected: Logits, tolerance: float, detail: str, remedy: str
) -> Check:
    """The largest root mean square of a position's differences."""
    # A constant added to all logits of a position changes no probability (centred unembeddings add one).
    hooked, expected = (
        hooked - hooked.mean(-1, keepdim=True),
        expected - expected.mean(-1, keepdim=True),
    )
    apart = (hooked - expected).square().mean(
        -1
    ).sqrt() / expected.square().mean().sqrt().clamp_min(1e-12)
    apart = torch.nan_to_num(apart, nan=torch.inf)
    worst = int(apart.argmax())
    difference = float(apart[worst])
    row = worst if difference > tolerance else -1
    made = Check(name, "passed", None, None, None, difference, tolerance, detail, remedy)
    return _with_figures(
        made, hooked[row], expected[row], _distances(hooked[row], expected[row], 1.0)
    )


def _distances(
    hooked: Float[Tensor, ...], expected: Float[Tensor, ...], scale: float
) -> Float[Tensor, " entry"]:
    unit = scale or max(float(expected.square().mean().sqrt()), 1e-12)
    return torch.nan_to_num((hooked - expected).abs() / unit, nan=torch.inf).flatten()


def _with_figures(
    check: Check,
    hooked: Float[Tensor, ...],
    expected: Float[Tensor, ...],
    apart: Float[Tensor, " entry"],
) -> Check:
    """The check with one entry: the worst of a failure; of a pass the largest expected (equal ones look alike)."""
    failed = cast(float, check.difference) > cast(float, check.tolerance)
    entry = int(apart.argmax() if failed else expected.argmax())
    figures = replace(
        check, hooked=float(hooked.flatten()[entry]), expected=float(expected.flatten()[entry])
    )
    return replace(figures, outcome="failed") if failed else replace(figures, remedy="")


def limited(check: Check, detail: str) -> Check:
    """Make a failure of this check exclude only some analyses."""
    return (
        replace(check, outcome="limited", detail=detail, remedy="")
        if check.outcome == "failed"
        else check
    )


def dtype_of(model: HookedModel) -> torch.dtype:
    """The dtype among a model's weights with the widest tolerance."""
    kinds = {p.dtype for p in model.parameters() if p.dtype in TOLERANCE}
    return max(kinds, key=lambda kind: TOLERANCE[kind]) if kinds else torch.float32


def probe_tokens(model: HookedModel, length: int) -> Int[Tensor, "1 pos"]:
    """Random ordinary tokens, the same each time, after a BOS token if the model is used with one."""
    windows = [attention_window(model, layer) for layer in attention_layers(model)]
    short = [w + 8 for w in windows if w is not None and w + 8 <= _LONGEST_PROBE]
    length = min(max([length, *short]), int(model.cfg.n_ctx or _LONGEST_PROBE))
    tokenizer = getattr(model, "tokenizer", None)
    special = set(getattr(tokenizer, "all_special_ids", []) or [])
    size = (
        min(int(model.cfg.d_vocab), len(tokenizer))
        if tokenizer is not None
        else int(model.cfg.d_vocab)
    )
    drawn = torch.randint(
        size, (2 * max(length, _LONGEST_PROBE),), generator=torch.Generator().manual_seed(0)
    )
    ordinary = [token for token in drawn.tolist() if token not in special][:length]
    bos = getattr(tokenizer, "bos_token_id", None)
    if getattr(model.cfg, "default_prepend_bos", False) and bos is not None:
        ordinary[0] = bos
    return torch.tensor([ordinary])
