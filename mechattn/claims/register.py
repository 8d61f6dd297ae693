"""A register of claims: a TOML file with quotes, sources, what is run, measures by name, and rules."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections import Counter
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    AfterValidator,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from mechattn.claims import measures_heads, rules  # noqa: F401, the first fills the table of measures
from mechattn.claims.measures import MEASURES, Kind, Measure, measure_named
from mechattn.errors import OptionError
from mechattn.interventions.arm import ARM
from mechattn.jobs.from_config import ANALYSES, made_analyses, made_conditions
from mechattn.render.figure_declaration import FIGURES
from mechattn.toml_sections import AnalysisSection, Condition, Section, all_words, near, toml_values

SHIPPED = Path(__file__).parent / "registers"
PAPER = "2510.01032"
LONGEST_QUOTE = 25  # words


def _named(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ValueError(
            f"{name!r}: files are named after it, so use letters, digits, “-” and “_” alone"
        )
    return name


Name = Annotated[str, Field(min_length=1)]
FileName = Annotated[str, Field(max_length=80), AfterValidator(_named)]


class Named(Section):
    """What it is a register of.

    ``sources``: where quotes are from, by a short name. ``known``: the models whose numbers were known when the
    register was written, so that verdicts on them are exploratory. ``system``: the text before each question of a file
    or dataset, unless another one is given.
    """

    name: FileName
    title: Name
    says: str = ""
    known: list[str] = Field([])
    system: str = ""
    sources: dict[str, Name]


class Arm(Section):
    """Hyperparameters of ARM, for a model by name, else for an architecture, else for all others."""

    model: str | None = None
    architecture: str | None = None
    form: str
    c: float
    p1: float


class RunSection(Section):
    """Something that is run: the conditions beside the baseline, and analyses or answers."""

    says: str = ""
    conditions: list[str]
    analyses: list[AnalysisSection] = Field([])
    answers: bool = False
    sampled: bool = False  # several answers to each of two fifths of the problems
    layers: list[Annotated[int, Field(ge=0, le=1000)]] | None = None
    draws: Annotated[int, Field(ge=0, le=1000)] = 0  # models with random weights
    positions: Literal["prompts", "moments"] = "moments"
    prompts: Literal["problems", "word-problems", "recall", "repeated-random"] = (
        "problems"  # of the call, or generated
    )


class Less(Section):
    """What is subtracted: the same measure with other conditions or options, or another one."""

    measure: str | None = None
    conditions: list[str] | None = None
    options: dict[str, Any] | None = None


class Measuring(Section):
    """A measure by name, of some conditions, with options; ``less`` another one."""

    measure: str
    conditions: list[str] = Field([])
    options: dict[str, Any] = Field({})
    less: Less | None = None

    @property
    def of(self) -> Measure:
        """The measure of that name."""
        return measure_named(self.measure)

    @property
    def other(self) -> Measuring | None:
        """What is subtracted."""
        given = {"measure": self.measure, "conditions": self.conditions, "options": self.options}
        return Measuring(**given | self.less.model_dump(exclude_none=True)) if self.less else None

    @property
    def kind(self) -> Kind:
        """Its units; shares differ by points."""
        return "points" if self.less and self.of.kind == "share" else self.of.kind

    def __call__(self, evidence: Any) -> Any:
        """What it finds in a result or an evaluation."""
        found = self.of.of(evidence, *self.conditions, **self.options)
        return found if self.other is None else found - self.other(evidence)

    def attainable(self, evidence: Any) -> tuple[float, float]:
        """The smallest and the largest value that a model can show."""
        given = self.of.range
        low, high = (
            given(evidence, *self.conditions, **self.options)
            if callable(given)
            else given or (-inf, inf)
        )
        if self.other is None:
            return low, high
        least, most = self.other.attainable(evidence)
        return low - most, high - least


class Part(Measuring):
    """A measure and the rule that decides it; ``range`` holds the values it can take, where the measure has none.

    ``opposite``: the line beyond which the claim is contradicted, where it is another. ``gains``: the same by prompts
    and model, where something is published for them.
    """

    name: Name
    side: rules.Side
    line: float
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    opposite: float | None = None
    gains: dict[str, dict[str, float]] = Field({})
    range: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None

    def rule_of(self, model: str = "", prompts: str = "") -> rules.Rule:
        """The rule for a model and prompts, both by name."""
        sets = (gains for name, gains in self.gains.items() if _letters(name) in _letters(prompts))
        gains = {_letters(name): gain for name, gain in next(sets, {}).items()}
        opposite = gains.get(_letters(model.rpartition("/")[2]), self.opposite)
        return rules.Rule(
            self.side, self.line, self.margin, self.line if opposite is None else opposite
        )

    def attainable(self, evidence: Any) -> tuple[float, float]:
        """The smallest and the largest value that a model can show."""
        return (
            super().attainable(evidence) if self.range is None else (self.range[0], self.range[1])
        )


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


class Claim(Section):
    """One claim: what was said and where, how it is measured here, and what decides it.

    ``origin``: "stated" by the authors, read off a "figure" by an automatic caption, or "inferred" by us, which is no
    claim of theirs. ``identity``: holds by arithmetic, so it checks the library. ``compared``: whether both verdicts
    have to lie beyond random weights. ``exploratory``: what had been seen when the rule was fixed.
    """

    key: FileName
    title: Name
    quote: str = ""
    source: str = ""
    where: str = ""
    origin: Literal["stated", "figure", "inferred"]
    says: str = ""
    audited: bool = True
    of: str = ""
    published: str = ""
    needs: str
    null: str = ""
    compared: bool = True
    identity: bool = False
    exploratory: str = ""
    deviation: str = ""
    figure: str = ""
    control: Measuring | None = None
    parts: Annotated[list[Part], Field(min_length=1)]

    @model_validator(mode="after")
    def _sourced(self) -> Claim:
        words, theirs = len(self.quote.split()), self.origin != "inferred"
        if not theirs and not self.says:
            raise ValueError(
                f"{self.key}: an inferred claim is ours; say it in our words with says"
            )
        if theirs and not (self.quote and self.source and self.where):
            told = 'a claim of others needs a quote, its source and where; or origin = "inferred"'
            raise ValueError(f"{self.key}: {told}")
        if words > LONGEST_QUOTE:
            raise ValueError(
                f"{self.key}: the quote has {words} words; quote at most {LONGEST_QUOTE}"
            )
        return self


class Register(Section):
    """A register, read from a file."""

    about: Named = Field(alias="register")
    arms: list[Arm] = Field([])
    conditions: dict[str, Condition] = Field({})
    runs: Annotated[
        dict[FileName, RunSection], Field(min_length=1)
    ]  # in the order of their priority
    claims: Annotated[list[Claim], Field(min_length=1)]
    _path: Path = PrivateAttr(Path())

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the file."""
        return hashlib.sha256(self._path.read_bytes()).hexdigest()

    @cached_property
    def code(self) -> str:
        """The SHA-256 of the source that decides: rules, how they are applied, and every module with a measure."""
        modules = {
            sys.modules[one.__module__]
            for one in (Measure, *(measure.of for measure in MEASURES.values()))
        }
        texts = sorted(inspect.getsource(module) for module in (*modules, rules))
        return hashlib.sha256("".join(texts).encode()).hexdigest()


def read_register(place: str | Path) -> Register:
    """Read a register, a TOML file or one by name that mechattn ships, and check all that can be without a model."""
    shipped = {path.stem: path for path in SHIPPED.glob("*.toml")}
    path = shipped.get(str(place), Path(place))
    if path.suffix != ".toml":
        raise OptionError(
            f"{place} is no register: give a TOML file, or one of {', '.join(sorted(shipped))}"
        )
    try:
        register = Register.model_validate(toml_values(path, "register"))
        _check(register)
    except RecursionError:
        raise OptionError(f"{path} is nested too deeply") from None
    except ValidationError as error:
        raise OptionError(f"{path}: {all_words(error, Register)}") from None
    except OptionError as error:
        raise OptionError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    register._path = path
    return register


def _check(register: Register) -> None:
    if several := sorted(set(register.conditions) - set(made_conditions(register.conditions))):
        raise OptionError(
            f"conditions.{several[0]}: give one value for each option; a register has no sweeps"
        )
    for i, arm in enumerate(register.arms):
        try:
            ARM(form=arm.form, c=arm.c, p1=arm.p1)  # type: ignore[arg-type]
        except OptionError as error:
            raise OptionError(f"arms[{i}]: {error}") from None
    for name, run in register.runs.items():
        if run.answers == bool(run.analyses):
            raise OptionError(f"runs.{name}: give analyses, or answers = true")
        if run.answers and (run.draws or run.layers):
            raise OptionError(
                f"runs.{name}: random weights answer nothing, and answers have no layers: omit both"
            )
        made_analyses(run.analyses)
        _check_known(f"runs.{name}.conditions", run.conditions, register.conditions)
    if twice := [
        key for key, count in Counter(claim.key for claim in register.claims).items() if count > 1
    ]:
        raise OptionError(f"claims: the key {twice[0]!r} is given twice; give each claim its own")
    for claim in register.claims:
        where = f"claims.{claim.key}"
        _check_known(
            f"{where}.source", [claim.source] if claim.source else [], register.about.sources
        )
        _check_known(f"{where}.needs", [claim.needs], register.runs)
        drawn = [
            name for name, figure in FIGURES.items() if figure.report
        ]  # which choose what they show
        _check_known(
            f"{where}.figure", [claim.figure.partition(":")[0]] if claim.figure else [], drawn
        )
        for one in (*claim.parts, *filter(None, [claim.control])):
            for measuring in filter(None, (one, one.other)):
                _check_measure(where, measuring, register.runs[claim.needs])
        for part in claim.parts:
            _check_rule(f"{where}, part {part.name!r}", part)


def _check_measure(where: str, measuring: Measuring, run: RunSection) -> None:
    name, of = measuring.measure, None
    try:
        of = measuring.of.of
        inspect.signature(of).bind(None, *measuring.conditions, **measuring.options)
        hints = get_type_hints(of, include_extras=True)
        for option, value in measuring.options.items():
            TypeAdapter(hints[option]).validate_python(value, strict=True)
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from None
    except TypeError as error:
        takes = ", ".join(list(inspect.signature(of).parameters)[1:]) if of else ""
        said = f"{name} cannot be called like this: {error}; it takes {takes or 'nothing'}"
        raise OptionError(f"{where}: {said}") from None
    except ValidationError as error:
        raise OptionError(
            f"{where}: {name}, {option} = {value!r}: {error.errors()[0]['msg']}"
        ) from None
    have = (
        {"answers"} if run.answers else {ANALYSES[section.kind]().name for section in run.analyses}
    )
    if missing := [need for need in measuring.of.needs if need not in have]:
        raise OptionError(
            f"{where}: {name} takes {missing[0]}, which its run has not got ({', '.join(have)})"
        )
    _check_known(f"{where}.conditions", measuring.conditions, ["baseline", *run.conditions])


def _check_rule(where: str, part: Part) -> None:
    ranges = [part.range] if part.range else [one.of.range for one in (part, part.other) if one]
    if None in ranges and part.kind != "log-ratio":
        raise OptionError(
            f"{where} has no range: give the smallest and the largest value that it can take"
        )
    if any(map(callable, ranges)):
        return
    low, high = (part.range[0], part.range[1]) if part.range else part.attainable(None)
    gains = [gain for of_set in part.gains.values() for gain in of_set.values()]
    for line in (part.line, part.rule_of().opposite, *gains):
        if not isfinite(line) or not low < line < high:
            raise OptionError(
                f"{where}: the line {line} has to be a number within the range, {low} to {high}"
            )


def _check_known(where: str, names: list[str], known: Any) -> None:
    for name in names:
        if name not in known:
            raise OptionError(
                f"{where}: there is no {name!r}{near(name, known)}; there is {', '.join(known)}"
            )
