"""The time to move KV over one link, and the faster of two ways. Pure.

Two ways (n bytes; the coefficients are LinkCost's fields):

    direct     the receiver reads the blocks where they lie, one descriptor per run, layer and
               plane, one piece after the other
               5 x latency + pieces x read + descriptors x descriptor + n / direct
    collated   the sender gathers each piece into a slab and writes it, the receiver scatters the
               piece before
               (1 + 2 x pieces) x latency + sent + scattered
                   + (pieces - 1) x max(sent, scattered), each piece's
               sent      = (source_runs x run + n / gather) / pieces + write + n / (pieces x bytes)
               scattered = (target_runs x run + n / scatter) / pieces

The latencies count the messages from the announcement until a request may join. Collated: ahead,
then lent and filled for each piece; the commit travels with the last. Direct: ahead, awaited,
computed, read, and only then the commit. The time to handle a message is part of its latency.

On a `mapped` link gathering goes straight into the peer's slab, and nothing is written. It takes
about twice the measured time of a gather into own memory. Both ends copy in the same memory there
and gain nothing by copying at once: the time is sent + scattered for each piece. Where each end
copies on a device of its own (`apart`), they do so at once, and a gather takes as long as its reads
or as the link for its bytes, whichever is longer. Between devices a direct read copies all its runs
in one launch, so that descriptors cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from kvrelay.types import value


class TransferWay(StrEnum):
    DIRECT = "direct"
    COLLATED = "collated"


_DIRECT_MESSAGES = 5
_POOL_BY_PROBE = 1.05
"""A byte of a whole pool takes this much longer to read than one of the probed region."""


class TimedStep(StrEnum):
    """A step that is timed by itself to learn the coefficients."""

    MESSAGE = "message"  # to the peer and back
    WRITE = "write"  # one piece
    PREPARE = "prepare"  # the list of `pieces` descriptors, by this worker
    READ = "read"  # `pieces` descriptors in one batch, prepared before
    GATHER = "gather"  # `pieces` runs
    SCATTER = "scatter"  # `pieces` runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    step: TimedStep
    seconds: float
    nbytes: int = 0
    pieces: int = 1


@value
class TransferShape:
    """The shape of all `pieces` together. `descriptors` are those of a direct read: runs x layers x
    planes."""

    nbytes: int
    descriptors: int
    source_runs: int
    target_runs: int
    pieces: int = 1

    def times(self, count: int) -> TransferShape:
        """This many transfers, one after another."""
        return TransferShape(
            nbytes=count * self.nbytes,
            descriptors=count * self.descriptors,
            source_runs=count * self.source_runs,
            target_runs=count * self.target_runs,
            pieces=count * self.pieces,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """One link as this end measured it. `latency_s`: one message, one way; `read_s` and `write_s`:
    fixed cost of a batch of reads and of a write; `descriptor_s` and `run_s`: added by each
    descriptor and each copied run. `mapped`: the peer's memory is seen here; `apart`: it is that of
    another device."""

    transport: str
    latency_s: float
    bytes_per_s: float
    descriptor_s: float
    direct_bytes_per_s: float
    gather_bytes_per_s: float
    scatter_bytes_per_s: float
    run_s: float
    read_s: float = 0.0
    write_s: float = 0.0
    mapped: bool = False
    apart: bool = False

    def renewed(self, newer: LinkCost) -> LinkCost:
        """Merges a later measurement of the same link. Disturbances make a link slower, never
        faster. So a faster value counts at once, and a slower one by half."""
        return replace(
            newer,
            latency_s=_later_s(self.latency_s, newer.latency_s),
            bytes_per_s=_later_speed(self.bytes_per_s, newer.bytes_per_s),
            descriptor_s=_later_s(self.descriptor_s, newer.descriptor_s),
            direct_bytes_per_s=_later_speed(self.direct_bytes_per_s, newer.direct_bytes_per_s),
            gather_bytes_per_s=_later_speed(self.gather_bytes_per_s, newer.gather_bytes_per_s),
            scatter_bytes_per_s=_later_speed(self.scatter_bytes_per_s, newer.scatter_bytes_per_s),
            run_s=_later_s(self.run_s, newer.run_s),
            read_s=_later_s(self.read_s, newer.read_s),
            write_s=_later_s(self.write_s, newer.write_s),
        )

    def seconds(self, way: TransferWay, shape: TransferShape) -> float:
        """Time until the bytes are in the receiver's blocks."""
        return self._direct_s(shape) if way is TransferWay.DIRECT else self._collated_s(shape)

    def choose(self, shape: TransferShape) -> TransferWay:
        """The faster way; collated if both are equal."""
        direct = self._direct_s(shape) < self._collated_s(shape)
        return TransferWay.DIRECT if direct else TransferWay.COLLATED

    def _direct_s(self, shape: TransferShape) -> float:
        posted_s = shape.pieces * self.read_s + shape.descriptors * self.descriptor_s
        moved_s = posted_s + shape.nbytes / self.direct_bytes_per_s
        return _DIRECT_MESSAGES * self.latency_s + moved_s

    def _collated_s(self, shape: TransferShape) -> float:
        pieces = max(1, shape.pieces)
        piece_bytes = shape.nbytes / pieces
        sent_s = shape.source_runs / pieces * self.run_s + self._sent_s(piece_bytes)
        runs_s = shape.target_runs / pieces * self.run_s
        scattered_s = runs_s + piece_bytes / self.scatter_bytes_per_s
        both_s = sent_s + scattered_s
        each_s = both_s if self.mapped and not self.apart else max(sent_s, scattered_s)
        moved_s = both_s + (pieces - 1) * each_s
        return (1 + 2 * pieces) * self.latency_s + moved_s

    def _sent_s(self, nbytes: float) -> float:
        gathered_s, carried_s = nbytes / self.gather_bytes_per_s, nbytes / self.bytes_per_s
        if self.apart:
            return max(gathered_s, carried_s)
        return 2 * gathered_s if self.mapped else gathered_s + self.write_s + carried_s


def fit(
    transport: str,
    samples: Iterable[Sample],
    *,
    mapped: bool = False,
    at_once: bool = False,
    apart: bool = False,
) -> LinkCost:
    """Least squares of relative errors, no coefficient below zero. Over a `mapped` link no list of
    descriptors is made; with `at_once` direct reads are one copy, and only the reads with the
    fewest descriptors tell; `apart`: the ends are on two devices. Raises ValueError that names the
    steps without a sample."""
    by_step: dict[TimedStep, list[Sample]] = {step: [] for step in TimedStep}
    for sample in samples:
        by_step[sample.step].append(sample)
    if missing := [step.value for step, found in by_step.items() if not found]:
        raise ValueError(f"no sample of {', '.join(missing)}")
    write_s, byte_s = _solve(
        [(1, s.nbytes) for s in by_step[TimedStep.WRITE]], by_step[TimedStep.WRITE]
    )
    reads = by_step[TimedStep.READ]
    if at_once:
        fewest = min(sample.pieces for sample in reads)
        reads = [replace(sample, pieces=0) for sample in reads if sample.pieces == fewest]
    read_s, descriptor_s, read_byte_s = _solve([(1, s.pieces, s.nbytes) for s in reads], reads)
    (prepare_s,) = _solve(
        [(s.pieces,) for s in by_step[TimedStep.PREPARE]], by_step[TimedStep.PREPARE]
    )
    copies = by_step[TimedStep.GATHER] + by_step[TimedStep.SCATTER]
    run_s, gather_byte_s, scatter_byte_s = _solve([_copy_row(s) for s in copies], copies)
    return LinkCost(
        transport=transport,
        latency_s=median(s.seconds for s in by_step[TimedStep.MESSAGE]) / 2,
        bytes_per_s=_speed(byte_s, by_step[TimedStep.WRITE]),
        descriptor_s=descriptor_s if mapped else descriptor_s + prepare_s,
        direct_bytes_per_s=_speed(read_byte_s, reads) / _POOL_BY_PROBE,
        gather_bytes_per_s=_speed(gather_byte_s, by_step[TimedStep.GATHER]),
        scatter_bytes_per_s=_speed(scatter_byte_s, by_step[TimedStep.SCATTER]),
        run_s=run_s,
        read_s=read_s,
        write_s=write_s,
        mapped=mapped,
        apart=apart,
    )


def _later_s(old: float, new: float) -> float:
    return new if new < old else (old + new) / 2


def _later_speed(old: float, new: float) -> float:
    return new if new > old else 2 / (1 / old + 1 / new)


def _copy_row(sample: Sample) -> tuple[float, ...]:
    gathered = sample.step is TimedStep.GATHER
    return sample.pieces, sample.nbytes * gathered, sample.nbytes * (not gathered)


def _speed(byte_s: float, samples: Iterable[Sample]) -> float:
    """If bytes seem to cost nothing, the highest speed in the samples."""
    if byte_s > 0:
        return 1 / byte_s
    return max(sample.nbytes / max(sample.seconds, 1e-9) for sample in samples) or 1.0


def _solve(rows: Sequence[tuple[float, ...]], samples: Sequence[Sample]) -> list[float]:
    """Coefficients >= 0 that explain the seconds. Negative ones are set to zero, the worst first,
    and the others are fitted again."""
    import numpy as np  # here: commands that measure nothing start without it

    weights = np.array([1 / max(sample.seconds, 1e-9) for sample in samples])
    matrix = np.array(rows, dtype=float) * weights[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    kept = list(range(matrix.shape[1]))
    found = np.zeros(matrix.shape[1])
    while kept:
        solved = np.linalg.lstsq(matrix[:, kept] / scale[kept], np.ones(len(samples)), rcond=None)
        worst = int(np.argmin(solved[0]))
        if solved[0][worst] >= 0:
            found[kept] = solved[0] / scale[kept]
            break
        del kept[worst]
    return [float(value) for value in found]
