"""Byte-level BPE of the embedded model: trained on MiniGSM, able to encode any text.

Receives training texts; returns a `tokenizers.Tokenizer` or writes `tokenizer.json` and
`tokenizer_config.json` in Hugging Face form. All 256 bytes are in the vocabulary, so no text is
unknown. The server's own handling of text is in `moeserve.server`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
# A newline and a digit always stand alone: a prompt cut after "\n\n" then has the same tokens as
# the same characters inside a longer document, and arithmetic sees single digits.
_WORDS = r"\n|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|[^\S\n]+"
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\\nAnswer:' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + '\\n\\n' }}"
    "{% else %}{{ message['content'] + '\\n\\n' }}{% endif %}"
    "{% endfor %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE of at most `vocab_size` entries, end-of-text included.

    Args:
        texts: training documents; the result depends on their contents alone.
        vocab_size: number of entries; at least 257 (all bytes and end-of-text).

    Raises:
        ValueError: the vocabulary cannot hold all bytes.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size: {vocab_size} cannot hold 256 bytes and end-of-text")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length_tokens: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into an existing folder."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "bos_token": None,
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "model_max_length": max_length_tokens,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
