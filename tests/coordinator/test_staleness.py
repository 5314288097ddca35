"""Both rules of DESIGN decision 6 hold at every instant of any run, and no run stands still.

The oracle below keeps its own plain lists and states the rules by brute force.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.coordinator.staleness import Admission, Refusal
from etude.records.errors import IntegrityError


class World:
    """A simulated run: workers, a trainer and an engine that lags behind it."""

    def __init__(self, staleness: int, batch: int, rng: random.Random) -> None:
        self.S, self.B, self.rng = staleness, batch, rng
        self.admission = Admission(staleness, batch)
        self.oldest: dict[int, int] = {}
        self.started: set[int] = set()
        self.queued: set[int] = set()
        self.batch: tuple[int, ...] = ()
        self.step = self.engine = self.draws = 0
        self.trained: list[int] = []
        self.void = 0

    def actions(self) -> list[str]:
        found = []
        if self.admission.may_draw(self.engine):
            found.append("draw")
        flying = [g for g in self.oldest if g not in self.queued and g not in self.batch]
        if any(g not in self.started for g in flying):
            found.append("start")
        if any(g in self.started for g in flying):
            found.append("finish")
        if isinstance(self.admission.next_batch(), tuple):
            found.append("form")
        if self.batch:
            found.append("commit")
        if self.engine < self.step:
            found.append("apply")
        return found

    def do(self, action: str) -> None:
        flying = [g for g in self.oldest if g not in self.queued and g not in self.batch]
        if action == "draw":
            assert len(self.oldest) < (self.S + 1) * self.B, "rule (a)"
            self.admission.draw(self.draws, self.engine)
            self.oldest[self.draws] = self.engine
            self.draws += 1
        elif action == "start":  # the first token is of the version that the engine serves now
            group = self.rng.choice([g for g in flying if g not in self.started])
            self.started.add(group)
            self.oldest[group] = self.engine
        elif action == "finish":
            group = self.rng.choice([g for g in flying if g in self.started])
            self.admission.seal(group, self.oldest[group])
            self.admission.queue(group)
            self.queued.add(group)
        elif action == "void":
            group = self.rng.choice(sorted(g for g in self.oldest if g not in self.batch))
            self.admission.void(group)
            del self.oldest[group]
            self.queued.discard(group)
            self.void += 1
        elif action == "form":
            found = self.admission.next_batch()
            assert isinstance(found, tuple) and len(found) == self.B
            self.admission.form(found)
            self.batch = found
            self.queued -= set(found)
            assert all(self.step - self.oldest[g] <= self.S for g in found), "the bound"
        elif action == "return":
            self.admission.give_back()
            self.queued |= set(self.batch)
            self.batch = ()
        elif action == "commit":
            self.admission.commit()
            self.trained += self.batch
            for group in self.batch:
                del self.oldest[group]
            self.batch, self.step = (), self.step + 1
        elif action == "apply":
            self.engine = self.rng.randint(self.engine + 1, self.step)
        self.check()

    def check(self) -> None:
        assert len(self.oldest) <= (self.S + 1) * self.B, "rule (a)"
        assert self.admission.live == len(self.oldest) and self.admission.step == self.step
        base = self.step + bool(self.batch)
        due = [step + self.S for g, step in self.oldest.items() if g not in self.batch]
        for j in range(self.S + 3):
            assert sum(d < base + j for d in due) <= j * self.B, f"rule (b), j={j}"
        assert self.admission.overdue() == ()
        assert self.draws == len(self.oldest) + len(self.trained) + self.void


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 10**9), st.floats(0.0, 0.15), st.integers(20, 200))
def test_both_rules_hold_at_every_instant_and_the_run_goes_on(
    staleness: int, batch: int, seed: int, faults: float, length: int
) -> None:
    rng = random.Random(seed)
    world = World(staleness, batch, rng)
    weights = {name: rng.random() + 0.05 for name in ("draw", "start", "finish", "form", "commit", "apply")}
    for _ in range(length):
        possible = world.actions()
        assert possible, "deadlock"
        if rng.random() < faults and any(g not in world.batch for g in world.oldest):
            world.do("void")
        elif world.batch and rng.random() < faults:
            world.do("return")
        else:
            world.do(rng.choices(possible, [weights[name] for name in possible])[0])
    goal = world.step + 5
    for _ in range(goal * 20 * batch * (staleness + 2)):  # any fair scheduler gets on from any reachable state
        if world.step >= goal:
            return
        possible = world.actions()
        assert possible, "deadlock"
        world.do(rng.choice(possible))
    pytest.fail(f"step {world.step} of {goal}")


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_the_gate_has_no_off_by_one(staleness: int) -> None:
    """PrimeIntellect-ai/prime-rl#2937: a lead off by one paused dispatch forever."""
    batch = 2
    world = World(staleness, batch, random.Random(0))
    while world.admission.may_draw(world.engine):
        world.do("draw")
    assert world.draws == (staleness + 1) * batch
    for _ in range(world.draws):
        world.do("start")
        world.do("finish")
    world.do("form")
    assert not world.admission.may_draw(world.engine), "a batch in training is not yet trained"
    world.do("commit")
    assert not world.admission.may_draw(world.engine), "the engine still serves the step before"
    assert world.admission.may_draw(1)
    world.do("apply")
    for _ in range(batch):
        world.do("draw")
    assert not world.admission.may_draw(world.engine)


def test_the_trainer_waits_for_an_urgent_group_instead_of_dropping_it() -> None:
    """rules of tinker-cookbook#822: slow, hard tasks are not starved."""
    admission = Admission(staleness=1, batch_groups=2)
    for draw in range(4):
        admission.draw(draw, 0)
    for draw in (1, 2):
        admission.seal(draw, 0)
        admission.queue(draw)
    assert admission.next_batch() == (1, 2)
    admission.form((1, 2))
    admission.commit()
    for draw in (4, 5):
        admission.draw(draw, 1)
        admission.seal(draw, 1)
        admission.queue(draw)
    refusal = admission.next_batch()
    assert isinstance(refusal, Refusal) and refusal.rule == "b" and "2 groups would be due by step 1" in refusal.why
    assert admission.waited_for() == (0, 3)
    with pytest.raises(IntegrityError, match=r"rule \(b\)"):
        admission.form((4, 5))


def test_slow_tasks_are_trained_as_often_as_they_are_drawn() -> None:
    rng = random.Random(5)
    admission, now, engine = Admission(2, 4), 0.0, 0
    ends: list[tuple[float, int]] = []
    slow: set[int] = set()
    trained: list[int] = []
    drawn = 0
    while len(trained) < 400:
        while admission.may_draw(engine):
            duration = 20.0 if rng.random() < 0.2 else 1.0
            slow |= {drawn} if duration > 1 else set()
            admission.draw(drawn, engine)
            ends.append((now + duration, drawn))
            drawn += 1
        ends.sort()
        if ends and isinstance(admission.next_batch(), Refusal):
            now, draw = ends.pop(0)
            admission.seal(draw, admission.due(draw) - 2)
            admission.queue(draw)
        while isinstance(batch := admission.next_batch(), tuple):
            admission.form(batch)
            trained += batch
            admission.commit()
            engine += 1
    share = [len(slow & set(part)) / len(part) for part in (trained, list(range(len(trained))))]
    assert abs(share[0] - share[1]) < 0.02


def test_the_last_groups_are_trained_when_the_prompts_run_out() -> None:
    """thinking-machines-lab/tinker-cookbook#480: a hang when the data ends."""
    admission = Admission(1, 4)
    for draw in range(3):
        admission.draw(draw, 0)
    for draw in (2, 0):
        admission.seal(draw, 0)
        admission.queue(draw)
    assert isinstance(admission.next_batch(final=True), Refusal), "one is still in flight"
    admission.void(1)
    assert isinstance(admission.next_batch(), Refusal)
    assert admission.next_batch(final=True) == (0, 2)


def test_misuse_is_an_integrity_error_with_the_numbers() -> None:
    admission = Admission(0, 1)
    admission.draw(0, 0)
    with pytest.raises(IntegrityError, match="drawn twice"):
        admission.draw(0, 0)
    with pytest.raises(IntegrityError, match=r"rule \(a\).*1 groups in flight and queued; the bound is 1"):
        admission.draw(1, 0)
    with pytest.raises(IntegrityError, match="not ready"):
        admission.form([0])
    with pytest.raises(IntegrityError, match="not live"):
        admission.seal(9, 0)
    with pytest.raises(IntegrityError, match="holds a token of -1"):
        admission.seal(0, -1)
    with pytest.raises(IntegrityError, match="no batch is formed"):
        admission.commit()
    admission.queue(0)
    admission.form([0])
    with pytest.raises(IntegrityError, match="cannot be void"):
        admission.void(0)
