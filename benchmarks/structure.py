"""Measure the structure of `hf_osdp/`: lines, statements with and without docstrings, files, import cycles, and files
that name each feature.

    python benchmarks/structure.py [--json]       # needs nothing but Python

A file names a feature if a word of its code or of its messages matches; comments, docstrings and the names of a user's
options (`compile`, `communication`) do not count.
Cycles are those between modules; imports inside functions count, imports for type checkers do not.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import json
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FEATURES = {
    "operators in slices": r"slices|sliced|slice_|operatorsplit|splitoperator",
    "loss in chunks": r"loss_?chunk|chunk(ed)?_?(loss|head)|sumofchunks|sumoflosses",
    "wire formats": r"wire|codec",
    "Muon": r"muon|newton",
    "8- and 4-bit optimizers": r"low_bit|adamw\w*[48]_?bit|bitsandbytes|torchao|bnb",
    "offloading": r"offload|on_host|host_(states|parameters|kernels|moment|bytes|of\b)|hoststates|hostspec"
    r"|hostoptions|(has|uses)_host|\baway\b|steps_alone|sent_bytes|kind \. host|hardware \. host"
    r"|\bplaced\b|place_of",
}
"""Words of each feature."""
OTHER_REASONS = {
    "operators in slices": {"tracing/known_values.py"},
    "offloading": {"planner/cost/collectives.py", "planner/wire.py", "preparation/out_of_memory.py"},
    "8- and 4-bit optimizers": {
        "integrations/trainer_facts.py",
        "cli/options.py", "modeling/quantized.py", "preparation/cache.py",
    },
}  # fmt: skip
"""Files that use these words for something else: slices of tensors, quantized weights, names of packages,
bytes sent between devices, tensors that were placed."""


def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    found = {}
    for path in sorted((ROOT / "hf_osdp").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of the package that a module imports when it runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    unread = {id(node) for block in ast.walk(tree) if _is_for_type_checkers(block) for node in ast.walk(block)}
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
            for alias in node.names:
                found.update([f"{base}.{alias.name}"] if f"{base}.{alias.name}" in known else [base])
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {one for one in found if one in known and one != name}


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def import_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return groups of modules that import each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            position = stack.index(name)
            if len(group := stack[position:]) > 1:
                found.append(sorted(group))
            del stack[position:]

    for name in graph:
        if name not in index:
            visit(name)
    return found


@functools.cache
def words_of(path: Path) -> str:
    """Return a file's code and messages, without comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    expressions = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    documented = {
        line
        for one in expressions
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
        for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join(
        token.string for token in tokens if token.type != tokenize.COMMENT and token.start[0] not in documented
    )


def files_naming(feature: str) -> list[str]:
    """Return the files of the package that name a feature."""
    words, package = re.compile(FEATURES[feature], re.IGNORECASE), ROOT / "hf_osdp"
    found = (str(path.relative_to(package)) for path in sorted(modules().values()) if words.search(words_of(path)))
    return [name for name in found if name not in OTHER_REASONS.get(feature, ())]


def sizes_of(paths: Iterable[Path]) -> dict[str, int]:
    """Return the lines of the files, and their statements with and without docstrings."""
    texts = [path.read_text(encoding="utf-8") for path in paths]
    found = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    documented = sum(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for node in found
    )
    return {
        "lines": sum(len(text.splitlines()) for text in texts),
        "statements": len(found),
        "statements_without_docstrings": len(found) - documented,
    }


def measure() -> dict[str, object]:
    """Return all figures."""
    known = modules()
    graph = {name: imports(name, path, known) for name, path in known.items()}
    packages: dict[tuple[str, ...], list[Path]] = {}
    for path in known.values():
        packages.setdefault(path.relative_to(ROOT / "hf_osdp").parent.parts[:1] or (".",), []).append(path)
    return {
        **sizes_of(known.values()),
        "by_package": {name: sizes_of(paths)["statements_without_docstrings"] for (name,), paths in packages.items()},
        "files": len(known),
        "longest_file": max(len(path.read_text(encoding="utf-8").splitlines()) for path in known.values()),
        **{
            f"{name}_of_{folder}": size
            for folder in ("tests", "benchmarks", "recipes")
            for name, size in sizes_of((ROOT / folder).rglob("*.py")).items()
        },
        "import_cycles": import_cycles(graph),
        "files_naming_fsdp2s_insides": sum("_fully_shard" in path.read_text("utf-8") for path in known.values()),
        "files_naming": {feature: files_naming(feature) for feature in FEATURES},
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Measure the structure of hf_osdp.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options, found = parser.parse_args(), measure()
    if options.json:
        return print(json.dumps(found, indent=1))
    for feature, files in found.pop("files_naming").items():
        print(f"{len(files):3} files name {feature}:", *files)
    for name, value in found.items():
        print(f"{name.replace('_', ' '):44}", len(value) if isinstance(value, list) else value)
    return None


if __name__ == "__main__":
    main()
