"""Which of lm-eval's tasks one of our names means, and what lm-eval cannot do.

Receives a config, returns a `Form`; needs no lm-eval, so that `validate` can ask. What lm-eval is
then told is `lm_eval_job.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from evalsuite.config import EvalConfig
from evalsuite.errors import ConfigError, Problem


@dataclass(frozen=True)
class Form:
    """How one of our task names is run by lm-eval.

    Attributes:
        task: Our task with the same prompts; it gives rows, readings and profile.
        file: lm-eval's task file that ours includes.
        is_first_n: Shots are the first train rows, and our task's stop strings are sent.
    """

    task: str
    file: str
    is_first_n: bool = False


_FORMS = {
    "gsm8k": Form("gsm8k-lm-eval", "gsm8k.yaml"),
    "gsm8k-lm-eval": Form("gsm8k-lm-eval", "gsm8k.yaml"),
    "gsm8k_cot": Form("gsm8k_cot", "gsm8k-cot.yaml"),
    "minigsm": Form("minigsm", "gsm8k.yaml", is_first_n=True),
}


def find_form(config: EvalConfig) -> Form:
    """Check that lm-eval can do what is asked.

    Raises:
        ConfigError: Names the key that has no meaning here.
    """
    problems = []
    if config.task not in _FORMS:
        message = f"lm-eval has no task {config.task!r} of ours; known: {', '.join(_FORMS)}"
        problems.append(Problem("error", message, key="task"))
    if config.use_chat_completions:
        message = "evaluator lm-eval sends prompts to /v1/completions; use evaluator: builtin"
        problems.append(Problem("error", message, key="use_chat_completions"))
    if config.gen_prefix:
        message = "belongs to the script's prompts; use evaluator: builtin"
        problems.append(Problem("error", message, key="gen_prefix"))
    if problems:
        raise ConfigError(problems)
    return _FORMS[config.task]
