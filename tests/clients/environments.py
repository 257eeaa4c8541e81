"""Virtual environments for other people's clients, each made once and kept in `build/clients`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "clients"
INSTALL_S = 1200.0


class NotInstalled(Exception):
    """pip can't install it here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    name: str
    packages: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def _stamp(self) -> Path:
        """Names what was installed, so that other versions are installed anew."""
        return self.folder / "installed.txt"

    @property
    def is_installed(self) -> bool:
        wanted = "\n".join(self.packages)
        return self._stamp.is_file() and self._stamp.read_text() == wanted

    def install(self) -> None:
        """Raises NotInstalled."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        pip = [self.folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", self.folder],
            [*pip, *self.packages],
        ):
            done = subprocess.run(
                [*map(str, command)], capture_output=True, text=True, timeout=INSTALL_S
            )
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise NotInstalled(f"{self.name} can't be installed here: {last}")
        self._stamp.write_text("\n".join(self.packages))


def python_of(environment: Environment) -> Path:
    """The interpreter there, after installing what is missing. Raises NotInstalled."""
    if not environment.is_installed:
        environment.install()
    return environment.folder / "bin" / "python"


SDK_ENVIRONMENT = Environment(
    name="sdks",
    packages=(
        *("openai>=3.50,<4", "anthropic>=2.10,<3", "openai-agents>=0.24,<0.25"),
        *("langchain-openai>=1.7,<2", "litellm>=1.110,<2"),
        "pydantic-ai-slim[anthropic,openai]>=2.68,<3",
    ),
)
GUIDELLM = Environment(name="guidellm", packages=("guidellm>=0.8,<0.9",))
AIPERF = Environment(name="aiperf", packages=("aiperf>=0.13,<0.14",))
LM_EVAL = Environment(
    name="lm-eval", packages=("lm-eval[api]>=0.4.13,<0.5", "transformers>=5.19,<5.25")
)
