"""Makes the starter policy, stage by stage: tokenizer, pretraining, demonstrations, fine-tuning, export.

Each stage leaves its output in the folder and is skipped when that is there; training stages also resume in their middle.
Only rows of the pretrain and SFT splits are read, and their modules are checked against the split table. Demonstrations
need tasks and pods, which live on higher floors: the caller gives a function that makes them. Report: docs/starter.md.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from etude.chat.tokenizer import Tokenizer
from etude.model.checkpoint import hf_state, load_hf_state_, load_pretrained, save_pretrained
from etude.model.config import ModelConfig
from etude.model.decoder import Decoder
from etude.pretrain.batches import Batch, Episode, batches_of
from etude.pretrain.circuit import induction_weights
from etude.pretrain.config import EpisodeMix, PretrainConfig
from etude.pretrain.corpus import CorpusPools, CorpusRow, EpisodeMaker, check_modules, file_text, read_rows
from etude.pretrain.phases import Phase, load_weights
from etude.pretrain.sft import (
    DemonstrationPools,
    demonstration_episode,
    read_demonstrations,
    write_demonstrations,
)
from etude.records.errors import BadInput, EtudeError
from etude.records.rollout import Rollout

Say = Callable[[str], None]
Names = frozenset[tuple[str, str]]
"""(module, function) pairs."""
Demonstrate = Callable[[Tokenizer, Names], Iterable[Rollout]]
"""Makes solved rollouts of SFT tasks, given the tokenizer and the functions that are held aside."""


def starter_config(vocab_size: int, tokenizer: Tokenizer | None = None) -> ModelConfig:
    """The starter's shape: 2.1M parameters, 1.3M of them active for a token."""
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        kv_lora_rank=96,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        bos_token_id=None if tokenizer is None else tokenizer.bos_id,
        eos_token_id=None if tokenizer is None else tokenizer.end_id,
        pad_token_id=None if tokenizer is None else tokenizer.pad_id,
    )


def fresh_decoder(config: ModelConfig, seed: int) -> Decoder:
    """A new decoder that starts with the induction circuit."""
    decoder = Decoder(config)
    shapes = hf_state(decoder, dtype=torch.float32)
    load_hf_state_(decoder, induction_weights(shapes, config, seed=seed))
    return decoder


@dataclass(frozen=True)
class Data:
    """Rows to train on and rows held aside, of one split."""

    train: list[CorpusRow]
    aside: list[CorpusRow]


def load_split(config: PretrainConfig, name: str, aside: int) -> Data:
    """Reads `<name>.jsonl.zst`, checks its modules against `splits.json`, and holds `aside` functions back by a fixed shuffle."""
    folder = Path(config.corpus)
    rows = read_rows(folder / f"{name}.jsonl.zst")
    table = folder / "splits.json"
    if not table.is_file():
        raise BadInput(
            str(table), "split table", "missing", "the file that `etude tasks make` writes beside the corpus"
        )
    splits: dict[str, str] = json.loads(table.read_text(encoding="utf-8"))
    check_modules(rows, frozenset(module for module, split in splits.items() if split != name))
    order = list(range(len(rows)))
    random.Random(f"aside/{name}").shuffle(order)
    return Data([rows[i] for i in sorted(order[aside:])], [rows[i] for i in order[:aside]])


def validation_set(
    tokenizer: Tokenizer, asides: dict[str, Sequence[CorpusRow]], mix: EpisodeMix, *, limit: int, batch_tokens: int
) -> Callable[[], Iterable[Batch]]:
    """A fixed evaluation set: for each named split, one one-bug episode a function, and raw text of the first split."""
    made: list[Episode] = []
    plain = mix.model_copy(update={"wrong_edit": 0.0, "prompt_weight": 0.0})
    for name, rows in asides.items():
        maker = EpisodeMaker(tokenizer, rows, plain)
        found = 0
        for index, row in enumerate(rows):
            episode = maker.validation(random.Random(f"validation/{name}/{index}"), row)
            if episode is not None and len(episode.ids) <= mix.longest:
                episode.domain = name
                made.append(episode)
                found += 1
            if found == limit:
                break
    first = next(iter(asides.values()))
    maker = EpisodeMaker(tokenizer, first, plain)
    made += [episode for episode in map(maker.raw, first[:limit]) if len(episode.ids) <= mix.longest]
    batches = list(batches_of(made, batch_tokens, tokenizer.pad_id))
    return lambda: batches


class Starter:
    """The chain of stages over one folder."""

    def __init__(self, config: PretrainConfig, say: Say = print) -> None:
        self.config, self.say, self.folder = config, say, Path(config.folder)
        torch.set_num_threads(config.threads)

    def tokenizer(self) -> Tokenizer:
        """Trains the tokenizer on the pretrain split, or loads it."""
        folder = self.folder / "tokenizer"
        if not (folder / "tokenizer.json").exists():
            rows = load_split(self.config, "pretrain", 0).train
            tokenizer = Tokenizer.train((file_text(row.imports, row.source) for row in rows), self.config.vocab_size)
            tokenizer.save(folder)
            self.say(f"tokenizer: {tokenizer.vocab_size} ids from {len(rows)} functions of the pretrain split")
        return Tokenizer.load(folder)

    def pretrain(self) -> Path:
        """Pretrains (or resumes, or does nothing when done) and returns the exported folder."""
        config, out = self.config, self.folder / "pretrain" / "model"
        if out.exists():
            self.say(f"pretrain: {out} exists, skipped")
            return out
        tokenizer = self.tokenizer()
        data, other = load_split(config, "pretrain", config.aside), load_split(config, "sft", config.sft_aside)
        decoder = fresh_decoder(starter_config(tokenizer.vocab_size, tokenizer), config.seed)
        maker = EpisodeMaker(tokenizer, data.train, config.mix)
        draws = config.pretrain.pool_batches * config.pretrain.batch_tokens // 128

        tested = EpisodeMaker(tokenizer, other.train, config.tested_mix)
        pools = CorpusPools(maker, config.seed, draws, tested=tested, share=config.tested_share)

        def on_decay() -> None:
            maker.mix, pools.share = config.decay_mix, config.decay_tested_share

        phase = Phase(
            "pretrain",
            decoder,
            pools,
            config.pretrain,
            self.folder / "pretrain",
            seed=config.seed,
            pad_id=tokenizer.pad_id,
            validation=validation_set(
                tokenizer,
                {"pretrain": data.aside, "sft": other.aside},
                config.mix,
                limit=config.pretrain.evaluate_rows,
                batch_tokens=config.pretrain.batch_tokens,
            ),
            on_decay=on_decay,
            say=self.say,
        )
        resumed = phase.resume()
        self.say(
            f"pretrain: {len(data.train)} functions, "
            + (f"resumed at step {phase.progress.step}" if resumed else "from the induction circuit")
        )
        phase.run()
        export(decoder, tokenizer, out)
        self.say(f"pretrain: wrote {out}")
        return out

    def snapshot(self) -> Path:
        """Exports the newest pretraining checkpoint as it is, to look at while the phase goes on."""
        tokenizer, out = self.tokenizer(), self.folder / "snapshot"
        decoder = Decoder(starter_config(tokenizer.vocab_size, tokenizer))
        step = load_weights(self.folder / "pretrain" / "pretrain.state.pt", decoder)
        export(decoder, tokenizer, out)
        self.say(f"snapshot: wrote {out} (pretraining step {step})")
        return out

    def demonstrations(self, demonstrate: Demonstrate) -> Path:
        """Writes the demonstrations that `demonstrate` makes, unless they are there."""
        path = Path(self.config.demonstrations)
        if path.exists():
            self.say(f"demonstrations: {path} exists, skipped")
            return path
        aside = load_split(self.config, "sft", self.config.sft_aside).aside
        names = frozenset((row.module, row.function) for row in aside)
        count = write_demonstrations(path, demonstrate(self.tokenizer(), names))
        self.say(f"demonstrations: {count} rollouts in {path}")
        return path

    def sft(self) -> Path:
        """Fine-tunes the pretrained model on demonstrations (or resumes, or does nothing when done); returns the folder."""
        config, out = self.config, self.folder / "sft" / "model"
        if out.exists():
            self.say(f"sft: {out} exists, skipped")
            return out
        tokenizer, mix = self.tokenizer(), config.sft_mix
        made = [demonstration_episode(rollout) for rollout in read_demonstrations(config.demonstrations)]
        decoder = load_pretrained(self.pretrain())
        found = [episode for episode in made if episode is not None and len(episode.ids) <= mix.longest]
        aside = load_split(config, "sft", config.sft_aside).aside
        corpus = load_split(config, "pretrain", config.aside)
        draws = config.sft.pool_batches * config.sft.batch_tokens // 160
        reminder = CorpusPools(EpisodeMaker(tokenizer, corpus.train, mix), config.seed + 1, draws)
        phase = Phase(
            "sft",
            decoder,
            DemonstrationPools(found, draws, config.seed, other=reminder, other_share=config.sft_reminder),
            config.sft,
            self.folder / "sft",
            seed=config.seed,
            pad_id=tokenizer.pad_id,
            validation=validation_set(
                tokenizer,
                {"pretrain": corpus.aside, "sft": aside},
                mix,
                limit=config.sft.evaluate_rows,
                batch_tokens=config.sft.batch_tokens,
            ),
            say=self.say,
        )
        resumed = phase.resume()
        self.say(
            f"sft: {len(found)} demonstrations, "
            + (f"resumed at step {phase.progress.step}" if resumed else "from the pretrained model")
        )
        phase.run()
        export(decoder, tokenizer, out)
        self.say(f"sft: wrote {out}")
        return out


def make_starter(config: PretrainConfig, demonstrate: Demonstrate, say: Say = print) -> Path:
    """All stages in order; returns the fine-tuned model's Hugging Face folder. Resumes where an earlier call stopped."""
    starter = Starter(config, say)
    starter.tokenizer()
    starter.pretrain()
    starter.demonstrations(demonstrate)
    return starter.sft()


def export(decoder: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a Hugging Face folder with its tokenizer, whole or not at all."""
    with tempfile.TemporaryDirectory() as holder:
        tokenizer.save(holder)
        files = {path.name: path.read_bytes() for path in sorted(Path(holder).iterdir())}
    save_pretrained(decoder, folder, tokenizer_files=files)


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the stages that need neither tasks nor pods."""
    parser = argparse.ArgumentParser(prog="python -m etude.pretrain.starter", description=__doc__)
    parser.add_argument("--stage", choices=("tokenizer", "pretrain", "snapshot", "sft"), default="sft")
    parser.add_argument("--folder", default=None, help="where stages keep their output")
    parser.add_argument("--corpus", default=None, help="folder of the function corpus")
    parser.add_argument("--minutes", type=float, default=None, help="training minutes of pretraining, decay included")
    parser.add_argument("--threads", type=int, default=None)
    given = parser.parse_args(arguments)
    config = PretrainConfig()
    changes = {
        name: getattr(given, name) for name in ("folder", "corpus", "threads") if getattr(given, name) is not None
    }
    if given.minutes is not None:
        changes["pretrain"] = config.pretrain.model_copy(update={"budget_s": 60 * given.minutes})
    config = config.model_copy(update=changes)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    try:
        starter = Starter(config, say=lambda text: print(text, flush=True))
        if given.stage == "tokenizer":
            starter.tokenizer()
        elif given.stage == "pretrain":
            starter.pretrain()
        elif given.stage == "snapshot":
            starter.snapshot()
        else:
            starter.sft()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the next run resumes", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
