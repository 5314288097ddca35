"""The `pretrain` section of the config tree: data mix, optimiser, schedule, budgets and places of the starter recipe."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class EpisodeMix(BaseModel):
    """What an episode is drawn as, and what each kind of token weighs in the loss."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    raw: float = Field(0.08, ge=0, le=1, description="Share of episodes that are a source file on its own.")
    several_bugs: float = Field(0.5, ge=0, le=1, description="Share with several bugs, repaired in one action.")
    most_bugs: int = Field(5, ge=2, description="Most bugs of such an episode.")
    slips: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of repair episodes whose bugs are blind slips (any name, number or operator for another).",
    )
    ending: float = Field(
        0.3, ge=0, le=1, description="Share of one-bug episodes that go on to a passing run and `finish`."
    )
    wrong_edit: float = Field(
        0.3, ge=0, le=1, description="Share of one-bug episodes that open with a wrong edit and a failing run."
    )
    placeholder_check: float = Field(
        0.7,
        ge=0,
        le=1,
        description="Share of one-bug episodes without a known failing check that show a stand-in for one.",
    )
    failing_only: bool = Field(False, description="Only mutants whose failing check is known.")
    operator_weights: dict[str, float] = Field(
        {"wrong_name": 0.1, "swapped_arguments": 0.4},
        description="Probability of keeping a mutant, by operator; 1 where not named.",
    )
    action_weight: float = Field(1.0, ge=0, description="Loss weight of a token that the policy will sample.")
    prompt_weight: float = Field(0.4, ge=0, description="Loss weight of a sampled token of the broken file.")
    prompt_share: float = Field(0.35, ge=0, le=1, description="Share of the broken file's tokens that are targets.")
    longest_field: int = Field(24, gt=0, description="Longest `new` of an edit, in tokens (the grammar's limit).")
    raw_weight: float = Field(0.3, ge=0, description="Loss weight of a token of a raw document.")
    longest: int = Field(448, gt=0, description="Longer episodes are dropped, in tokens.")


class PhaseConfig(BaseModel):
    """One training phase: optimiser, batch, budget and what is written when."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    muon_lr: float = Field(
        0.006, gt=0, description="Muon's learning rate; above about 0.01 the induction circuit dies."
    )
    adam_lr: float = Field(1e-3, gt=0, description="Adam's learning rate for embeddings, norms and routers.")
    adam_betas: tuple[float, float] = Field((0.9, 0.95), description="Adam's decay rates.")
    warmup_steps: int = Field(30, ge=0, description="Linear warm-up, in steps.")
    decay_share: float = Field(0.35, gt=0, le=1, description="Share of the whole phase in which the rate falls.")
    floor: float = Field(0.02, ge=0, le=1, description="Learning-rate scale at the end of the decay.")
    router_bias_rate: float = Field(0.003, ge=0, description="Step of the load-balancing router bias per update.")
    clip: float = Field(1.0, gt=0, description="Largest gradient norm.")
    batch_tokens: int = Field(4096, gt=0, description="Tokens of a batch, padding included.")
    pool_batches: int = Field(32, gt=0, description="Batches whose episodes are sorted by length together.")
    budget_tokens: int | None = Field(None, description="Ends the phase after this many tokens, padding not counted.")
    budget_s: float | None = Field(2700.0, description="Ends the phase after this much training time, in seconds.")
    checkpoint_s: float = Field(60.0, gt=0, description="Seconds between checkpoints.")
    evaluate_s: float = Field(240.0, gt=0, description="Seconds between evaluations.")
    evaluate_rows: int = Field(200, gt=0, description="Held-aside functions in an evaluation.")


class PretrainConfig(BaseModel):
    """The whole recipe of the starter policy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str = Field(".cache/starter", description="Where stages keep their checkpoints and logs.")
    corpus: str = Field(".cache/corpus", description="Folder of `pretrain.jsonl.zst` and `sft.jsonl.zst`.")
    vocab_size: int = Field(2048, gt=300, description="Tokenizer's ids.")
    seed: int = Field(0, description="Seed of weights, data order and draws.")
    threads: int = Field(1, gt=0, description="Compute threads of a training process.")
    aside: int = Field(400, ge=0, description="Functions of the pretrain split kept out of training, for evaluation.")
    sft_aside: int = Field(80, ge=0, description="The same of the SFT split.")
    tested_share: float = Field(
        0.1, ge=0, description="Draws of functions with failing checks, for each other one; flat rate."
    )
    decay_tested_share: float = Field(0.35, ge=0, description="The same while the rate falls.")
    tested_mix: EpisodeMix = Field(
        default_factory=lambda: EpisodeMix(raw=0.0, several_bugs=0.2, ending=0.5),
        description="Episodes of functions with failing checks (the SFT split's).",
    )
    mix: EpisodeMix = Field(default_factory=EpisodeMix, description="Episodes while the rate is flat.")
    decay_mix: EpisodeMix = Field(
        default_factory=lambda: EpisodeMix(raw=0.04, several_bugs=0.3, ending=0.6, prompt_weight=0.2, raw_weight=0.1),
        description="Episodes while the rate falls.",
    )
    pretrain: PhaseConfig = Field(default_factory=PhaseConfig, description="The pretraining phase.")
    demonstrations: str = Field(
        ".cache/starter/demonstrations.zst", description="File of rollout records of the scripted solver on SFT tasks."
    )
    sft_mix: EpisodeMix = Field(
        default_factory=lambda: EpisodeMix(
            raw=0.04, several_bugs=0.3, ending=0.6, prompt_weight=0.2, raw_weight=0.1, slips=0.96
        ),
        description="Corpus episodes of fine-tuning: mostly blind slips, so that what bugs are like is left to find out.",
    )
    sft_reminder: float = Field(0.95, ge=0, lt=1, description="Share of corpus episodes in fine-tuning.")
    sft: PhaseConfig = Field(
        default_factory=lambda: PhaseConfig(
            muon_lr=0.003, adam_lr=5e-4, budget_s=270.0, decay_share=0.7, evaluate_s=100.0
        ),
        description="The fine-tuning phase on demonstrations.",
    )
