"""Whatever a config, a file of prompts or a stored result holds: a MechattnError, or what was asked for; no traceback."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mechattn as ma
from mechattn.commands.from_config import ANALYSES, CONDITIONS, INTERVENTIONS, build_conditions
from mechattn.commands.run_config import DRAW_FUNCTIONS, read_config
from mechattn.errors import MechattnError
from mechattn.results.arrays import datasets_digest
from mechattn.toml_sections import Config

fuzz = settings(settings.get_profile("fuzz"))
TEXT = st.text(max_size=12)
KINDS = [*CONDITIONS, *ANALYSES, *DRAW_FUNCTIONS, *INTERVENTIONS]
KEYS = [
    *Config.model_fields, "source", "limit", "template", "result", "page", "heads", "kind", "count", "place", "masked",
    "intervention", "slash", "condition", "quantity", "segment", "p1", "layers", "value", "queries", "samples",
]  # fmt: skip
WORDS = [
    "toy:llama",
    "word-problems",
    "r.zarr",
    "{model}.zarr",
    "p.html",
    "plain",
    "auto",
    "ray",
    "2GiB",
    "/",
    "baseline",
]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), TEXT, st.sampled_from(WORDS),
    st.sampled_from(KINDS),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | TEXT, inner, max_size=3)
    ),
    max_leaves=6,
)
GOOD = {
    "model": "toy:llama",
    "prompts": {"source": "word-problems", "limit": 4},
    "conditions": {
        "slash": {"kind": "MeaninglessTokens", "count": [1, 2]},
        "arm": {"kind": "Baseline", "intervention": {}},
    },
    "analyses": [
        {"kind": "ReceivedAttention", "queries": "all"},
        {"kind": "MlpActivations", "value": 0.25},
    ],
    "figures": [{"kind": "change_map", "condition": "arm"}],
    "output": {"result": "r.zarr", "page": "p.html", "heads": 3},
}


def toml(value):
    """A value as TOML; None as an empty text, for TOML has none."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # also nan and inf
    return json.dumps("" if value is None else value)


def places(value, path=()):
    """Every place in a nested value."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(value, path, to):
    if not path:
        return to
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], to)
    return copy


@st.composite
def configs(draw):
    """A good config with some of its places holding something else, and some keys more."""
    made = GOOD
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(list(places(made))[1:] or [()]))
        made = changed(made, path, draw(VALUES)) if path else made
        if not isinstance(made, dict):
            break
    extra = draw(st.dictionaries(st.sampled_from(KEYS) | TEXT, VALUES, max_size=2))
    return "\n".join(
        f"{json.dumps(key)} = {toml(value)}" for key, value in {**made, **extra}.items()
    )


@st.composite
def damaged(draw, content):
    """Bytes with some changed, lost, repeated or put in."""
    made = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(made) - 1, 0)))
        kind = draw(st.sampled_from(["flip", "cut", "put", "drop", "digit"]))
        if kind == "flip" and made:
            made[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del made[at:]
        elif kind == "put":
            made[at:at] = draw(st.binary(min_size=1, max_size=4))
        elif kind == "drop":
            del made[at : at + draw(st.integers(1, 40))]
        else:
            made[at : at + 1] = str(draw(st.integers(0, 9))).encode()
    return bytes(made)


def refused_or(function, *arguments, **options):
    """What it gives, or None where it refuses in words; anything else is raised."""
    try:
        return function(*arguments, **options)
    except MechattnError:
        return None


def test_the_net_has_no_hole():  # negative control
    with pytest.raises(ZeroDivisionError):
        refused_or(lambda: 1 / 0)
    assert refused_or(read_config, "nowhere.toml") is None


@fuzz
@given(
    text=configs()
    | damaged("\n".join(f"{k} = {toml(v)}" for k, v in GOOD.items()).encode())
    | st.text()
    | st.binary()
)
def test_configs(text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "config.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    config = refused_or(read_config, path)
    if config is not None:
        assert config.models
        build_conditions(config.conditions)


def test_the_good_config_is_read(tmp_path):  # negative control: not everything is refused
    (tmp_path / "c.toml").write_text("\n".join(f"{k} = {toml(v)}" for k, v in GOOD.items()))
    conditions = build_conditions(read_config(tmp_path / "c.toml").conditions)
    assert list(conditions) == ["slash, count=1", "slash, count=2", "arm"]


LINE = st.one_of(
    st.builds(lambda q: json.dumps(q).encode(), st.dictionaries(st.sampled_from(["question", "answer", "x"]) | TEXT, VALUES, max_size=4)),
    st.builds(lambda q: json.dumps({"question": q}).encode(), st.text()),
    st.builds(lambda q: json.dumps({"question": q}, ensure_ascii=False).encode("utf-8", "surrogatepass"), st.text()),
    damaged(b'{"question": "Tom has 3 apples.", "answer": "\\ud83c\\udf4e 3"}'),
    st.binary(max_size=40),
    st.builds(lambda n, c: c * n, st.integers(0, 3000), st.sampled_from([b"[", b"{", b'{"a":', b"9", b" "])),
)  # fmt: skip


@fuzz
@given(
    lines=st.lists(LINE, max_size=4),
    end=st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
    answer=st.booleans(),
)
def test_files_of_prompts(lines, end, answer, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "p.jsonl"
    path.write_bytes(end.join(lines))
    prompts = refused_or(ma.load_prompts, str(path), with_answer=answer)
    for prompt in prompts or []:
        assert prompt.question.strip()
        prompt.question.encode("utf-8")


@pytest.fixture(scope="module")
def small(toy):
    """A result of a text with other letters, so small that much of it is tried."""
    prompts = ["Tom has 3 apples.", "Ann has é."]
    return ma.run(toy, prompts, {"slash": ma.MeaninglessTokens("/", 2)}, layers=[0])


def test_stored_results(small, tmp_path):
    path = tmp_path / "r.zarr"
    small.save(path)
    files = {p: p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}

    @fuzz
    @given(data=st.data())
    def each(data):
        target = data.draw(st.sampled_from(list(files)))
        kind = data.draw(st.sampled_from(["bytes", "bytes", "json", "lost"]))
        if kind == "lost":
            target.unlink()
        elif kind == "json" and target.suffix == ".json":
            found = json.loads(files[target])
            at = data.draw(st.sampled_from(list(places(found))))
            target.write_text(json.dumps(changed(found, at, data.draw(VALUES))))
        else:
            target.write_bytes(data.draw(damaged(files[target])))
        loaded = refused_or(ma.load_result, path)
        target.write_bytes(files[target])
        assert loaded is None or datasets_digest(loaded.datasets) == datasets_digest(small.datasets)

    each()
    assert datasets_digest(ma.load_result(path).datasets) == datasets_digest(small.datasets)
