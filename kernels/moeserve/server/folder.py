"""What the HTTP side reads of a model folder: tokenizer, chat template, sampling defaults.

Receives a `ServeConfig`; returns a `ModelFolder`, or raises an error that names the file. The
weights and `config.json` are the engine's (`engine/startup.py`), which loads them meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moeserve.args import ServeConfig
from moeserve.errors import BadRequest, UsageError
from moeserve.json_file import json_object
from moeserve.presets import is_preset
from moeserve.server.protocol import CompletionBody, parse_body
from moeserve.server.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("moeserve.server")
# Of generation_config.json: fields that a request may leave out, by the names that requests use.
# Not `do_sample`: false would make a temperature meaningless, and many folders have both.
_DEFAULTS_READ = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class ModelFolder:
    """What requests are read by.

    Attributes:
        tokenizer: None for a preset without a folder.
        chat_template: The command line's, else the model's, "" if it has none.
        sampling_defaults: For fields that a request leaves out.
    """

    tokenizer: Tokenizer | None
    chat_template: str
    sampling_defaults: Mapping[str, float]


def read_folder(config: ServeConfig) -> ModelFolder:
    """Return what the model's folder and the command line say.

    Raises:
        UsageError: A file that is broken, or a template that is not there.
        Unsupported: No tokenizer, or one that cannot be served.
    """
    folder = Path(config.engine.model)
    tokenizer = None
    if folder.is_dir():
        tokenizer = load_tokenizer(folder)
    elif is_preset(config.engine.model):
        logger.warning("%s has no tokenizer: text is sent as its bytes", config.engine.model)
    else:
        raise UsageError(f"{config.engine.model}: neither a folder nor a preset")
    template = chat_template_of(config, tokenizer)
    return ModelFolder(tokenizer, template, sampling_defaults_of(config))


def chat_template_of(config: ServeConfig, tokenizer: Tokenizer | None) -> str:
    """Return the template in force: the command line's, a file or a text, else the model's.

    Raises:
        UsageError: The command line's file cannot be read.
    """
    given = config.chat_template
    if not given:
        return tokenizer.chat_template if tokenizer else ""
    # A template is told from a path by its braces.
    if "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {given}: cannot be read: {error}") from None


def sampling_defaults_of(config: ServeConfig) -> dict[str, float]:
    """Return the values of generation_config.json for fields that a request leaves out.

    Raises:
        UsageError: A value that no request might have; names the file and the key.
    """
    path = Path(config.engine.model) / "generation_config.json"
    if config.generation_config != "auto" or not path.is_file():
        return {}
    document = json_object(path)
    found = {
        ours: document[name]
        for name, ours in _DEFAULTS_READ.items()
        if document.get(name) is not None
    }
    try:
        parse_body(CompletionBody, found)
    except BadRequest as error:
        raise UsageError(f"{path}: {error} (--generation-config none leaves it out)") from None
    if found.get("max_tokens", 1) < 1:
        raise UsageError(f"{path}: max_new_tokens: want at least 1, got {found['max_tokens']}")
    defaults = {name: float(value) for name, value in found.items()}
    if defaults:
        logger.info("sampling defaults of the model (--generation-config none): %s", defaults)
    return defaults
