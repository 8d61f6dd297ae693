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
from mechattn.results.provenance import identity
from mechattn.results.result import Result
from mechattn.store.atomic_writes import write_whole

UNTRAINED_PROMPTS = 8  # of the prompts, for each draw of untrained weights
FIRST_DRAW = 1000  # the seed of the first draw: far from the seeds that a user takes
PAGE_RUN = "first"  # the run whose result the page shows


@dataclass(frozen=True)
class Settings:
    """What decides the numbers, beside the statements and the model.

    Args:
        prompts: The prompts whose attention is measured.
        problems: The problems to be answered; none to leave answers out.
        draws: The number of draws of untrained weights.
        new_tokens: The length of an answer, in tokens, at most.
        seed: The seed of conditions, answers and untrained weights.
        dtype: The numbers in which the model is run, such as "float32".
        device: Where it is run; by default TransformerLens's choice.
        folder: Where runs are stored.
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
    """What was measured for statements, by their keys, as it is stored in the file of a run.

    Args:
        values: One value a prompt.
        reasons: Why there are none.
    """

    values: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass
class ModelRuns:
    """All runs of one model; the model is loaded when the first run is not stored yet.

    Args:
        name: The model, as ``load_model`` takes it.
        file_name: What the names of its files begin with.
        statements: The statements to measure.
        settings: What else decides the numbers.
    """

    name: str
    file_name: str
    statements: Statements
    settings: Settings
    # A model with untrained weights by its draw; one at a time, as each takes the model's memory.
    untrained: dict[int, HookedModel] = field(default_factory=dict, init=False)

    @cached_property
    def model(self) -> HookedModel:
        """The hooked model."""
        dtype = dtype_named(self.settings.dtype)
        return load_model(self.name, dtype=dtype, device=self.settings.device)

    @cached_property
    def arm(self) -> ARM | None:
        """ARM with the values published for the model's family; None if there are none."""
        family = architecture_named(self.name).partition("For")[0]
        for arm in self.statements.arms:
            if arm.family == family:
                return ARM(form=arm.form, c=arm.c, p1=arm.p1)
        return None

    @cached_property
    def weights_hash(self) -> str | None:
        """What identifies the weights before they are loaded."""
        return stored_hash(self.name)

    def cells(self) -> dict[str, Cell]:
        """The cell of every statement, by its key."""
        measured = self.all_values()
        untrained = [self.all_values(draw) for draw in range(self.settings.draws)]
        cells = self._answer_cells()
        for key, reason in measured.reasons.items():
            cells[key] = Cell(NOT_MEASURABLE, note=reason)

        for statement in self.statements.statements:
            if statement.key not in measured.values:
                continue
            values_of_draws = [draw.values.get(statement.key) for draw in untrained]
            means = [sum(values) / len(values) for values in values_of_draws if values is not None]
            values = measured.values[statement.key]
            cells[statement.key] = measured_cell(statement, values, means)
        return cells

    def all_values(self, draw: int | None = None) -> RunValues:
        """What all runs measured; with a draw, of untrained weights."""
        measured = RunValues()
        for run_name in RUNS:
            run_values = self.run_values(run_name, draw)
            measured.values |= run_values.values
            measured.reasons |= run_values.reasons

        self.untrained.clear()  # frees its memory
        return measured

    def run_values(self, run_name: str, draw: int | None = None) -> RunValues:
        """What one run measured, from its file if it is stored; with a draw, of untrained
        weights.

        Args:
            run_name: The run, one of ``RUNS``.
            draw: The number of a draw of untrained weights; None for the model's own.

        Raises:
            MechattnError: The first run is refused, so that there is nothing to compare.
        """
        path = self._values_file(run_name, draw)
        is_on_the_page = run_name == PAGE_RUN and draw is None
        if path.exists() and (self.result_place.exists() or not is_on_the_page):
            return RunValues(**json.loads(path.read_text(encoding="utf-8")))

        words = f"{self.name}: {RUNS[run_name].words}"
        if draw is not None:
            words += f", untrained weights {draw + 1}"
        say(words)
        statements = self._of_run(run_name)
        try:
            result = self._result(run_name, draw)
        except (ModelError, OptionError) as error:
            if is_on_the_page:
                raise  # a model without received attention has nothing to compare
            return RunValues(reasons={statement.key: str(error) for statement in statements})
        if is_on_the_page:
            result.save(self.result_place)

        measured = RunValues()
        for statement in statements:
            try:
                values = value_of(result, statement.function, statement)
            except NotMeasurable as error:
                measured.reasons[statement.key] = str(error)
            else:
                measured.values[statement.key] = values.tolist()

        text = json.dumps(asdict(measured), indent=1)
        write_whole(path, lambda new: new.write_text(text, encoding="utf-8"))
        return measured

    @property
    def result_place(self) -> Path:
        """Where the result is stored that the page shows."""
        return self._values_file(PAGE_RUN).with_suffix(".zarr")

    def _answer_cells(self) -> dict[str, Cell]:
        """The cells of the statements about accuracy, from answers that the model generates."""
        statements = self._of_run(ANSWERS)
        problems = self.settings.problems
        if not problems:
            unanswered = Cell(NOT_MEASURABLE, note="no problem was answered (problems, --problems)")
            return {statement.key: unanswered for statement in statements}

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
        architecture = architecture_named(self.name)
        without_arm = (
            f"ARM is published for the families {families}, and this model is {architecture}"
        )
        cells = {}
        for statement in statements:
            if statement.condition in evaluation.conditions:
                cells[statement.key] = accuracy_cell(statement, evaluation)
            else:
                cells[statement.key] = Cell(NOT_MEASURABLE, note=without_arm)
        return cells

    def _of_run(self, run_name: str) -> list[Statement]:
        """The statements that are measured in a run."""
        return [statement for statement in self.statements.statements if statement.run == run_name]

    def _result(self, run_name: str, draw: int | None) -> Result:
        """Run the model, or a draw of untrained weights on fewer prompts."""
        planned = RUNS[run_name]
        model = self.model
        prompts = self.settings.prompts

        if draw is not None:
            if draw not in self.untrained:
                seed = FIRST_DRAW * (1 + self.settings.seed) + draw
                self.untrained = {draw: random_weights(self.model, seed=seed)}
            model = self.untrained[draw]
            prompts = prompts[:UNTRAINED_PROMPTS]

        layers = None
        if planned.first_layers is not None:
            layers = range(min(planned.first_layers, model.cfg.n_layers))
        return run(
            model,
            prompts,
            conditions_for(model, planned.conditions, self.arm),
            planned.analyses,
            layers=layers,
            seed=self.settings.seed,
            keep=planned.keep,
        )

    def _values_file(self, run_name: str, draw: int | None = None) -> Path:
        """The file of a run, which is named after everything that decides its numbers."""
        planned = RUNS[run_name]
        decides = [
            [field.name for field in fields(RunValues)],  # the form of the file
            self.name,
            self.weights_hash,
            identity(planned),
            [statement.model_dump() for statement in self._of_run(run_name)],
            provenance.digest(self.settings.prompts),
            self.settings.seed,
            self.settings.dtype,
            provenance.versions(),
        ]
        digest = provenance.digest(decides)[:8]
        name = f"{self.file_name}-{run_name}"
        if draw is not None:
            name += f"-untrained-{draw}"
        return self.settings.folder / f"{name}-{digest}.json"
