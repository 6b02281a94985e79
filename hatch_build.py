"""What the editable form of the package has beside hatchling's own files.

Receives what is about to be built; adds one `.pth` line to an editable wheel and nothing to any
other. That form is loaded through a module which Python imports as it starts; pytest takes it for
a module of our plugin, comes too late to rewrite its assertions, and would warn in every run. The
line says in pytest's own words that there is nothing to rewrite.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# hatchling's name for it. Python reads `.pth` files in the order of their names: ours comes after.
_MODULE = "_editable_impl_moe_evalsuite"
# Nothing happens where hatchling has come to call it otherwise.
_LINE = (
    f'import sys; loader = sys.modules.get("{_MODULE}"); '
    'loader and setattr(loader, "__doc__", "PYTEST_DONT_REWRITE")\n'
)


class CustomBuildHook(BuildHookInterface[Any]):
    """See the module's text."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the line where `version` is "editable"."""
        if version != "editable":
            return
        self._folder = tempfile.TemporaryDirectory()
        name = f"{_MODULE}_pytest.pth"
        path = Path(self._folder.name, name)
        path.write_text(_LINE, encoding="utf-8")
        build_data["force_include_editable"][str(path)] = name

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the file that is in the wheel by now."""
        if version == "editable":
            self._folder.cleanup()
