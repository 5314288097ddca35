"""The pages tell the truth about commands and files: what they name exists, and no file tells where it was written."""

from __future__ import annotations

import ast
import io
import re
import shlex
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import zstandard

from etude.cli.main import app
from etude.cli.tree import Config
from etude.inference.config import InferenceConfig
from etude.records.config import known_keys, load

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "data").glob("*.md")])
PASS_ON = {"serve inference": "etude.inference.server"}
"""Commands that hand their options to a module of their own."""
SHIPPED = re.compile(r"`((?:src|docs|configs|data|tests|benchmarks)/[\w./-]+\.[a-z]+[\w.]*)`")
MADE_LATER = frozenset({"docs/learning_check.md", "docs/learning_check.json"})
"""Files that a command writes and a clone may lack."""
UNREAD = frozenset(
    ".git .venv .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache __pycache__ runs build dist".split()
)
TEXTS = frozenset(".py .md .toml .txt .c .css .json .yaml .yml .cfg .sh".split()) | {""}
KNOWN_HOSTS = frozenset({"www.apache.org", "127.0.0.1", "localhost", "www.w3.org", "a.example"})
MACHINE_PATH = re.compile(r"(?<![\w.~*$}/-])/(?:work|root|home/\w+|Users|opt|srv|mnt|data)/\w")
REGISTRY = re.compile(
    r"\b(?:pypi|pythonhosted|anaconda|npmjs|crates|dockerhub|docker|quay|ghcr|huggingface|artifactory|nexus)\.(?:org|io|com|co)\b"
    r"|--(?:extra-)?index-url|--find-links|--trusted-host"
)


class Written(NamedTuple):
    """A command line as a page has it. `whole` ones stand in a code block and must parse with their values."""

    page: str
    words: tuple[str, ...]
    whole: bool


def blocks(text: str) -> Iterator[str]:
    """Lines of fenced code blocks, continuation lines joined."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S):
        yield from block.replace("\\\n", " ").splitlines()


def command_lines(page: Path) -> Iterator[Written]:
    text = page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    found = [(line, True) for line in blocks(text)] + [(span, False) for span in re.findall(r"`([^`\n]+)`", prose)]
    for line, whole in found:
        line = line.strip().removeprefix("$ ")
        if re.match(r"(?:\.venv/bin/)?(?:etude|make|python) ", line):
            first, *rest = shlex.split(line, comments=True)
            yield Written(name, (first.removeprefix(".venv/bin/"), *rest), whole)


def commands_of(kind: str) -> list[Written]:
    return [written for page in PAGES for written in command_lines(page) if written.words[0] == kind]


def shown(written: Written) -> str:
    return f"{written.page}: {' '.join(written.words)}"


@cache
def argparse_flags(module: str) -> frozenset[str]:
    """Options of a module's `add_argument` calls, read from its source."""
    path = ROOT / Path("src" if module.startswith("etude.") else ".") / (module.replace(".", "/") + ".py")
    assert path.exists(), f"no module {module}"
    flags = {"--help"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            flags |= {str(a.value) for a in node.args if isinstance(a, ast.Constant)}
    if module == PASS_ON["serve inference"]:
        flags |= {"--run"} | {"--" + name.replace("_", "-") for name in InferenceConfig.model_fields}
    return frozenset(flags)


def options_in(words: tuple[str, ...]) -> list[str]:
    return [word.split("=", 1)[0] for word in words if re.match(r"--?[a-z]", word)]


def resolve(words: tuple[str, ...]) -> tuple[Any, str, tuple[str, ...]]:
    """The command that the words name, its path, and the words behind it."""
    command: Any = typer.main.get_command(app)
    path: list[str] = []
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words[0]]
        path.append(words[0])
        words = words[1:]
    assert not words or words[0].startswith("-") or not hasattr(command, "commands"), f"no command {words[0]}"
    return command, " ".join(path), words


@pytest.mark.parametrize("written", commands_of("etude"), ids=shown)
def test_an_etude_command_of_a_page_exists_with_its_options(written: Written) -> None:
    command, path, rest = resolve(written.words[1:])
    if path in PASS_ON:
        assert set(options_in(rest)) <= argparse_flags(PASS_ON[path])
        return
    known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    assert set(options_in(rest)) <= known
    if not written.whole or "--help" in rest:
        return
    context = command.make_context(path, list(rest))  # parses and converts; runs nothing
    assert not context.args, f"nobody reads {context.args}"
    given = context.params
    load(Config, [ROOT / file for file in given.get("config") or []], list(given.get("overrides") or []))


@pytest.mark.parametrize("written", commands_of("make"), ids=shown)
def test_a_make_target_of_a_page_exists(written: Written) -> None:
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    recipes = dict(re.findall(r"^([a-z][\w-]*):[^\n]*\n((?:\t[^\n]*\n)+)", (ROOT / "Makefile").read_text(), re.M))
    for word in written.words[1:]:
        if word.startswith("ARGS="):
            started = re.search(r"/etude ([a-z -]+?) \$\(ARGS\)", recipes[written.words[1]])
            if started:
                words = ("etude", *started[1].split(), *shlex.split(word.removeprefix("ARGS=")))
                test_an_etude_command_of_a_page_exists_with_its_options(Written(written.page, words, written.whole))
        elif "=" not in word:
            assert word in targets


@pytest.mark.parametrize("written", commands_of("python"), ids=shown)
def test_a_python_module_of_a_page_exists_with_its_options(written: Written) -> None:
    words = written.words[1:]
    if len(words) > 1 and words[0] == "-m" and words[1].split(".")[0] in ("etude", "benchmarks"):
        assert set(options_in(words[2:])) <= argparse_flags(words[1])


@pytest.mark.parametrize(
    "line",
    [
        "etude trian",
        "etude tasks maek",
        "etude eval --modle DIR",
        "etude eval --attempts many",
        "etude runs report one two",
        "etude quickstart trainer.learning_rat=1e-4",
        "etude serve inference --prot 1",
        "make nothing",
        "make quickstart ARGS=--sede",
        "python -m benchmarks.nothing",
        "python -m etude.pretrain.starter --stgae sft",
    ],
)
def test_a_wrong_line_would_be_noticed(line: str) -> None:
    checks = {
        "etude": test_an_etude_command_of_a_page_exists_with_its_options,
        "make": test_a_make_target_of_a_page_exists,
        "python": test_a_python_module_of_a_page_exists_with_its_options,
    }
    words = tuple(shlex.split(line))
    with pytest.raises(Exception):  # noqa: B017  the parser's own errors are as good as ours
        checks[words[0]](Written("a page", words, True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_or_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" not in target and not target.startswith("#"):
            assert (page.parent / target.split("#")[0]).exists(), f"{page.name} links to {target}"
    for named in set(SHIPPED.findall(prose)) - MADE_LATER:
        assert (ROOT / named).exists(), f"{page.name} names {named}"


def test_the_readme_has_the_quickstarts_own_numbers() -> None:
    config, _ = load(Config, [ROOT / "configs" / "quickstart.toml"], [])
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    measured, run = config.evaluation, config.coordinator
    assert f"{measured.tasks} held-out tasks x {measured.attempts} attempts" in readme
    assert f"*Training*, {run.minutes:g} minutes" in readme
    assert f"every {run.probe_every} steps" in readme and f"best of {config.rl.group_size}" in readme


def test_every_config_key_of_a_page_is_a_key() -> None:
    known = set(known_keys(Config))
    parts = {key.rsplit(".", depth)[0] for key in known for depth in range(key.count(".") + 1)}
    sections = "|".join(name for name in Config.model_fields if name not in ("model", "tasks", "runs"))
    for page in PAGES:
        for key in re.findall(rf"`((?:{sections})\.[a-z_.0-9]+)", page.read_text(encoding="utf-8")):
            assert key in parts, f"{page.name}: {key}"


def test_every_page_of_docs_can_be_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in readme, f"the README does not name docs/{page.name}"


def test_every_dependency_has_its_third_party_notice() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    notices = (ROOT / "THIRD_PARTY_NOTICES.md").read_text(encoding="utf-8").lower()
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
        name = re.match(r"[\w-]+", requirement)
        assert name is not None and f"| {name[0].lower()} |" in notices, requirement


def text_files() -> list[Path]:
    try:
        told = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
            timeout=60,
        )
        paths = [ROOT / name for name in told.stdout.decode().split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path for path in ROOT.rglob("*") if not UNREAD & set(path.relative_to(ROOT).parts)]
    return [path for path in paths if path.suffix in TEXTS and path.is_file() and path != Path(__file__)]


def test_no_file_names_a_machine_path_or_a_registry() -> None:
    found = []
    for path in text_files():
        text = path.read_text(encoding="utf-8", errors="replace")
        hosts = {host for host in re.findall(r"https?://([\w.-]+)", text) if host not in KNOWN_HOSTS}
        marks = [match[0] for pattern in (MACHINE_PATH, REGISTRY) for match in pattern.finditer(text)]
        found += [f"{path.relative_to(ROOT)}: {mark}" for mark in (*sorted(hosts), *marks)]
    assert not found


def test_the_task_archive_holds_the_licence_texts_that_its_notice_promises() -> None:
    data = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompress(
        (ROOT / "data" / "tasks.tar.zst").read_bytes(), max_output_size=1 << 30
    )
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        held = [name.removeprefix("licences/").lower() for name in archive.getnames() if name.startswith("licences/")]
    notice = (ROOT / "data" / "NOTICE-tasks.md").read_text(encoding="utf-8")
    packages = re.findall(r"^\| ([\w.-]+) ([\w.]+) \|", notice, re.M)
    assert packages
    missing = [f"{name} {version}" for name, version in packages if f"{name}-{version}.txt".lower() not in held]
    assert not missing, f"no licence text of {len(missing)} packages, first {missing[0]}"
