"""The function corpus: every source scanned, testable functions tried, splits assigned, rows written.

`build` makes, under one folder, `pretrain.jsonl.zst` and `sft.jsonl.zst` (what the starter policy learns from),
`tasks.jsonl.zst` (functions of the RL, dev and held-out splits: what `make` turns into tasks), `source_text.jsonl.zst`
(whole files of pretraining modules) and `splits.json`. Deliberately knows nothing of task folders.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import zstandard

from etude.records.errors import BadInput
from etude.records.task import Split
from etude.tasks import sources
from etude.tasks.functions import Function, functions_of, signatures_of
from etude.tasks.inputs import MAX_TEXT, Case, Trial, outcomes, try_function
from etude.tasks.mutate import mutants
from etude.tasks.splits import deduplicate, disjoint, split_of
from etude.tasks.worker import WorkerPool

Progress = Callable[[str], None]

PRETRAIN_MUTANTS = 4
TEXT_BYTES = 60_000_000
HASH_SEEDS = ("0", "1", "2", "3", "5", "8", "13", "21")
_STDLIB_CHUNKS = 4
_BATCH = 400


class Failing(msgspec.Struct, frozen=True):
    """A case that a mutant fails, with what it gives."""

    args: str
    got: str
    want: str


class RowMutant(msgspec.Struct, frozen=True, omit_defaults=True):
    """A mutant of a row: `text` is the whole broken function, `line` the index of the changed line. `failing` (testable
    functions only) is the shortest failing case, `fails` all of them as (index into the row's cases, given text)."""

    operator: str
    text: str
    line: int
    failing: Failing | None = None
    fails: tuple[tuple[int, str], ...] = ()


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One function of the corpus. `cases` are (argument text, canonical result) and are there only when testable."""

    function: str
    source: str
    imports: tuple[str, ...]
    module: str
    package: str
    licence: str
    signature: str
    digest: str
    split: Split
    mutants: tuple[RowMutant, ...]
    cases: tuple[Case, ...] = ()


class _Scan(msgspec.Struct, frozen=True):
    module: str
    functions: tuple[Function, ...]
    signatures: frozenset[str]


def paths(folder: Path) -> dict[str, Path]:
    """Where `build` writes, by name."""
    names = ("pretrain.jsonl.zst", "sft.jsonl.zst", "tasks.jsonl.zst", "source_text.jsonl.zst", "splits.json")
    return {name.split(".")[0]: folder / name for name in names}


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of one of the corpus files, in order. Raises BadInput when it is missing or not such a file."""
    decoder = msgspec.json.Decoder(Row)
    try:
        with path.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream:
            for line in io.BufferedReader(stream, 1 << 20):
                yield decoder.decode(line)
    except (OSError, zstandard.ZstdError, msgspec.DecodeError) as error:
        raise BadInput(
            str(path),
            "corpus file",
            type(error).__name__,
            f"zstd JSON lines of rows made by `etude tasks make` ({error})",
        ) from error


def read_texts(path: Path) -> Iterator[tuple[str, str]]:
    """(module, whole text) of each file in `source_text.jsonl.zst`. Raises BadInput when it is not such a file."""
    try:
        with path.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream:
            for line in io.BufferedReader(stream, 1 << 20):
                table = msgspec.json.decode(line)
                yield table["module"], table["text"]
    except (OSError, zstandard.ZstdError, msgspec.DecodeError, KeyError) as error:
        raise BadInput(str(path), "source text", type(error).__name__, f"zstd JSON lines of files ({error})") from error


def build(
    corpus: Path, source_folder: Path, *, processes: int = 2, text_bytes: int = TEXT_BYTES, progress: Progress = print
) -> dict[str, int]:
    """Fetches the sources, scans, tries and writes the corpus; returns counts by split. Deterministic for one Python."""
    wheels = sources.fetch(source_folder.resolve(), progress=progress)
    pins = sources.read_pins()
    jobs: list[tuple[str, int]] = [("", part) for part in range(_STDLIB_CHUNKS)] + [
        (str(path), i) for i, path in enumerate(wheels)
    ]
    scans = _scan_all(jobs, processes, progress)
    functions = deduplicate(function for scan in scans for function in scan.functions)
    progress(f"{len(scans)} modules, {len(functions)} distinct functions, {len(pins)} packages")
    trials = _try_all([f for f in functions if f.testable], processes, progress)
    usable = Counter(function.module for function in functions if function.digest in trials)
    assigned = {scan.module: split_of(scan.module, usable[scan.module]) for scan in scans}
    reserved = frozenset().union(*[scan.signatures for scan in scans if scan.module.startswith("stdlib.")])
    candidates = [f for f in functions if assigned[f.module] is Split.PRETRAIN or f.digest in trials]
    by_split = disjoint(candidates, assigned, reserved)
    corpus.mkdir(parents=True, exist_ok=True)
    out = paths(corpus)
    kept = {
        split: [_tried_row(f, trials[f.digest], split) for f in by_split[split]]
        for split in by_split
        if split is not Split.PRETRAIN
    }
    _write(out["sft"], map(msgspec.json.encode, kept[Split.SFT]))
    _write(
        out["tasks"],
        (msgspec.json.encode(row) for split in (Split.RL, Split.DEV, Split.HELD_OUT) for row in kept[split]),
    )
    _write(out["pretrain"], _pretrain_lines(by_split[Split.PRETRAIN], trials, processes, progress))
    module_splits = {module: str(split) for module, split in sorted(assigned.items())}
    _write_atomic(out["splits"], json.dumps(module_splits, indent=0).encode())
    counts = {str(split): len(items) for split, items in by_split.items()}
    progress(f"functions by split: {counts}")
    protected = [row for split in (Split.RL, Split.DEV, Split.HELD_OUT) for row in kept[split]]
    allowed = _text_modules(scans, assigned, protected)
    counts["source_text"] = _write_text(out["source_text"], jobs, allowed, text_bytes)
    progress(f"source text: {counts['source_text']} files")
    return counts


def _modules(job: tuple[str, int]) -> Iterator[sources.SourceModule]:
    path, index = job
    if path:
        yield from sources.wheel_modules(Path(path), sources.read_pins()[index])
    else:
        for number, module in enumerate(sources.stdlib_modules()):
            if number % _STDLIB_CHUNKS == index:
                yield module


def _scan(job: tuple[str, int]) -> list[_Scan]:
    scans = []
    for module in _modules(job):
        functions = tuple(functions_of(module))
        scans.append(_Scan(module.name, functions, frozenset(signatures_of(module.text))))
    return scans


def _scan_all(jobs: list[tuple[str, int]], processes: int, progress: Progress) -> list[_Scan]:
    jobs = sorted(jobs, key=lambda job: -os.path.getsize(job[0]) if job[0] else -(1 << 30))
    scans: list[_Scan] = []
    with WorkerPool(_scan, processes, limit_s=600.0, memory_bytes=6 << 30) as pool:
        for done, (index, found) in enumerate(pool.map(jobs)):
            if found is None:
                raise BadInput(
                    jobs[index][0] or "standard library", "source", "unreadable", "a wheel whose modules can be read"
                )
            scans.extend(found)
            if done % 10 == 9:
                progress(f"scanned {done + 1} of {len(jobs)} sources, {len(scans)} modules")
    by_name: dict[str, _Scan] = {}
    for scan in sorted(scans, key=lambda scan: scan.module):
        by_name.setdefault(scan.module, scan)
    return list(by_name.values())


def _try_all(functions: list[Function], processes: int, progress: Progress) -> dict[str, Trial]:
    found: dict[str, tuple[Function, Trial]] = {}
    with WorkerPool(try_function, processes) as pool:
        for done, (index, trial) in enumerate(pool.map(functions)):
            if trial is not None:
                found[functions[index].digest] = (functions[index], trial)
            if done % 1000 == 999:
                progress(f"tried {done + 1} of {len(functions)} self-contained functions, {len(found)} usable")
    repeatable = _repeat(list(found.values()), processes)
    progress(f"{len(repeatable)} functions give the same results in other processes with other hash seeds")
    return {digest: trial for digest, (_, trial) in found.items() if digest in repeatable}


def _repeat(found: list[tuple[Function, Trial]], processes: int) -> set[str]:
    """Digests of those whose cases come out the same in fresh interpreters with other hash seeds: a two-element set of
    texts keeps its order under half of them, so one other seed is not enough."""
    jobs = [(f.imports, f.source, f.name, tuple(case.args for case in trial.cases)) for f, trial in found]
    same = set(range(len(found)))
    saved = os.environ.get("PYTHONHASHSEED")
    try:
        for seed in HASH_SEEDS:
            os.environ["PYTHONHASHSEED"] = seed
            with WorkerPool(outcomes, processes, method="spawn") as pool:
                same &= {i for i, got in pool.map(jobs) if got == [case.want for case in found[i][1].cases]}
    finally:
        if saved is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = saved
    return {found[index][0].digest for index in same}


def _tried_row(function: Function, trial: Trial, split: Split) -> Row:
    rows = []
    for tried in trial.mutants:
        shown = [
            Failing(trial.cases[i].args, got, trial.cases[i].want) for i, got in tried.failing if len(got) <= MAX_TEXT
        ]
        shortest = min(shown, key=lambda case: (len(case.args) + len(case.got) + len(case.want), case.args))
        mutant = tried.mutant
        rows.append(RowMutant(mutant.operator, mutant.apply(function.source), mutant.line, shortest, tried.failing))
    return _row(function, split, tuple(rows), trial.cases)


def _row(function: Function, split: Split, broken: tuple[RowMutant, ...], cases: tuple[Case, ...] = ()) -> Row:
    return Row(
        function.name, function.source, function.imports, function.module, function.package, function.licence,
        function.signature, function.digest, split, broken, cases,
    )  # fmt: skip


def _pretrain_batch(functions: list[Function]) -> list[bytes]:
    lines = []
    for function in functions:
        broken: tuple[RowMutant, ...] = ()
        if function.source.startswith("def "):
            found = mutants(function.source, limit=PRETRAIN_MUTANTS)
            broken = tuple(RowMutant(m.operator, m.apply(function.source), m.line) for m in found)
        lines.append(msgspec.json.encode(_row(function, Split.PRETRAIN, broken)))
    return lines


def _pretrain_lines(
    functions: list[Function], trials: dict[str, Trial], processes: int, progress: Progress
) -> Iterator[bytes]:
    for function in functions:
        if function.digest in trials:
            yield msgspec.json.encode(_tried_row(function, trials[function.digest], Split.PRETRAIN))
    rest = [function for function in functions if function.digest not in trials]
    batches = [rest[start : start + _BATCH] for start in range(0, len(rest), _BATCH)]
    lines: dict[int, list[bytes]] = {}
    with WorkerPool(_pretrain_batch, processes, limit_s=120.0) as pool:
        for done, (index, batch) in enumerate(pool.map(batches)):
            lines[index] = batch or []
            if done % 50 == 49:
                progress(f"mutated {(done + 1) * _BATCH} of {len(rest)} functions for pretraining")
    for index in range(len(batches)):
        yield from lines[index]


def _text_modules(scans: list[_Scan], assigned: dict[str, Split], protected: list[Row]) -> set[str]:
    signatures = {row.signature for row in protected}
    digests = {row.digest for row in protected}
    allowed = set()
    for scan in scans:
        clean = not (scan.signatures & signatures) and not any(f.digest in digests for f in scan.functions)
        if assigned[scan.module] is Split.PRETRAIN and clean:
            allowed.add(scan.module)
    return allowed


def _write_text(path: Path, jobs: list[tuple[str, int]], allowed: set[str], limit: int) -> int:
    # A fixed share of the modules by hash keeps the choice independent of the order of the sources.
    order = {module: hashlib.sha256(module.encode()).digest() for module in allowed}
    texts: dict[str, bytes] = {}
    for job in jobs:
        for module in _modules(job):
            text = module.text
            if (
                module.name in allowed
                and 400 <= len(text) <= 60_000
                and text.isascii()
                and len(text) < 70 * text.count("\n")
            ):
                line = {"module": module.name, "package": module.package, "text": text}
                texts.setdefault(module.name, zstandard.compress(msgspec.json.encode(line), 1))
    chosen: list[str] = []
    total = 0
    for name in sorted(texts, key=lambda name: order[name]):
        size = len(zstandard.decompress(texts[name]))
        if total + size <= limit:
            chosen.append(name)
            total += size
    _write(path, (zstandard.decompress(texts[name]) for name in chosen))
    return len(chosen)


def _write(path: Path, lines: Iterable[bytes]) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("wb") as raw, zstandard.ZstdCompressor(level=9).stream_writer(raw) as stream:
        for line in lines:
            stream.write(line + b"\n")
    partial.replace(path)


def _write_atomic(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    partial.replace(path)


def main() -> None:
    """`python -m etude.tasks.corpus`: builds `.cache/corpus` in the working directory."""
    build(Path(".cache/corpus"), Path(".cache/sources"), progress=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
