"""A tiny random target with a tokenizer, its answers, and drafters built for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import conf
from decode.sampling import RowSampler, law_of
from decode.types import Drafter, Sampling
from drafters.base import BuildContext, DrafterConfig, TargetParts
from drafters.lm import LmConfig
from drafters.lora import LoraDrafter
from drafters.losses import Objective
from drafters.retrieval import RetrievalDrafter
from drafters.retrieval_table import build_table
from kernels.reference import inverse_cdf, processed_probs
from pipeline.config import typed

YAML = {path.stem: path for path in Path(conf.__file__).parent.glob("drafter/*.yaml")}
VOCAB_SIZE = 160
NUM_REAL_IDS = 150  # the last ten columns of the tiny target are padding
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]  # the last ids, so that low ids do not hold them
EOS = NUM_REAL_IDS - 2
# Of a drafter that remembers; 11 leads nowhere.
CORPUS = [[3, 8, 1, 4, 0, 2], [6, 9, 10, 0, 8, 2, 3, 8, 1, 7], [*range(30, 110)]]
CUT = LmConfig(source=None, layers=[0, 1, -1], num_draft_vocab=0, train_head=False, dtype="auto")


def tiny_tokenizer(last_word: str = "word145") -> PreTrainedTokenizerFast:
    """Whole words as tokens; another last word makes it another tokenizer."""
    words = [f"word{i}" for i in range(NUM_REAL_IDS - len(SPECIAL) - 1)] + [last_word]
    vocab = {word: i for i, word in enumerate([*words, *SPECIAL])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|user|>"],
    )


def tiny_model(vocab_size: int = VOCAB_SIZE, seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    """Four layers of width 32, with weights large enough for laws far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        bos_token_id=EOS - 1,
        eos_token_id=EOS,
        tie_word_embeddings=True,
        initializer_range=0.25,
        **settings,
    )
    return LlamaForCausalLM(config).eval()


def make_drafter(name: str, target: TargetParts) -> Drafter:
    """The drafter of conf/drafter/<name>.yaml, its draft vocabulary cut to fit 160 ids; one that
    remembers has read CORPUS.
    """
    config: DrafterConfig = typed(OmegaConf.load(YAML[name]), f"drafter.{name}")
    if isinstance(config, LmConfig) and config.num_draft_vocab > NUM_REAL_IDS:
        config = replace(config, num_draft_vocab=100)
    members = {"ngram": "ngram", "generic": "lm"}  # names of the quick pool
    parts = {part: make_drafter(members.get(part, part), target) for part in config.part_names}
    drafter = config.build(BuildContext(target, parts=parts))
    if isinstance(drafter, LoraDrafter):
        disturb(drafter)
    if isinstance(drafter, RetrievalDrafter):
        drafter = RetrievalDrafter(drafter.config, build_table(CORPUS, drafter.config.longest, 10))
    return drafter


def disturb(drafter: LoraDrafter, seed: int = 1) -> None:
    """Move all adapters, so that their law is not the base's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in drafter.adapted.own_tensors().values():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))


def objective(
    name: str | None = None, *, position_weights: str = "uniform", **mix: float
) -> Objective:
    """One loss alone, or a mix of several, with drafts of 3 tokens."""
    return Objective(
        mix=mix if name is None else {name: 1.0},
        position_weights=position_weights,
        half_life=4.0,
        num_draft_tokens=3,
        lk_eta=3.0,
    )


class SpySampler(RowSampler):
    """Draws as decoding does, and keeps the rows that it was handed."""

    def __init__(self, sampling: Sampling, uniform: Callable[[int], float]) -> None:
        super().__init__(sampling, uniform, None)
        self.rows: list[Tensor] = []

    def draw(self, logits: Tensor) -> int:
        self.rows.append(logits.clone())
        return super().draw(logits)


def sampler(sampling: Sampling, generator: torch.Generator | None = None) -> SpySampler:
    """A sampler whose uniforms come from the generator; greedy needs none."""
    return SpySampler(
        sampling, lambda depth: torch.rand((), generator=generator, dtype=torch.float64).item()
    )


@dataclass(frozen=True)
class Answer:
    """What the answers artifact keeps of one prompt, for a tiny target."""

    token_ids: Tensor
    num_prompt_tokens: int
    sampling: Sampling
    logprobs: Tensor
    lse: Tensor
    topk_ids: Tensor
    topk_logits: Tensor


@torch.no_grad()
def answered(
    target: TargetParts, prompt: Sequence[int], num_tokens: int, sampling: Sampling, top: int = 16
) -> Answer:
    """The target's own answer under this law, token by token, with what is recorded about it."""
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens, rows, logprobs = list(prompt), [], []
    for _ in range(num_tokens):
        row = target.model(torch.tensor([tokens])).logits[0, -1:].float()
        probs = processed_probs(row, *law_of((sampling,)), None)
        uniform = torch.rand(1, generator=generator, dtype=torch.float64)
        tokens.append(int(inverse_cdf(probs, uniform)))
        rows.append(row[0])
        logprobs.append(float(probs[0, tokens[-1]].log()))
    logits = torch.stack(rows)
    best = logits.topk(top)
    return Answer(
        torch.tensor(tokens),
        len(prompt),
        sampling,
        torch.tensor(logprobs),
        logits.logsumexp(-1),
        best.indices,
        best.values,
    )
