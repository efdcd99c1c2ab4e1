"""What the pages name is there: functions, tests, files, commands, public names."""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib
import json
import pydoc
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import hf_osdp
from hf_osdp.cli.app import app

from .pages import DOCS, ROOT, page

PAGES = sorted(path.name for path in DOCS.glob("*.md"))
ELSEWHERE = "README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md recipes/README.md recipes/bert_large/README.md".split()
TEXTS = (*(f"docs/{name}" for name in PAGES), *ELSEWHERE)
EQUATION = re.compile(r"^### (?P<title>.+)\n(?P<body>(?:(?!^#).*\n)*)", re.MULTILINE)
FIELD = re.compile(r"^:(?P<name>Computed|Checked) by: (?P<value>.*(?:\n  .*)*)", re.MULTILINE)
FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)(?P<path>[^)#\s]*)(?P<section>#[^)\s]*)?\)")
FILE = re.compile(r"`((?:hf_osdp|tests|docs|recipes|benchmarks|accelerate_configs)/[\w./-]*)`")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code(language: str) -> list[str]:
    return [block["code"] for name in TEXTS for block in FENCE.finditer(text(name)) if block["language"] == language]


EQUATIONS = {
    section["title"]: {
        field["name"]: re.findall(r"`([^`]+)`", field["value"]) for field in FIELD.finditer(section["body"])
    }
    for section in EQUATION.finditer(page("planner.md"))
}


@functools.cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("title", EQUATIONS)
def test_every_equation_has_a_function_and_a_test(title):
    computed, checked = (EQUATIONS[title][field] for field in ("Computed", "Checked"))
    assert computed and checked and len(EQUATIONS) > 25
    for name in computed:
        assert pydoc.locate(name).__doc__, name
    for name in checked:
        path, _, test = name.partition("::")
        assert test.startswith("test_") and test in names_in(path), name


@pytest.mark.parametrize("name", TEXTS)
def test_files_and_links_of_a_page_lead_somewhere(name):
    assert not [path for path in FILE.findall(text(name)) if not (ROOT / path).exists()]
    dead = []
    for link in LINK.finditer(prose(path := ROOT / name)):
        target = (path.parent / link["path"]).resolve() if link["path"] else path
        section = link["section"]
        if not target.exists() or (section and target.suffix == ".md" and section[1:] not in anchors(target)):
            dead.append(link[0])
    assert not dead


def test_python_on_pages_imports_what_there_is():
    for node in (node for block in code("python") for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_osdp"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_every_formula_can_be_set():
    math = pytest.importorskip("docutils.utils.math.latex2mathml", reason="the site's builder sets formulas")
    for formula in re.findall(r"(?<!\\)\$\$(.+?)\$\$", page("planner.md"), re.DOTALL):
        math.tex2mathml(formula, as_block=True)


def test_commands_on_the_pages_are_understood():
    group = typer.main.get_command(app)
    lines = (line for block in code("bash") for line in block.splitlines())
    commands = [parts[1] for line in lines if len(parts := re.split(r"hf-osdp |-m hf_osdp ", line, maxsplit=1)) > 1]
    assert len(commands) > 5
    for command in commands:
        name, *arguments = shlex.split(command)
        group.commands[name].make_context(name, arguments)  # refuses unknown options and values


def test_every_page_and_public_name_is_in_the_contents():
    blocks = re.findall(r"```\{toctree\}\n(.*?)```", page("index.md"), re.DOTALL)
    listed = {line for block in blocks for line in block.splitlines()}
    names = [name.removesuffix(".md") for name in PAGES if name != "index.md"]
    assert not [name for name in names if not any(fnmatch.fnmatchcase(name, line) for line in listed)]
    listed = re.findall(r"^\.\. auto\w+:: (\w+)$", page("api.md") + page("options.md"), re.MULTILINE)
    assert sorted(listed) == sorted(name for name in hf_osdp.__all__ if name != "__version__")


def prose(path: Path) -> str:
    return re.sub(r"^(`{3,})[^\n]*\n.*?^\1$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """What a link into a page may name: its headings as GitHub and MyST write them."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}


PLANNING = re.compile(r"hf-osdp (plan|explain|compare) ")
BLOCKS = [
    [line.strip() for line in re.sub(r"\\\n\s*", " ", block).splitlines() if PLANNING.match(line.strip())]
    for block in code("bash")
]
HEADS = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64}
SHAPE = {"model_type": "llama", **HEADS, "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 8192}


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in BLOCKS if block], ids=lambda block: block[-1][:50])
def test_planning_commands_run(block, tmp_path, monkeypatch):
    pytest.importorskip("altair")
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    for command in block:
        _, name, model, *options = shlex.split(command)
        done = CliRunner().invoke(app, [name, model if model.endswith("plan.json") else "config.json", *options])
        assert done.exit_code == 0, f"{command}\n{done.output}"
