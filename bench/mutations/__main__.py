"""Do the tests notice when a core decides otherwise? Seeded small mutations, one at a time.

    python -m bench.mutations --seed 0 --count 200
    python -m bench.mutations --tree ../old --common . --json build/old.json

Each mutation is made in a temporary copy of the tree. The tests whose files run the mutated
function are run, the fastest first, until one fails: the mutation is killed. Which test files run
which functions is found once for a tree, which takes as long as its tests do; `--map FILE` keeps
it. `--common` takes only pieces of source that stand in both trees, so that two trees are compared
by the same mutations.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from bench.mutations.sites import MutationSite, common, mutated, sites_of
from bench.mutations.trial import (
    TESTS,
    Fate,
    MutationTrial,
    TestMap,
    TreeCopy,
    TrialBench,
    find_tests,
)

PURE = "touch"
"""In the name of the import contract that lists what is pure."""
CORES = ("router", "kvpool", "prefill_worker", "decode_worker", "cluster")
NO_CORES = ("cluster.sim", "cluster.config", "cluster.quantities")


def cores(tree: Path) -> list[str]:
    """Modules and folders that the tree's import contract names as pure, of its five cores."""
    contracts = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["importlinter"]
    (pure,) = (one for one in contracts["contracts"] if PURE in one["name"])
    return [path_of(tree, name) for name in pure["source_modules"] if is_core(name)]


def is_core(name: str) -> bool:
    left_out = any(f"{name}.".startswith(f"{other}.") for other in NO_CORES)
    return name.split(".")[0] in CORES and not left_out


def path_of(tree: Path, name: str) -> str:
    path = name.replace(".", "/")
    return path if (tree / path).is_dir() else f"{path}.py"


def all_sites(copy: TreeCopy, paths: Sequence[str]) -> list[MutationSite]:
    return [site for path in copy.modules(paths) for site in sites_of(path, copy.source(path))]


def sampled(sites: Sequence[MutationSite], count: int, seed: int) -> list[tuple[MutationSite, str]]:
    """By their keys' order, so that two trees with the same sites have the same sample."""
    chosen = random.Random(seed)
    ordered = sorted(sites, key=lambda site: (site.key, site.path))
    picked = chosen.sample(ordered, min(count, len(ordered)))
    return [(site, chosen.choice(site.after)) for site in picked]


def trials(
    benches: Sequence[TrialBench], sample: Sequence[tuple[MutationSite, str]]
) -> Iterator[MutationTrial]:
    """In the sample's order; as many at once as there are benches."""
    free: Queue[TrialBench] = Queue()
    for bench in benches:
        free.put(bench)

    def tried(mutation: tuple[MutationSite, str]) -> MutationTrial:
        bench = free.get()
        try:
            return trial_of(bench, *mutation)
        finally:
            free.put(bench)

    with ThreadPoolExecutor(len(benches)) as pool:
        yield from pool.map(tried, sample)


def trial_of(bench: TrialBench, site: MutationSite, after: str) -> MutationTrial:
    source = mutated(bench.copy.source(site.path), site, after)
    fate, test, files = bench.fate_of(site.path, site.function, source)
    return MutationTrial(
        path=site.path,
        line=site.line,
        function=site.function,
        kind=site.kind,
        before=site.before,
        after=after,
        fate=fate,
        test=test,
        files=files,
    )


def print_found(found: Sequence[MutationTrial]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False, markup=False)
    table = Table("module", "mutations", *Fate, box=None)
    for path in sorted({one.path for one in found}):
        _add_row(table, path, [one for one in found if one.path == path])
    _add_row(table, "all", found)
    console.print(table)
    for one in found:
        if one.fate is not Fate.KILLED:
            console.print(f"{one.fate}: {_told(one)}")


def _add_row(table: Table, name: str, found: Sequence[MutationTrial]) -> None:
    fates = Counter(one.fate for one in found)
    table.add_row(name, str(len(found)), *(str(fates[fate]) for fate in Fate))


def _told(one: MutationTrial) -> str:
    before, after = (" ".join(text.split()) for text in (one.before, one.after))
    return f"{one.path}:{one.line} {one.function}: {one.kind}: {before} => {after}"


def commit_of(tree: Path) -> str:
    told = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"],
        cwd=tree,
        capture_output=True,
        text=True,
    )
    return told.stdout.strip()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200, help="how many mutations")
    parser.add_argument("--tree", type=Path, default=Path(), help="a checkout; it stays as it is")
    parser.add_argument("--paths", nargs="+", help="modules or folders; without it the cores")
    parser.add_argument("--common", type=Path, help="only what stands in this tree too")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders; %(default)s")
    parser.add_argument("--map", type=Path, help="the map of its tests: read, or found and written")
    parser.add_argument("--most-s", type=float, default=180.0, help="CPU seconds for one mutation")
    parser.add_argument("--jobs", type=int, default=1, help="mutations that are tried at once")
    parser.add_argument("--json", type=Path, help="write all trials there, and go on with those")
    return parser.parse_args()


def sites_wanted(copy: TreeCopy, args: argparse.Namespace, folder: Path) -> list[MutationSite]:
    sites = all_sites(copy, args.paths or cores(copy.root))
    if args.common is None:
        return sites
    other = TreeCopy(args.common.resolve(), folder / "common")
    return common(sites, all_sites(other, cores(other.root)))


def main() -> None:
    args = arguments()
    with TemporaryDirectory(prefix="mutations-") as name:
        folder, tree = Path(name), args.tree.resolve()
        copy = TreeCopy(tree, folder / "copy")
        sample = sampled(sites_wanted(copy, args, folder), args.count, args.seed)
        known = args.map or folder / "map.json"
        if not known.exists():
            modules = copy.modules(args.paths or cores(copy.root))
            find_tests(copy, modules, args.tests, known.resolve())
        copies = [copy, *(TreeCopy(tree, folder / str(job)) for job in range(1, args.jobs))]
        benches = [TrialBench(one, TestMap.load(known), args.most_s) for one in copies]
        told = {"commit": commit_of(tree), "seed": args.seed, "count": args.count}
        found = _tried_before(args.json, told)
        for one in trials(benches, sample[len(found) :]):
            found.append(one)
            print(f"{len(found)}/{len(sample)} {one.fate}: {_told(one)}", file=sys.stderr)
            if args.json:
                _write(args.json, told, found)
    print_found(found)


def _tried_before(file: Path | None, told: Mapping[str, object]) -> list[MutationTrial]:
    """What is in the file, if it is of the same tree and sample."""
    if file is None or not file.exists():
        return []
    known = json.loads(file.read_text())
    same = all(known[name] == value for name, value in told.items())
    if not same:
        raise SystemExit(f"{file} holds the trials of {known['commit']}: name another file")
    return [MutationTrial(**one | {"fate": Fate(one["fate"])}) for one in known["trials"]]


def _write(file: Path, told: Mapping[str, object], found: Sequence[MutationTrial]) -> None:
    file.write_text(json.dumps({**told, "trials": [asdict(one) for one in found]}, indent=2))


if __name__ == "__main__":
    main()
