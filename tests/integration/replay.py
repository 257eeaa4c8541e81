"""A router's record in a fresh core: prints how many commands came out as recorded, and where the
first didn't.

    python -m tests.integration.replay RECORD
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from router.core.record import Entry, from_line
from router.core.start import Beginning, begin


def replay(path: Path) -> dict[str, object]:
    """# events, commands: kind |-> how many; different: the first entry that differs"""
    header, *entries = map(from_line, path.read_text().splitlines())
    assert isinstance(header, Beginning)
    core = begin(header)
    events: Counter[str] = Counter()
    commands: Counter[str] = Counter()
    for number, entry in enumerate(entries):
        assert isinstance(entry, Entry)
        again = core.handle(entry.event, entry.at_s)
        core.validate()
        if again != [*entry.commands]:
            return {"different": f"{number}: {entry}, now {again}"}
        events[type(entry.event).__name__] += 1
        commands.update(type(command).__name__ for command in again)
    return {"events": events, "commands": commands, "different": None}


if __name__ == "__main__":
    print(json.dumps(replay(Path(sys.argv[1]))))
