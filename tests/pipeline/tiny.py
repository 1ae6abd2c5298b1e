"""A target small enough for every test: a Llama of four layers, a tokenizer, a chat template."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(92)]
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
VOCAB_SIZE = len(SPECIAL) + len(WORDS)  # 97: no power of two, so that a wrong stride shows
EOS = SPECIAL.index("</s>")
TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|> {{ message['content'] }} </s> "
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One id a word; whitespace separates."""
    vocab = {word: place for place, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
    )
    fast.chat_template = TEMPLATE
    return fast


def tiny_model(seed: int = 0, num_layers: int = 4) -> LlamaForCausalLM:
    """Random weights, drawn wide enough that its law is far from uniform and its answers differ."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    return LlamaForCausalLM(config).eval()


def tiny_target_folder(folder: Path, seed: int = 0) -> Path:
    """Write model and tokenizer as a Hugging Face folder."""
    tiny_model(seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_encoder_folder(folder: Path, seed: int = 0) -> Path:
    """Write a sentence encoder of one layer, 16 wide, as sentence-transformers keeps one."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=EOS,
    )
    parts = folder.with_name(folder.name + "-parts")
    BertModel(config).save_pretrained(parts)
    tiny_tokenizer().save_pretrained(parts)
    words = Transformer(str(parts), max_seq_length=64)
    SentenceTransformer(modules=[words, Pooling(16)]).save(str(folder))
    return folder


def tiny_prompts(path: Path, families: int = 12, seed: int = 0) -> Path:
    """Write prompts of two domains as JSON lines, two of each family."""
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for domain in ("code", "chat"):
            for place in range(2 * families):
                words = draw.choices(WORDS, k=draw.randint(3, 9))
                row = {"prompt": " ".join(words), "family": f"{domain}-{place // 2}"}
                file.write(json.dumps({**row, "domain": domain}) + "\n")
    return path


def tiny_overrides(folder: Path) -> list[str]:
    """What makes the main job a matter of seconds: own target, encoder and prompts in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_target_folder(folder / "target")
    tiny_encoder_folder(folder / "encoder")
    tiny_prompts(folder / "prompts.jsonl")
    return [
        "experiment=smoke",
        "target=local",
        f"target.name_or_path={folder / 'target'}",
        "encoder=local",
        f"encoder.name_or_path={folder / 'encoder'}",
        "data=jsonl",
        f"data.train={folder / 'prompts.jsonl'}",
        "runtime.device=cpu",
        "pool.entries.generic.drafter.num_draft_vocab=40",
        "pool.entries.code.drafter.num_draft_vocab=40",
        "stages.prepare.min_prompts=2",
        "stages.prepare.leak_words=0",
        "stages.regenerate.max_new_tokens.drafter_train=24",
        "stages.regenerate.shard_rows=8",
        "stages.profile.context_tokens=64",
        "stages.train_router.max_steps=20",
    ]
