"""The embedded model for engines that know folders and hub names only.

Receives a config's `model_name`; returns the packaged folder for the embedded model's name, and
any other name as it is. `moeserve` knows the name by itself.
"""

from __future__ import annotations

from evalsuite.errors import ConfigError, Problem

_EMBEDDED = "moeserve/minigsm-tiny"


def model_argument(model_name: str) -> tuple[str, tuple[str, ...]]:
    """What to pass as the model, and the flags that keep its name in requests.

    Raises:
        ConfigError: The embedded model is asked for and is not in the package.
    """
    if model_name != _EMBEDDED:
        return model_name, ()
    try:
        # Imported here: `import evalsuite` stays free of the server package.
        from moeserve.tiny import model_dir

        return str(model_dir()), ("--served-model-name", model_name)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        message = f"{model_name} is this project's embedded model: {error}"
        raise ConfigError(Problem("error", message, key="model_name")) from error
