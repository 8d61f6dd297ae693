"""Measures one model for all statements; each run is stored as soon as it is done, and is not
repeated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path

from mechattn.engine.run import run
from mechattn.errors import ModelError, OptionError, say
from mechattn.evaluation.evaluate import evaluate
from mechattn.interventions.arm import ARM
from mechattn.model.checkpoint import architecture_named
from mechattn.model.hooked import HookedModel
from mechattn.model.load import dtype_named, load_model
from mechattn.model.random_weights import random_weights
from mechattn.model.weights import stored_hash
from mechattn.prompts.prompt import Prompt
from mechattn.published.comparison import NOT_MEASURABLE, Cell, accuracy_cell, measured_cell
from mechattn.published.runs import ANSWERS, CONDITIONS, RUNS, conditions_for
from mechattn.published.statements import Statement, Statements
from mechattn.published.values import NotMeasurable, value_of
from mechattn.results import provenance
from mechattn.results.result import Result
from mechattn.store.atomic_writes import write_text

# The number of prompts for each draw of untrained weights. Few suffice, since the page shows only
# the range of the draws.
UNTRAINED_PROMPTS = 8
FIRST_DRAW = 1000  # the first draw's seed if ``seed`` is 0; far from the seeds that users choose
PAGE_RUN = "first"  # the run whose result the page shows


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement, apart from the statements and the model.

    Args:
        prompts: The prompts on which attention is measured.
        problems: The problems to be answered; an empty sequence leaves answers out.
        draws: The number of draws of untrained weights.
        new_tokens: The longest answer, in tokens.
        seed: The seed of conditions, answers and untrained weights.
        dtype: The dtype of the model, such as "float32".
        device: The torch device; None for TransformerLens's choice.
        folder: The folder in which runs are stored.
    """

    prompts: Sequence[Prompt]
    problems: Sequence[Prompt]
    draws: int
    new_tokens: int
    seed: int
    dtype: str
    device: str | None
    folder: Path


@dataclass
class RunValues:
    """The content of a run's file: what was measured for each statement, by its key.

    Args:
        values: One value per prompt, for each statement that could be measured.
        reasons: Why there are no values, for each of the others.
    """

    values: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass
class ModelRuns:
    """All runs of one model. It is loaded when a run is not stored yet, or to answer problems.

    Args:
        name: The model, as ``load_model`` takes it.
        file_name: The start of the names of its files.
        statements: The statements to measure.
        settings: The other settings of the measurement.
    """

    name: str
    file_name: str
    statements: Statements
    settings: Settings
    # The last draw of untrained weights and its model. No other is kept, since each takes the memory
    # of a model.
    untrained: tuple[int, HookedModel] | None = field(default=None, init=False)

    @cached_property
    def model(self) -> HookedModel:
        """The hooked model."""
        dtype = dtype_named(self.settings.dtype)
        return load_model(self.name, dtype=dtype, device=self.settings.device)

    @cached_property
    def arm(self) -> ARM | None:
        """ARM with the hyperparameters published for the model's family; None if there are none."""
        family = architecture_named(self.name).partition("For")[0]  # as in "LlamaForCausalLM"
        for arm in self.statements.arms:
            if arm.family == family:
                return ARM(form=arm.form, c=arm.c, p1=arm.p1)
        return None

    @cached_property
    def weights_hash(self) -> str | None:
        """What identifies the stored weights; None for a toy (``stored_hash``)."""
        return stored_hash(self.name)

    def cells(self) -> dict[str, Cell]:
        """The cell of every statement, by its key."""
        own_weights = self.all_values()
        untrained_weights = [self.all_values(draw) for draw in range(self.settings.draws)]
        cells = self._answer_cells()

        for statement in self.statements.statements:
            key = statement.key
            if key in own_weights.reasons:
                cells[key] = Cell(NOT_MEASURABLE, statement.unit, note=own_weights.reasons[key])
            elif key in own_weights.values:
                untrained_means = []
                for draw_values in untrained_weights:
                    if key in draw_values.values:
                        values = draw_values.values[key]
                        untrained_means.append(sum(values) / len(values))
                own_values = own_weights.values[key]
                cells[key] = measured_cell(statement, own_values, untrained_means)
        return cells

    def all_values(self, draw: int | None = None) -> RunValues:
        """What all runs measure, with the model's weights or with a draw of untrained weights."""
        all_runs = RunValues()
        for run_name in RUNS:
            run_values = self.run_values(run_name, draw)
            all_runs.values |= run_values.values
            all_runs.reasons |= run_values.reasons

        self.untrained = None  # frees its memory
        return all_runs

    def run_values(self, run_name: str, draw: int | None = None) -> RunValues:
        """What one run measures, from its file if it is stored.

        Args:
            run_name: The run, one of ``RUNS``.
            draw: The number of a draw of untrained weights; None for the model's own weights.

        Raises:
            MechattnError: The run for the page is refused with the model's own weights, or the
                prompts do not fit the model. If the model or an option is refused in another run,
                its values have reasons instead.
        """
        path = self._values_file(run_name, draw)
        is_page_run = run_name == PAGE_RUN and draw is None
        if path.exists() and (self.result_place.exists() or not is_page_run):
            return RunValues(**json.loads(path.read_text(encoding="utf-8")))

        message = f"{self.name}: {RUNS[run_name].words}"
        if draw is not None:
            message += f", untrained weights {draw + 1}"
        say(message)
        statements = self._of_run(run_name)
        try:
            result = self._result(run_name, draw)
        except (ModelError, OptionError) as error:
            if is_page_run:
                raise  # a model without received attention has nothing to compare
            return RunValues(reasons={statement.key: str(error) for statement in statements})
        if is_page_run:
            result.save(self.result_place)

        run_values = RunValues()
        for statement in statements:
            try:
                values = value_of(result, statement.function, statement)
            except NotMeasurable as error:
                run_values.reasons[statement.key] = str(error)
            else:
                run_values.values[statement.key] = values.tolist()

        write_text(path, json.dumps(asdict(run_values), indent=1))
        return run_values

    @property
    def result_place(self) -> Path:
        """The place where the result that the page shows is stored."""
        return self._values_file(PAGE_RUN).with_suffix(".zarr")

    def _answer_cells(self) -> dict[str, Cell]:
        """The cells of the statements about accuracy, from answers that the model generates."""
        statements = self._of_run(ANSWERS)
        problems = self.settings.problems
        if not problems:
            note = "no problem was answered (problems, --problems)"
            return {
                statement.key: Cell(NOT_MEASURABLE, statement.unit, note=note)
                for statement in statements
            }

        say(f"{self.name}: answers to {len(problems)} problems")
        evaluation = evaluate(
            self.model,
            problems,
            conditions_for(self.model, CONDITIONS, self.arm),
            out=self.settings.folder / f"{self.file_name}-answers.jsonl",
            seed=self.settings.seed,
            new_tokens=self.settings.new_tokens,
        )

        families = ", ".join(arm.family for arm in self.statements.arms)
        note_without_arm = (
            f"ARM is published for the families {families}, and this model is"
            f" {architecture_named(self.name)}"
        )
        cells = {}
        for statement in statements:
            if statement.condition in evaluation.conditions:
                cells[statement.key] = accuracy_cell(statement, evaluation)
            else:
                cells[statement.key] = Cell(NOT_MEASURABLE, statement.unit, note=note_without_arm)
        return cells

    def _of_run(self, run_name: str) -> list[Statement]:
        """The statements that this run measures."""
        return [statement for statement in self.statements.statements if statement.run == run_name]

    def _result(self, run_name: str, draw: int | None) -> Result:
        """The result of a run; with a draw, of untrained weights on the first prompts."""
        planned_run = RUNS[run_name]
        model = self.model
        prompts = self.settings.prompts

        if draw is not None:
            if self.untrained is None or self.untrained[0] != draw:
                seed = FIRST_DRAW * (1 + self.settings.seed) + draw
                self.untrained = (draw, random_weights(self.model, seed=seed))
            _, model = self.untrained
            prompts = prompts[:UNTRAINED_PROMPTS]

        layers = None
        if planned_run.first_layers is not None:
            layers = range(min(planned_run.first_layers, model.cfg.n_layers))
        return run(
            model,
            prompts,
            conditions_for(model, planned_run.conditions, self.arm),
            planned_run.analyses,
            layers=layers,
            seed=self.settings.seed,
            keep=planned_run.keep,
        )

    def _values_file(self, run_name: str, draw: int | None = None) -> Path:
        """The file of a run, whose name contains a hash of everything that decides its numbers.

        Only the device is left out, since it changes no more than rounding.
        """
        hashed_values = [
            [value_field.name for value_field in fields(RunValues)],  # the form of the file
            self.name,
            self.weights_hash,
            provenance.identity(RUNS[run_name]),
            [statement.model_dump() for statement in self._of_run(run_name)],
            provenance.digest(self.settings.prompts),
            self.settings.seed,
            self.settings.dtype,
            provenance.versions(),
        ]
        digest = provenance.digest(hashed_values)[:8]
        name = f"{self.file_name}-{run_name}"
        if draw is not None:
            name += f"-untrained-{draw}"
        return self.settings.folder / f"{name}-{digest}.json"
