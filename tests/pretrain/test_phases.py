"""A phase: an interrupted run ends where an uninterrupted one does, the decay can be asked for, and the loss falls."""

import json
import random
from pathlib import Path

import pytest
import torch

from etude.model.config import ModelConfig
from etude.model.decoder import Decoder
from etude.pretrain.batches import Batch, Cursor, Episode, PoolSource, Stream, batches_of, bucket, pad
from etude.pretrain.config import PhaseConfig
from etude.pretrain.objective import balance_routers, batch_loss, evaluate
from etude.pretrain.phases import DECAY_FILE, Phase
from etude.records.errors import BadInput, CheckpointError

torch.set_num_threads(1)
TINY = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    n_routed_experts=4,
    num_experts_per_tok=2,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    tie_word_embeddings=True,
    max_position_embeddings=64,
)


class Counting(PoolSource):
    """Runs of consecutive numbers: a task with a learnable next token."""

    def pool(self, number: int) -> list[Episode]:
        rng = random.Random(number)
        made = []
        for _ in range(12):
            start, length = rng.randrange(1, 20), rng.randrange(4, 20)
            ids = [start + i for i in range(length)]
            made.append(Episode("count", ids, [1.0] * length, [i > 2 for i in range(length)]))
        return made


def phase(folder: Path, **changes: object) -> Phase:
    torch.manual_seed(0)
    config = PhaseConfig(
        budget_s=None, budget_tokens=2000, batch_tokens=60, warmup_steps=2, muon_lr=0.02, adam_lr=1e-2
    ).model_copy(update=changes)
    return Phase("count", Decoder(TINY), Counting(), config, folder, say=lambda text: None)


def weights(made: Phase) -> dict[str, torch.Tensor]:
    return made.decoder.state_dict()


def test_resuming_gives_the_uninterrupted_run_bit_for_bit(tmp_path: Path) -> None:
    whole = phase(tmp_path / "whole")
    whole.run()
    steps = whole.progress.step
    part = phase(tmp_path / "part")
    part.run(max_steps=steps // 3)
    for stop in (steps // 3, steps):
        part = phase(tmp_path / "part")
        assert part.resume()
        part.run(max_steps=stop)
    assert part.progress.done and part.progress.step == steps
    assert part.progress.tokens == whole.progress.tokens and part.progress.cursor == whole.progress.cursor
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(part)[name]), name


def test_the_loss_falls_and_the_log_holds_every_step(tmp_path: Path) -> None:
    made = phase(tmp_path)
    held = list(batches_of(Counting().pool(999), 60, 0))
    before = evaluate(made.decoder, held).report()["count"]["loss"]
    made.validation = lambda: held
    made.run()
    lines = [json.loads(line) for line in (tmp_path / "count.log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == list(range(1, made.progress.step + 1))
    after = lines[-1]["eval"]["count"]
    assert after["loss"] < before - 1 and 0 <= after["exact"] <= 1


def test_the_decay_file_starts_the_decay_and_ends_the_phase(tmp_path: Path) -> None:
    made = phase(tmp_path, budget_tokens=10**9, decay_share=0.5)
    told: list[int] = []
    made.on_decay = lambda: told.append(made.progress.step)
    made.run(max_steps=8)
    assert not told
    (tmp_path / DECAY_FILE).write_text("")
    made.run()
    assert told == [8] and made.progress.done and made.progress.step == 16


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    made = phase(tmp_path)
    made.run(max_steps=1)
    made.state_path.write_bytes(made.state_path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="state"):
        phase(tmp_path).resume()


def test_batches_hold_every_episode_once_within_their_size() -> None:
    episodes = Counting().pool(3)
    batches = bucket(episodes, 60)
    assert sorted(map(id, episodes)) == sorted(id(e) for members in batches for e in members)
    assert all(len(members) * max(len(e.ids) for e in members) <= 60 for members in batches)


def test_a_stream_goes_on_from_its_cursor() -> None:
    def stream(cursor: Cursor) -> Stream:
        return Stream(Counting(), seed=1, batch_tokens=60, pad_id=0, cursor=cursor)

    first = stream(Cursor())
    cursors, batches = [], []
    for _ in range(9):
        cursors.append(first.cursor)
        batches.append(first.next())
    again = stream(cursors[5])
    for batch in batches[5:]:
        assert (again.next().ids_BT == batch.ids_BT).all()


def test_padding_and_unweighted_targets_do_not_touch_the_loss() -> None:
    torch.manual_seed(0)
    decoder = Decoder(TINY)
    episodes = [
        Episode("a", [1, 2, 3, 4], [0.0, 1.0, 0.0, 0.5], [False] * 4),
        Episode("a", [5, 6], [0.0, 2.0], [True] * 2),
    ]
    together = batch_loss(decoder, pad(episodes, 0)).total

    @torch.no_grad()
    def alone(episode: Episode) -> float:
        ids = torch.tensor([episode.ids])
        logs = decoder.logits(decoder(ids).hidden).log_softmax(-1)[0, :-1]
        return sum(-float(logs[t, i]) * w for t, (i, w) in enumerate(zip(episode.ids[1:], episode.weights[1:])))

    assert float(together.detach()) == pytest.approx(sum(map(alone, episodes)) / 3.5, rel=1e-5)


def test_greedy_exactness_is_that_of_real_greedy_decoding(tmp_path: Path) -> None:
    made = phase(tmp_path)
    made.run()
    for episode in Counting().pool(50):
        batch: Batch = pad([episode], 0)
        exact = evaluate(made.decoder, [batch]).report()["count"]["exact"] == 1.0
        ids = list(episode.ids[:3])
        while len(ids) < len(episode.ids):
            ids.append(int(made.decoder.logits(made.decoder(torch.tensor([ids])).hidden[:, -1]).argmax()))
        assert exact == (ids == episode.ids)


def test_router_bias_moves_towards_idle_experts() -> None:
    decoder = Decoder(TINY)
    balance_routers(decoder, torch.tensor([[9, 1, 5, 5]]), 0.01)
    bias = next(buffer for name, buffer in decoder.named_buffers() if name.endswith("e_score_correction_bias"))
    torch.testing.assert_close(bias, torch.tensor([-0.01, 0.01, 0.0, 0.0]))


def test_two_phases_do_not_train_in_one_folder(tmp_path: Path) -> None:
    second = phase(tmp_path)
    first = phase(tmp_path)
    first.validation = lambda: second.run(max_steps=1) and []
    with pytest.raises(BadInput, match="lock"):
        first.run()
