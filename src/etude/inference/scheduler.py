"""Continuous batching: which sessions go into the next forward call, and what becomes of its logits.

Synchronous and confined to one thread. Each step feeds long prompts in one ragged prefill, then all that has a few ids to
feed (tool results, sampled ids) in another, sampling after each; ids that a grammar forces are taken without a forward.
Everything that outside callers ask (`admit`, `detach`, `close_session`, `swap`) happens between two steps, so a step sees
one version of the weights. Knows nothing of threads or sockets.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from etude.inference.cache import Session, SessionTable
from etude.inference.config import EngineConfig
from etude.inference.jobs import Job, JobState, Ledger, Sink, fault_job
from etude.inference.protocol import EngineFault, FaultKind, Finish, GenerateEnd, SwapMode, prefix_digest
from etude.inference.sampler import Bools, Doubles, Sampler, SampleRow
from etude.inference.weights import LiveWeights
from etude.model.cache import SHORT_RUN, KVCache
from etude.model.decoder import Decoder
from etude.records.errors import IntegrityError

EMPTY_DIGEST = prefix_digest(())


class Scheduler:
    """The sessions, jobs and pages of one engine."""

    def __init__(self, weights: LiveWeights, config: EngineConfig, sampler: Sampler, engine_id: str) -> None:
        model = weights.decoder.config
        self.weights, self.config, self.sampler, self.engine_id = weights, config, sampler, engine_id
        self.vocab_size = model.vocab_size
        self.cache = KVCache(model, config.slots, config.max_session_tokens)
        self.table = SessionTable(
            config.slots,
            config.max_session_tokens,
            (model.num_moe_layers, model.num_experts_per_tok),
            "uint8" if model.n_routed_experts <= 256 else "uint16",
            self.cache.truncate,
        )
        self.ledger = Ledger(config.finished_requests)
        self.running: dict[int, Job] = {}
        """By slot."""
        self.waiting: deque[Job] = deque()
        self.draining = False
        self.fenced = ""
        self.fence_kind = FaultKind.INTEGRITY
        self.tokens_sampled = self.tokens_prefilled = self.tokens_shared = self.steps = 0

    # -- what callers ask, between steps ---------------------------------------------------------------------------

    def admit(self, job: Job, sink: Sink, now: float) -> None:
        """Starts a request, joins it to its earlier self when the id is known, queues it, or answers with a fault."""
        known = self.ledger.find(job.request.request_id)
        fault: EngineFault | None = None
        if self.fenced:
            fault = EngineFault(self.fence_kind, self.fenced)
        elif known is not None:
            if known.request == job.request:
                known.attach(sink)
                self._resume(known, now)
                return
            fault = EngineFault(
                FaultKind.BAD_REQUEST, f"request_id {job.request.request_id} was used for another request"
            )
        elif self.draining:
            fault = EngineFault(FaultKind.DRAINING, f"engine {self.engine_id} is being drained")
        else:
            fault = self._place(job, now)
        if fault is not None:
            sink.send([fault])
            return
        self.ledger.add(job)
        job.attach(sink)

    def _place(self, job: Job, now: float) -> EngineFault | None:
        request = job.request
        session = self.table.get(request.session_id)
        if any(waiting.request.session_id == request.session_id for waiting in self.waiting):
            return EngineFault(
                FaultKind.BAD_REQUEST, f"session {request.session_id} already waits with another request"
            )
        if session is None and request.prefix_digest != EMPTY_DIGEST:
            return EngineFault(FaultKind.PREFIX_MISMATCH, f"session {request.session_id} is not held here")
        if session is None and not request.new_token_ids:
            return EngineFault(FaultKind.BAD_REQUEST, f"session {request.session_id} would begin without a token")
        if session is None:
            session = self._open(request.session_id, now)
            if session is None:
                if len(self.waiting) >= self.config.queue_limit:
                    return EngineFault(FaultKind.BUSY, f"{self.config.slots} sessions run and {len(self.waiting)} wait")
                job.deadline = now + self.config.queue_timeout_s
                self.waiting.append(job)
                return None
        elif (fault := self._continue(session, request.prefix_digest)) is not None:
            return fault
        total = len(session.ids) + len(request.new_token_ids) + request.max_tokens
        if total > self.config.max_session_tokens:
            limit = self.config.max_session_tokens
            return EngineFault(FaultKind.TOO_LONG, f"session {session.id} would hold {total} tokens; at most {limit}")
        if not session.ids and not request.new_token_ids:
            return EngineFault(FaultKind.BAD_REQUEST, f"session {session.id} would begin without a token")
        self._start(job, session, now)
        return None

    def _continue(self, session: Session, digest: str) -> EngineFault | None:
        """Brings a held session to the prefix that the client names, or says why not."""
        if not session.idle:
            return EngineFault(FaultKind.BAD_REQUEST, f"session {session.id} already runs another request")
        lengths = [len(session.ids)] if session.job is None else [len(session.ids), session.job.base]
        match = next((n for n in lengths if prefix_digest(session.ids[:n]) == digest), None)
        if match is None and digest == EMPTY_DIGEST:
            match, session.turn = 0, 0
        if match is None:
            held = f"session {session.id} holds {len(session.ids)} other ids"
            return EngineFault(FaultKind.PREFIX_MISMATCH, held)
        self._abandon(session)
        self.table.truncate(session, match)
        return None

    def _open(self, session_id: str, now: float) -> Session | None:
        """A new session in a free slot or in that of the idle session used least recently; None when all are running."""
        if not self.table.free_slots:
            victim = self.table.evictable()
            if victim is None:
                return None
            self._abandon(victim)
            self.table.close(victim)
        return self.table.open(session_id, now)

    def _abandon(self, session: Session) -> None:
        if session.job is not None:
            self.ledger.drop(session.job)
            session.job.state = JobState.ENDED
        session.job, session.suspended = None, False

    def _start(self, job: Job, session: Session, now: float) -> None:
        job.session, job.base, job.turn, job.state = session, len(session.ids), session.turn, JobState.RUNNING
        session.ids.extend(job.request.new_token_ids)
        session.job, session.turn = job, session.turn + 1
        self.table.touch(session, now)
        self.running[session.slot] = job

    def _resume(self, job: Job, now: float) -> None:
        session = job.session
        if job.state is JobState.SUSPENDED and session is not None:
            session.suspended, job.state = False, JobState.RUNNING
            self.table.touch(session, now)
            self.running[session.slot] = job

    def detach(self, job_id: str, sink: Sink, now: float) -> None:
        """A reader is gone. A generation without readers stops; its session waits for the client for a grace period."""
        job = self.ledger.find(job_id)
        if job is None or sink not in job.sinks:
            return
        job.sinks.remove(sink)
        if job.sinks:
            return
        if job.state is JobState.WAITING:
            self.waiting.remove(job)
            self.ledger.drop(job)
        elif job.state is JobState.RUNNING and job.session is not None:
            del self.running[job.session.slot]
            job.state, job.session.suspended, job.session.last_used = JobState.SUSPENDED, True, now

    def close_session(self, session_id: str) -> None:
        """Ends what the session runs or waits for (`cancelled`) and frees its slot."""
        for job in [job for job in self.waiting if job.request.session_id == session_id]:
            self.waiting.remove(job)
            self.ledger.drop(job)
            fault_job(job, FaultKind.CANCELLED, f"session {session_id} was closed")
        session = self.table.get(session_id)
        if session is None:
            return
        if session.job is not None:
            self.running.pop(session.slot, None)
            fault_job(session.job, FaultKind.CANCELLED, f"session {session_id} was closed")
            self._abandon(session)
        self.table.close(session)

    def drain(self) -> None:
        """Refuses what comes and what waits; running generations go on."""
        self.draining = True
        while self.waiting:
            job = self.waiting.popleft()
            self.ledger.drop(job)
            fault_job(job, FaultKind.DRAINING, f"engine {self.engine_id} is being drained")

    def swap(self, staged: Decoder, policy_version: int, manifest_key: str, digest: str, mode: SwapMode) -> None:
        """Serves another version from the next step on. Raises IntegrityError and fences the engine when it is not proven."""
        try:
            self.weights.swap(staged, policy_version, manifest_key, digest)
        except IntegrityError as error:
            self.fence(FaultKind.INTEGRITY, str(error))
            raise
        if mode is SwapMode.RECOMPUTE:
            for session in self.table:
                self.table.forget_pages(session)

    def verify(self) -> None:
        """Hashes the live tensors. Raises IntegrityError and fences the engine when they are not those of the version."""
        try:
            self.weights.verify()
        except IntegrityError as error:
            self.fence(FaultKind.INTEGRITY, str(error))
            raise

    def fence(self, kind: FaultKind, reason: str) -> None:
        """Refuses to serve from now on, and ends everything that runs or waits with that reason."""
        if not self.fenced:
            self.fenced, self.fence_kind = reason, kind
        for job in self.ledger.live():
            self.ledger.drop(job)
            fault_job(job, self.fence_kind, self.fenced)
        self.running.clear()
        self.waiting.clear()
        for session in self.table:
            session.job = None
            self.table.close(session)

    def sweep(self, now: float) -> None:
        """Frees sessions idle for too long and rolls back generations whose client did not come back."""
        for session in self.table:
            if (
                session.suspended
                and session.job is not None
                and now - session.last_used > self.config.reconnect_grace_s
            ):
                base = session.job.base
                self._abandon(session)
                self.table.truncate(session, base)
                if base == 0:
                    self.table.close(session)
            elif session.idle and now - session.last_used > self.config.idle_timeout_s:
                self._abandon(session)
                self.table.close(session)
        while self.waiting and self.waiting[0].deadline < now:
            job = self.waiting.popleft()
            self.ledger.drop(job)
            fault_job(job, FaultKind.BUSY, f"no slot came free within {self.config.queue_timeout_s:g} s")

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self, now: float) -> bool:
        """One round: a ragged prefill, then one call for every session that has a few ids to feed. False when nothing runs."""
        while self.waiting and (session := self._open(self.waiting[0].request.session_id, now)) is not None:
            self._start(self.waiting.popleft(), session, now)
        if not self.running:
            return False
        prompts = self._prefill()
        if prompts:
            self._advance(prompts)
            self._share(job.session for job in self._jobs() if job.session is not None and job.session.cached == 0)
        few = [job for job in self._jobs() if self._is_short(job)]
        if few:
            self._advance(few)
        for job in self._jobs():
            if job.finish is not None and job.due <= 0:
                self._finish(job, job.finish, now)
        self.steps += 1
        return True

    def _jobs(self) -> list[Job]:
        return list(self.running.values())

    def _is_short(self, job: Job) -> bool:
        """Whether the job's ids go with the decoding ones: few, and not a new session's, which might be copied."""
        assert job.session is not None
        return job.due == 1 or (job.session.cached > 0 and 0 < job.due <= min(SHORT_RUN, self.config.prefill_tokens))

    def _prefill(self) -> list[Job]:
        """Jobs with many ids to feed, oldest first, up to `prefill_tokens` together (at least one).

        Of sessions that begin with the same ids one goes ahead; the others copy its pages after this call.
        """
        batch: list[Job] = []
        ahead: dict[tuple[int, ...], Session] = {}
        budget = self.config.prefill_tokens
        for job in self._jobs():
            session = job.session
            assert session is not None
            if session.cached == 0 and self.config.share_prompts:
                leader = ahead.setdefault(tuple(session.ids), session)
                if leader.cached == 0 and leader is not session:
                    continue
                self._share((session,))
            if job.due > 1 and not self._is_short(job) and (not batch or job.due <= budget):
                batch.append(job)
                budget -= job.due
        return batch

    def _share(self, sessions: Iterable[Session]) -> None:
        """Copies pages and routes of a common prompt of the same weights into sessions that have none yet."""
        if not self.config.share_prompts:
            return
        for session in sessions:
            donor, count = self.table.shared_prompt(session, self.weights.generation)
            if not count:
                continue
            self.cache.copy(donor, session.slot, count)
            self.table.routes[session.slot, :count] = self.table.routes[donor, :count]
            session.cached = count
            self.tokens_shared += count

    def _advance(self, jobs: Sequence[Job]) -> None:
        """Feeds each job the ids that are due (as many as one call takes) and samples for those that then miss one."""
        sessions = [job.session for job in jobs if job.session is not None]
        counts = [min(job.due, self.config.prefill_tokens) for job in jobs]
        width = max(counts)
        rows = [
            session.ids[session.cached : session.cached + count] + [0] * (width - count)
            for session, count in zip(sessions, counts)
        ]
        lengths_B = torch.tensor(counts)
        slots_B = torch.tensor([session.slot for session in sessions])
        decoder = self.weights.decoder
        out = decoder.extend(torch.tensor(rows), lengths_B, self.cache, slots_B)
        routes = out.routes.numpy()
        for i, (job, session, count) in enumerate(zip(jobs, sessions, counts)):
            if count > 1:
                prompt = job.base + len(job.request.new_token_ids)
                self.tokens_prefilled += max(0, min(session.cached + count, prompt) - session.cached)
            self.table.routes[session.slot, session.cached : session.cached + count] = routes[i, :count]
            session.cached += count
            if session.cached == count:
                self.table.remember_prompt(session, self.weights.generation)
        ready = [i for i, session in enumerate(sessions) if session.pending == 0]
        if ready:
            last_B = [counts[i] - 1 for i in ready]
            logits_BV = decoder.logits(out.hidden[ready, last_B]).to(torch.float64).numpy()
            self._sample([jobs[i] for i in ready], logits_BV)

    def _sample(self, jobs: Sequence[Job], logits_BV: Doubles) -> None:
        """Draws one id for each job, and takes those that its grammar forces after it."""
        allowed_BV: Bools | None = None
        if any(job.grammar is not None for job in jobs):
            allowed_BV = np.ones(logits_BV.shape, dtype=np.bool_)
            for allowed_V, job in zip(allowed_BV, jobs):
                if (mask := job.mask()) is not None:
                    # The model's vocabulary may be padded past the tokenizer's.
                    allowed_V[: len(mask)], allowed_V[len(mask) :] = mask, False
            for job, packed_W in zip(jobs, np.packbits(allowed_BV, axis=1)):
                if job.grammar is not None:
                    job.masks.append(packed_W)
        ids_B, logprobs_B = self.sampler.sample(
            logits_BV,
            np.array([job.request.temperature for job in jobs]),
            np.array([job.uniforms[len(job.token_ids)] for job in jobs]),
            allowed_BV,
            [
                SampleRow(job.request.request_id, job.session.id, job.turn, len(job.token_ids), job.session.ids)
                for job in jobs
                if job.session is not None
            ],
        )
        version = self.weights.policy_version
        for job, token_id, logprob in zip(jobs, ids_B.tolist(), logprobs_B.tolist()):
            held = len(job.token_ids)
            job.take(token_id, logprob, version)
            while job.finish is None and (forced := job.forced()) is not None:
                only_V = np.zeros(self.vocab_size, dtype=np.bool_)
                only_V[forced] = True
                job.masks.append(np.packbits(only_V))
                job.take(forced, 0.0, version)
            self.tokens_sampled += len(job.token_ids) - held
            if job.finish is None and len(job.token_ids) - job.flushed >= self.config.flush_tokens:
                job.flush()

    def _finish(self, job: Job, finish: Finish, now: float) -> None:
        session = job.session
        assert session is not None
        known = len(session.ids) - 1
        routes = self.table.routes[session.slot, :known]
        raw = routes.tobytes()
        row_bytes = routes[0].nbytes
        job.end = GenerateEnd(
            finish=finish,
            sampled=len(job.token_ids),
            routes_digest=hashlib.sha256(raw).hexdigest(),
            routes_start=session.delivered,
            routes=raw[session.delivered * row_bytes :],
            routes_shape_tail=(routes.shape[1], routes.shape[2]),
            routes_dtype=routes.dtype.name,
            masks=job.packed_masks(),
            session_length=len(session.ids),
            engine_id=self.engine_id,
        )
        messages = [*job.run(job.flushed, len(job.token_ids)), job.end]
        for sink in job.sinks:
            sink.send(messages)
        job.sinks.clear()
        job.state, job.session = JobState.ENDED, None
        session.delivered, session.job = known, None
        del self.running[session.slot]
        self.table.touch(session, now)
        self.ledger.finish(job)
