"""Token sequences from the function corpus: raw source, and repair episodes in the exact chat format that the agent meets.

Nothing is executed here: a bug is a mutant of the row, a failing check is the row's own record of one, and an edit is found by comparing
token ids. Each target token carries a loss weight. An episode is a pure function of (row, random generator), so a step's batch
depends only on the seed and its number. Knows nothing of batching (`batches`) or of rollouts (`sft`).
"""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import zstandard

from etude.chat.bridge import append_results, first_prompt
from etude.chat.edits import minimal_edit
from etude.chat.format import BOS, END, FIELD_TOKENS, FILE, RESULT_EDITED, RESULT_PASSED, SYSTEM_TEXT, TOOL_TOKENS
from etude.chat.repair_texts import failure_line, repair_instruction
from etude.chat.tokenizer import Tokenizer
from etude.pretrain.batches import Episode, PoolSource
from etude.pretrain.config import EpisodeMix
from etude.pretrain.corrupt import apply, choose, corruptions, line_change, slips
from etude.pretrain.placeholders import placeholder_check
from etude.records.errors import BadInput
from etude.records.rollout import SpanKind


class Failing(msgspec.Struct, frozen=True):
    """One visible check that a mutant fails: argument text, what it gave, what it should give."""

    args: str
    got: str
    want: str


class Mutant(msgspec.Struct, frozen=True):
    """A broken version of the row's function."""

    operator: str
    text: str
    failing: Failing | None = None


class CorpusRow(msgspec.Struct, frozen=True):
    """One function of the pretrain or SFT split, with its mutants (written by `etude tasks make`)."""

    function: str
    source: str
    imports: list[str]
    module: str
    package: str
    mutants: list[Mutant]


def read_rows(path: str | Path) -> list[CorpusRow]:
    """Rows of a `.jsonl.zst` corpus file. Raises BadInput naming the line that is not a row."""
    path = Path(path)
    if not path.is_file():
        raise BadInput(str(path), "corpus", "missing", "the file that `etude tasks make` writes")
    decoder = msgspec.json.Decoder(CorpusRow)
    rows = []
    with zstandard.ZstdDecompressor().stream_reader(path.open("rb")) as stream:
        for number, line in enumerate(io.BufferedReader(stream), 1):
            try:
                rows.append(decoder.decode(line))
            except msgspec.DecodeError as error:
                raise BadInput(str(path), f"line {number}", str(error), "a function row") from error
    return rows


def check_modules(rows: Iterable[CorpusRow], forbidden: frozenset[str]) -> None:
    """Raises BadInput when a row comes from a module of another split (RL, dev, held-out): training must not see it."""
    for row in rows:
        if row.module in forbidden:
            raise BadInput("training corpus", "module", row.module, "a module outside the RL, dev and held-out splits")


def file_text(imports: Sequence[str], source: str) -> str:
    """The one file of a repair repository: its imports, an empty line, the function."""
    head = "".join(line + "\n" for line in imports)
    return (head + "\n" if head else "") + source + "\n"


def file_name(module: str) -> str:
    """Short name of the file, from the last part of the module's dotted name."""
    return (re.sub(r"\W", "_", module.rsplit(".", 1)[-1].strip("_").lower()) or "m") + ".py"


class EpisodeMaker:
    """Draws episodes from rows. `mix` may change between calls (the decay phase has its own)."""

    def __init__(self, tokenizer: Tokenizer, rows: Sequence[CorpusRow], mix: EpisodeMix) -> None:
        if not rows:
            raise BadInput("training corpus", "rows", 0, "at least one row")
        self.tokenizer, self.rows, self.mix = tokenizer, rows, mix
        special = tokenizer.special
        self._edit, self._run, self._finish = (special[TOOL_TOKENS[name]] for name in ("edit_file", "run", "finish"))
        self._old, self._new = special[FIELD_TOKENS["old"]], special[FIELD_TOKENS["new"]]
        self._bos, self._end, self._file = special[BOS], special[END], special[FILE]

    def draw(self, rng: random.Random, row: CorpusRow) -> Episode | None:
        """One episode of `row`, of a kind drawn from the mix; None when it has none that fits."""
        kind = rng.random()
        mutants = self._slips(rng, row) if rng.random() < self.mix.slips else self._candidates(rng, row)
        episode: Episode | None
        if kind < self.mix.raw:
            episode = self.raw(row)
        elif not mutants:
            episode = self.several_bugs(rng, row, mutants)
        elif kind < self.mix.raw + self.mix.several_bugs:
            episode = self.several_bugs(rng, row, mutants) or self.one_bug(rng, row, mutants)
        else:
            episode = self.one_bug(rng, row, mutants)
        return episode if episode is not None and len(episode.ids) <= self.mix.longest else None

    def validation(self, rng: random.Random, row: CorpusRow) -> Episode | None:
        """A one-bug episode of the row's first drawn mutant; None when it has none."""
        mutants = self._candidates(rng, row)
        return self.one_bug(rng, row, mutants) if mutants else None

    def _candidates(self, rng: random.Random, row: CorpusRow) -> list[Mutant]:
        """The row's mutants in random order, operators taking turns so that common ones do not crowd out rare ones."""
        kept = [m for m in row.mutants if rng.random() < self.mix.operator_weights.get(m.operator, 1.0)]
        if self.mix.failing_only:
            kept = [mutant for mutant in kept if mutant.failing is not None]
        by_operator: dict[str, list[Mutant]] = {}
        for mutant in kept:
            by_operator.setdefault(mutant.operator, []).append(mutant)
        lists = list(by_operator.values())
        rng.shuffle(lists)
        for members in lists:
            rng.shuffle(members)
        deepest = max(map(len, lists), default=0)
        return [members[depth] for depth in range(deepest) for members in lists if depth < len(members)]

    def _slips(self, rng: random.Random, row: CorpusRow) -> list[Mutant]:
        """Blind slips in the row's function, each a mutant of its own, without a known failing check."""
        return [Mutant("slip", apply(row.source, [slip])) for slip in slips(rng, row.source, 2 * self.mix.most_bugs)]

    def raw(self, row: CorpusRow) -> Episode:
        """The file as a document of its own; every token is a target."""
        episode = Episode("raw")
        heading = self.tokenizer.encode(file_name(row.module) + "\n")
        episode.add([self._bos, self._file, *heading], 0.0)
        text = self.tokenizer.encode(file_text(row.imports, row.source))
        episode.add([*text, self._end], self.mix.raw_weight)
        return episode

    def one_bug(self, rng: random.Random, row: CorpusRow, mutants: Sequence[Mutant]) -> Episode | None:
        """Prompt, sometimes a wrong edit (no target) and its failing run, the right edit; in some, a passing run and `finish`."""
        fixed = file_text(row.imports, row.source)
        mutant = mutants[0]
        broken = file_text(row.imports, mutant.text)
        failing = mutant.failing
        if failing is None and rng.random() < self.mix.placeholder_check:
            parameters = row.source.split(")", 1)[0].partition("(")[2]
            failing = Failing(*placeholder_check(rng, parameters.count(",") + bool(parameters.strip())))
        broken_ids, fixed_ids = self.tokenizer.encode(broken), self.tokenizer.encode(fixed)
        right = minimal_edit(self.tokenizer, broken_ids, fixed_ids)
        if right is None or len(right[1]) > self.mix.longest_field:
            return None
        episode = Episode("repair")
        shown = None if failing is None else (failing.args, failing.got, failing.want)
        instruction = repair_instruction(row.function, file_name(row.module), shown)
        self._prompt(rng, episode, row, broken, broken_ids, instruction, [right])
        if rng.random() < self.mix.wrong_edit:
            wrong = self._wrong_edit(rng, row, mutants, broken_ids, right)
            if wrong is not None:
                result = "" if failing is None else failure_line(row.function, failing.args, failing.got, failing.want)
                self._act(episode, self._edit_action(wrong), [RESULT_EDITED], weight=0.0)
                self._act(episode, [self._run, self._end], [result or f"{row.function} failed"])
        if rng.random() >= self.mix.ending:
            self._act(episode, self._edit_action(right), None, edit=True)
            return episode
        self._act(episode, self._edit_action(right), [RESULT_EDITED], edit=True)
        self._act(episode, [self._run, self._end], [RESULT_PASSED])
        self._act(episode, [self._finish, self._end], None)
        return episode

    def several_bugs(self, rng: random.Random, row: CorpusRow, mutants: Sequence[Mutant]) -> Episode | None:
        """Denoising: two to `most_bugs` bugs, all edits in one action, top to bottom. None when the function has too few places."""
        changes = [line_change(row.source, mutant.text) for mutant in mutants]
        if not any(mutant.operator == "slip" for mutant in mutants):
            changes += corruptions(row.source)
        chosen = choose(rng, changes, rng.randint(2, self.mix.most_bugs))
        if len(chosen) < 2:
            return None
        broken = file_text(row.imports, apply(row.source, chosen))
        broken_ids = self.tokenizer.encode(broken)
        edits = []
        for index in range(len(chosen)):
            others = chosen[:index] + chosen[index + 1 :]
            partly = self.tokenizer.encode(file_text(row.imports, apply(row.source, others)))
            edit = minimal_edit(self.tokenizer, broken_ids, partly)
            if edit is None or len(edit[1]) > self.mix.longest_field:
                return None
            edits.append(edit)
        episode = Episode("denoise")
        request = f"{repair_instruction(row.function, file_name(row.module))}: {len(edits)} bugs"
        self._prompt(rng, episode, row, broken, broken_ids, request, edits)
        for old, new in edits:
            episode.add([self._edit, self._old, *old, self._new, *new], self.mix.action_weight, edit=True)
        episode.add([self._end], self.mix.action_weight)
        return episode

    def _wrong_edit(
        self,
        rng: random.Random,
        row: CorpusRow,
        mutants: Sequence[Mutant],
        broken_ids: list[int],
        right: tuple[list[int], list[int]],
    ) -> tuple[list[int], list[int]] | None:
        """A plausible edit that does not repair: another mutant's change, made to the broken file."""
        here = line_change(row.source, mutants[0].text)
        changes = [line_change(row.source, mutant.text) for mutant in mutants[1:]] + corruptions(row.source)
        for other in choose(rng, changes, 4, gap=0):
            if not (other.end < here.begin or other.begin > here.end):
                continue
            merged = self.tokenizer.encode(file_text(row.imports, apply(row.source, [here, other])))
            wrong = minimal_edit(self.tokenizer, broken_ids, merged)
            if wrong is not None and wrong != right and len(wrong[1]) <= self.mix.longest_field:
                return wrong
        return None

    def _prompt(
        self,
        rng: random.Random,
        episode: Episode,
        row: CorpusRow,
        broken: str,
        broken_ids: list[int],
        instruction: str,
        edits: Sequence[tuple[list[int], list[int]]],
    ) -> None:
        """Opening prompt; a sample of the file's text is a light target, except where it is broken."""
        files = [(file_name(row.module), broken)]
        ids, spans = first_prompt(self.tokenizer, system=SYSTEM_TEXT, instruction=instruction, files=files)
        end = next(span.end for span in reversed(spans) if span.kind is SpanKind.USER) - 1
        begin = end - len(broken_ids)
        weights = [0.0] * len(ids)
        share, weight = self.mix.prompt_share, self.mix.prompt_weight
        for place in range(begin, end + 1):
            weights[place] = weight if rng.random() < share else 0.0
        for old, _ in edits:
            place = next(i for i in range(len(broken_ids)) if broken_ids[i : i + len(old)] == old)
            weights[begin + place : begin + place + len(old)] = [0.0] * len(old)
        episode.add(ids, weights)

    def _edit_action(self, edit: tuple[list[int], list[int]]) -> list[int]:
        old, new = edit
        return [self._edit, self._old, *old, self._new, *new, self._end]

    def _act(
        self,
        episode: Episode,
        action: list[int],
        results: list[str] | None,
        *,
        weight: float | None = None,
        edit: bool = False,
    ) -> None:
        """An action and what its calls answered; `results` None ends the episode."""
        episode.add(action, self.mix.action_weight if weight is None else weight, edit=edit)
        if results is not None:
            ids, _ = append_results(self.tokenizer, action, results, start=len(episode.ids))
            episode.add(ids, 0.0)


class CorpusPools(PoolSource):
    """Pools of `size` draws, and `share` times as many from a second maker (rows whose failing checks are known).

    Rows come in a fresh random order each epoch, each draw has a random generator of its own. `share` may change between pools.
    """

    def __init__(
        self, maker: EpisodeMaker, seed: int, size: int, *, tested: EpisodeMaker | None = None, share: float = 0.0
    ) -> None:
        self.size, self.share = size, share
        self._main = _Draws(maker, f"{seed}")
        self._tested = None if tested is None else _Draws(tested, f"{seed}/tested")

    def pool(self, number: int) -> list[Episode]:
        """Draws `number * size` to `(number + 1) * size` of each maker, those that gave an episode."""
        made = self._main.draw(number * self.size, (number + 1) * self.size)
        if self._tested is not None:
            size = round(self.size * self.share)
            made += self._tested.draw(number * size, (number + 1) * size)
        return made


class _Draws:
    """Numbered draws from a maker's rows."""

    def __init__(self, maker: EpisodeMaker, seed: str) -> None:
        self.maker, self.seed = maker, seed
        self._epoch, self._order = -1, list[int]()

    def draw(self, begin: int, end: int) -> list[Episode]:
        drawn = (self._one(index) for index in range(begin, end))
        return [episode for episode in drawn if episode is not None]

    def _one(self, index: int) -> Episode | None:
        rows = self.maker.rows
        epoch, place = divmod(index, len(rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(rows)))
            random.Random(f"{self.seed}/epoch/{epoch}").shuffle(self._order)
        return self.maker.draw(random.Random(f"{self.seed}/draw/{index}"), rows[self._order[place]])
