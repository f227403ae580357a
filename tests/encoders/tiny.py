"""Tiny transformers with random weights, as folders: a BERT, a GPT-2 and a Llama with one small vocabulary."""

from pathlib import Path

import torch
from tests.parts import need

need("transformers", "needs the package transformers (pip install 'exssnet[text]')")
need("tokenizers", "needs the package tokenizers (pip install 'exssnet[text]')")

WORDS = ["the", "cat", "sat", "on", "a", "mat", "dog", "ran", "far", "away", "good", "bad", "film", "story", "night",
         "day", "red", "blue", "green", "one", "two", ".", ",", "!", "?"]  # fmt: skip
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WIDTH = 16


def make(folder: Path, kind="bert", seed=0, positions=64, words=WORDS, spread=0.02) -> Path:
    """Write a model and its tokenizer; `spread`: standard deviation of its weights."""
    import transformers as library

    vocabulary = len(SPECIAL) + len(words)
    if kind == "bert":
        config = library.BertConfig(
            vocab_size=vocabulary, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=positions,
        )  # fmt: skip
    elif kind == "gpt2":
        config = library.GPT2Config(
            vocab_size=vocabulary, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=positions, bos_token_id=2,
            eos_token_id=3,
        )  # fmt: skip
    else:
        config = library.LlamaConfig(
            vocab_size=vocabulary, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=positions, bos_token_id=2, eos_token_id=3,
        )  # fmt: skip
    config.initializer_range = spread
    torch.manual_seed(seed)
    library.AutoModel.from_config(config).save_pretrained(folder)
    tokenizer(kind, words).save_pretrained(folder)
    return folder


def tokenizer(kind: str, words=WORDS):
    """Words by spaces; BERT's own template around them, none for a causal model."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate([*SPECIAL, *words])}, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = {"unk_token": "[UNK]"}
    if kind == "bert":
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        special |= {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        special |= {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)
