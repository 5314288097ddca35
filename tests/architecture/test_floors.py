"""The map of the house holds: imports go down only, light rooms import neither torch nor Ray."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "etude"
FLOORS = {
    "records": 0,
    "chat": 1,
    "kernels": 1,
    "native": 1,
    "model": 2,
    "weightsync": 2,
    "environments": 2,
    "rl": 2,
    "trainer": 3,
    "inference": 3,
    "agent": 4,
    "pretrain": 4,
    "coordinator": 5,
    "bench": 5,
    "tasks": 5,
    "web": 6,
    "cli": 7,
}
SAME_FLOOR = {("coordinator", "tasks"), ("bench", "tasks"), ("bench", "coordinator")}
POD_PROGRAM = ROOT / "environments" / "podagent"
"""A program of its own: it runs inside pods, where there is no package `etude`, with its folder's parent as import root."""
LIGHT = ["records", "chat", "environments", "agent", "tasks"]
LIGHT_MODULES = [
    *sorted(
        ".".join(("etude", *path.relative_to(ROOT).with_suffix("").parts))
        for room in LIGHT
        for path in (ROOT / room).rglob("*.py")
        if path.stem not in ("__init__", "__main__") and "podagent" not in path.parts
    ),
    "etude.rl.length_penalty",
    "etude.rl.rewards",
    "etude.rl.curriculum",
    "etude.inference.client",
    "etude.inference.protocol",
    "etude.weightsync.store",
    "etude.cli.main",
]


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""] + [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("etude.")}
    return rooms & FLOORS.keys()


@pytest.mark.parametrize("room", sorted(FLOORS))
def test_imports_go_down_only(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        if POD_PROGRAM in path.parents:
            continue
        for other in imported_rooms(path) - {room}:
            allowed = FLOORS[other] < FLOORS[room] or (room, other) in SAME_FLOOR
            assert allowed, f"{path.relative_to(ROOT)} imports {other}: not a floor below"


def test_the_pod_agent_imports_only_itself_and_the_standard_library() -> None:
    for path in POD_PROGRAM.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                outside = {alias.name.split(".")[0] for alias in node.names} - sys.stdlib_module_names
                assert not outside, f"{path.name} imports {outside}"
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert (node.module or "").split(".")[0] in sys.stdlib_module_names, f"{path.name}: {node.module}"
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 1, f"{path.name} reaches out of its folder"
                for name in [node.module] if node.module else [alias.name for alias in node.names]:
                    assert (POD_PROGRAM / f"{name}.py").exists(), f"{path.name} imports {name}"


def test_every_room_stands_on_a_floor() -> None:
    assert {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"} <= FLOORS.keys()


def test_light_rooms_import_neither_torch_nor_ray() -> None:
    program = (
        "import importlib, sys\n"
        "bad = {}\n"
        f"for name in {LIGHT_MODULES!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'ray'} & set(sys.modules)\n"
        "    if heavy: bad[name] = heavy; break\n"
        "print(bad or '')\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "", f"imports torch or Ray: {result.stdout}"
