"""A target small enough for every test: a Llama of four layers, a tokenizer, a chat template."""

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
