"""The size of the package, and how many of its files a call enters.

python experiments/house.py            lines, files and rooms; functions with many parameters
python experiments/house.py --walk     also the files that run, compare, patch, page and paper enter (a minute)
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import mechattn

PACKAGE = Path(mechattn.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> list[Function]:
    """All functions and methods of a file."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, Function)]


def parameters(function: Function) -> int:
    """The number of parameters, without self and cls."""
    of = function.args
    named = [arg.arg for arg in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")])


def is_command(function: Function) -> bool:
    """Whether a function is a command of the command line: typer reads its options from the signature."""
    return any("app.command" in ast.unparse(decorator) for decorator in function.decorator_list)


def docstring_lines(path: Path) -> int:
    """Lines of a file inside docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    first = [
        node.body[0]
        for node in nodes
        if node.body and ast.get_docstring(node, clean=False) is not None
    ]
    return sum((one.end_lineno or one.lineno) - one.lineno + 1 for one in first)


def sizes() -> None:
    """Print lines, files, rooms and long signatures."""
    lines = {path: len(path.read_text().splitlines()) for path in FILES}
    blank = sum(not line.strip() for path in FILES for line in path.read_text().splitlines())
    documented = sum(map(docstring_lines, FILES))
    print(
        f"{sum(lines.values()):,} lines in {len(FILES)} files: {documented:,} of docstrings, {blank:,} blank"
    )
    rooms: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path, count in lines.items():
        room = path.relative_to(PACKAGE).parts[0]
        rooms[room] += count
        files[room] += 1
    for room, count in rooms.most_common():
        print(f"  {room:<16} {count:>6,} lines {files[room]:>4} files")
    print(
        f"files over 400 lines: {[str(path.relative_to(PACKAGE)) for path, count in lines.items() if count > 400]}"
    )
    many = [(path, one) for path in FILES for one in functions(path) if not is_command(one)]
    private = [
        (path, one) for path, one in many if one.name.startswith("_") and parameters(one) > 7
    ]
    public = [
        (path, one) for path, one in many if not one.name.startswith("_") and parameters(one) > 9
    ]
    seven = sum(parameters(one) > 7 for _, one in many)
    over = f"private ones: {len(private)}; public with more than 9: {len(public)}"
    print(f"functions with more than 7 parameters, typer's commands left out: {seven}; {over}")
    for path, one in public:
        print(f"  {path.relative_to(PACKAGE)}:{one.lineno} {one.name} {parameters(one)}")


def entered(call: Callable[[], object]) -> int:
    """The number of files of the package in which a call executes a function; importing a file is not entering it."""
    seen: set[str] = set()
    root = str(PACKAGE)

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        is_function = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
        is_ours = is_function and name.startswith(root)
        caller = frame.f_back
        # A comprehension at the top of a module runs when the module is imported.
        is_importing = caller is not None and caller.f_code.co_name == "<module>"
        if event == "call" and is_ours and not is_importing:
            seen.add(name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(seen)


def walk() -> None:
    """Print how many files each of five calls enters."""
    import mechattn as ma

    model = ma.load_model("toy:llama")
    prompts = ma.load_prompts("word-problems", limit=8, with_answer=True)
    slash = ma.MeaninglessTokens("/", count=55)
    made: list[ma.Result] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        calls: dict[str, Callable[[], object]] = {
            "run": lambda: made.append(ma.run(model, prompts, conditions={"slash": slash})),
            "compare": lambda: made[0].compare("slash"),
            "patch": lambda: ma.patch(
                model, prompts, slash, method="attribution", direction="denoising"
            ),
            "page": lambda: made[0].page(out / "page.html"),
            "paper": lambda: ma.paper(
                "toy:llama",
                out / "paper",
                limit=8,
                draws=1,
                problems=8,
                new_tokens=8,
            ),
        }
        for name, call in calls.items():
            print(f"{name} enters {entered(call)} files", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--walk", action="store_true")
    options = parser.parse_args()
    sizes()
    if options.walk:
        walk()
