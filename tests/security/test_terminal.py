"""What stands in a name, a file or an error acts on no terminal; tried on a real one, a pseudo-terminal."""

import os
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout, suppress

import pytest
import typer

import mechattn as ma
from mechattn.commands.main import main
from mechattn.errors import MechattnError, OptionError, plain, shown, without_secrets

RED = "\x1b[31mred\x1b]0;title\x07"


def on_a_terminal(act):
    """What a function writes to a terminal of its own, both streams."""
    ours, its = os.openpty()
    written = []

    def read():
        with suppress(OSError):  # the other end is closed
            while text := os.read(ours, 65536):
                written.append(text)

    reader = threading.Thread(target=read)
    reader.start()
    with open(its, "w") as terminal, redirect_stdout(terminal), redirect_stderr(terminal):
        act()
    reader.join()
    os.close(ours)
    return b"".join(written).decode()


TRIED = [
    (["show", "r.zarr"], "\\x1b[31mred\\x1b]0;title\\x07"),
    (["show", f"no{RED}.zarr"], "no\\x1b[31mred"),
    (["run", "c.toml"], "mod\\x1b[31mel"),
    (["verify", f"no{RED}"], "\\x1b[31mred"),
    (["report", "r.zarr", "--out", "p.html"], "Open p.html"),
    (["merge", "m.zarr", "r.zarr", f"{RED}.zarr"], "\\x1b[31mred"),
]


@pytest.fixture(scope="module")
def hostile(small, tmp_path_factory):
    """A folder with a result whose condition and model are called by escape sequences, signed as mechattn signs."""
    folder = tmp_path_factory.mktemp("hostile")
    datasets = {
        name: dataset.assign_coords(condition=("condition", ["baseline", RED]))
        for name, dataset in small.datasets.items()
    }
    model = {**small.provenance["model"], "name": RED}
    ma.Result(datasets, {**small.provenance, "model": model}).save(folder / "r.zarr")
    (folder / "c.toml").write_text('"mod\\u001b[31mel" = 1\n', encoding="utf-8")
    return folder


def test_no_escape_sequence_reaches_the_terminal(hostile, monkeypatch, capfd):
    """One command after another; at last a name as it is, on which a terminal would act."""
    monkeypatch.chdir(hostile)

    def command():
        with pytest.raises(SystemExit):
            main()

    for arguments, shows in TRIED:
        monkeypatch.setattr(sys, "argv", ["mechattn", *arguments])
        written = on_a_terminal(command)
        assert shows in written.replace("\r\n", ""), arguments
        assert not {"\x1b", "\x07"} & set(written), arguments
    assert not {"\x1b", "\x07"} & set("".join(capfd.readouterr())), "nor past its streams"
    name = ma.load_result("r.zarr").conditions[1]
    assert RED in on_a_terminal(lambda: typer.echo(name)), "negative control"


@pytest.mark.parametrize(
    "name", ["a\0", "a\x1b[31m", "a\nb", "a\tb", "\x7f", "a\u202eb", "a\u2028", "\ud800", "", "  "]
)
def test_names_of_conditions_with_control_characters(toy, name):
    with pytest.raises(OptionError, match=r"control character in its name|needs a name"):
        ma.run(toy, "Tom has 3 apples.", {name: ma.MeaninglessTokens(count=5)})


def test_other_names_are_taken(toy):  # negative control
    names = ["slash", "é, “ü” <5", "שלום", "count=5 🙂", "text=\\n"]
    made = ma.run(toy, "Tom has 3 apples.", {name: ma.MeaninglessTokens(count=5) for name in names})
    assert made.conditions == ["baseline", *names]


def test_tokens_with_control_characters_are_stored_written_out(toy, tmp_path):
    result = ma.run(toy, "Tom\0 has 3\x1b apples.")
    result.save(tmp_path / "r.zarr")
    texts = (
        ma.load_result(tmp_path / "r.zarr")["sequences"].first_prompt_text.values.flatten().tolist()
    )
    assert {"\\x00", "\\x1b"} <= set(texts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[2J\x9b31m\u202e\u2066\r\x00", "\\x1b[2J\\x9b31m\\u202e\\u2066\\r\\x00"),
        ("é\n\t🙂 שלום \u200d", "é\n\t🙂 שלום \u200d"),
        ("a\udce9", "a\\udce9"),
    ],
)
def test_control_characters_are_written_out(text, expected):
    assert plain(text) == expected
    expected.encode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://user:SECRET@bucket/r.zarr", "s3://…@bucket/r.zarr"),
        ("s3://:SECRET@bucket/r.zarr", "s3://…@bucket/r.zarr"),
        ("https://SECRET@host/r.zarr", "https://…@host/r.zarr"),
        ("https://user:SEC/RET@host/r.zarr", "https://…@host/r.zarr"),
        ("https://a@b:SECRET@host/r.zarr", "https://…@host/r.zarr"),
        ("(http://host/r.zarr?token=SECRET&x=1), and", "(http://host/r.zarr?…), and"),
        ("abfs://container@account/r.zarr?sig=SECRET", "abfs://container@account/r.zarr?…"),
        ("simplecache::s3://user:SECRET@b/r.zarr", "simplecache::s3://…@b/r.zarr"),
        (
            "s3://bucket/a@b/r.zarr ray://host:10001 me@example.org",
            "s3://bucket/a@b/r.zarr ray://host:10001 me@example.org",
        ),
    ],
)
def test_addresses_without_keys_and_passwords(text, expected):
    assert without_secrets(text) == expected
    assert str(MechattnError(text)) == shown(text) == expected
    assert "SECRET" not in expected


@pytest.mark.parametrize(
    "address",
    [
        "s3://user:SECRET@bucket/r.zarr",
        "ftp://user:SECRET@127.0.0.1:9/r.zarr",
        "memory://user:SECRET@x/r.zarr?k=SECRET",
    ],
)
def test_errors_at_an_address_tell_no_password(small, address):
    for act in (ma.load_result, small.save):
        with pytest.raises(MechattnError) as caught:
            act(address)
        assert "SECRET" not in str(caught.value)
    with pytest.raises(MechattnError) as caught:
        ma.load_result(address)
    assert caught.value.__cause__ is None, "whose words would be in the traceback"
