"""docs/models.md has the data of `kvrelay models`. Renews its tables:

python -m tests.families.page
"""

from __future__ import annotations

import re
from pathlib import Path

from engine.support.matrix import checks_table, families_table

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TABLE = r"(?:\|.*\n)+"


def renewed(text: str) -> str:
    for table in (checks_table(), families_table()):
        head = re.escape(table.splitlines()[0])
        text, count = re.subn(rf"^{head}\n{TABLE}", lambda _: table, text, flags=re.MULTILINE)  # noqa: B023
        assert count == 1, f"the page has {count} tables that begin with {head}"
    return text


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
