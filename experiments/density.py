"""How densely the package is written, room by room, and whether it stays within its limits.

    python experiments/density.py            a line for the package and for each of its rooms
    python experiments/density.py --check    exits with 1 where a limit in pyproject.toml is passed

Size is counted in nodes of the syntax tree, not in lines: lines can be packed. The densities in
``[tool.density]`` may only be lowered; ``nodes`` grows by what something new needs, and falls with
each simplification.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mechattn"
# Names that say nothing to a reader of their line alone.
VAGUE = frozenset(
    [
        "made",
        "found",
        "one",
        "some",
        "of",
        "at",
        "each",
        "it",
        "them",
        "those",
        "these",
        "that",
        "this",
        "there",
        "here",
        "thing",
        "things",
        "given",
        "shown",
        "seen",
        "known",
        "kept",
        "taken",
        "put",
        "got",
        "done",
        "part",
        "parts",
        "what",
        "which",
        "how",
        "when",
        "other",
        "others",
        "another",
        "both",
        "all",
        "any",
        "every",
        "more",
        "less",
        "such",
        "same",
    ]
)


@dataclass
class Density:
    """Counts of a set of files; ratios are derived from them."""

    lines: int = 0
    code_lines: int = 0  # without blank lines, comments and docstrings
    nodes: int = 0
    names: int = 0
    vague_names: int = 0
    packed_assignments: int = 0  # ``a, b = c, d``
    conditional_expressions: int = 0

    @property
    def nodes_per_line(self) -> float:
        return self.nodes / self.lines

    @property
    def vague_percent(self) -> float:
        return 100 * self.vague_names / self.names

    @property
    def packed_per_thousand(self) -> float:
        return 1000 * self.packed_assignments / self.code_lines

    @property
    def conditional_per_thousand(self) -> float:
        return 1000 * self.conditional_expressions / self.code_lines

    def add(self, path: Path) -> None:
        """Count a file too."""
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        self.lines += text.count("\n")
        self.code_lines += len(code_lines(text, tree))
        for node in ast.walk(tree):
            self.nodes += 1
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.names += 1
                self.vague_names += node.id in VAGUE
            elif isinstance(node, ast.arg):
                self.names += 1
                self.vague_names += node.arg in VAGUE
            elif isinstance(node, ast.IfExp):
                self.conditional_expressions += 1
            elif isinstance(node, ast.Assign):
                is_packed = isinstance(node.targets[0], ast.Tuple) and isinstance(
                    node.value, ast.Tuple
                )
                self.packed_assignments += is_packed


def code_lines(text: str, tree: ast.Module) -> list[int]:
    """The numbers of the lines that are neither blank, nor a comment, nor in a docstring."""
    documented: set[int] = set()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            documented |= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))

    numbers = []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#") and number not in documented:
            numbers.append(number)
    return numbers


def measure(paths: list[Path]) -> Density:
    """The counts of these files together."""
    density = Density()
    for path in paths:
        density.add(path)
    return density


def report(name: str, density: Density) -> str:
    """A line about a folder."""
    return (
        f"{name:16} {density.nodes:8,} nodes {density.nodes_per_line:5.1f} a line"
        f" {density.vague_percent:5.1f} % vague names"
        f" {density.packed_per_thousand:5.1f} packed assignments and"
        f" {density.conditional_per_thousand:5.1f} conditional expressions in 1,000 lines"
    )


def passed_limits(density: Density) -> list[str]:
    """The limits of pyproject.toml that are passed, each as a sentence."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    sentences = []
    for name, limit in settings["tool"]["density"].items():
        measured = getattr(density, name)
        if measured > limit:
            sentences.append(
                f"{name} is {measured:.1f}, and its limit is {limit}: write steps out rather than"
                " packing them; for something new, raise the limit of nodes in pyproject.toml"
            )
    return sentences


def main() -> int:
    paths = sorted(PACKAGE.rglob("*.py"))
    package = measure(paths)
    print(report("mechattn", package))
    if "--check" in sys.argv:
        sentences = passed_limits(package)
        print("\n".join(sentences) or "within the limits of pyproject.toml")
        return int(bool(sentences))

    rooms = sorted({path.relative_to(PACKAGE).parts[0] for path in paths})
    for room in rooms:
        folder = PACKAGE / room
        if folder.is_dir():
            print(report(f"  {room}", measure(sorted(folder.rglob("*.py")))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
