"""Step times to protobuf and back. Pure."""

from __future__ import annotations

from kvrelay.step_times import SCALARS, StepCoefficients
from kvrelay.v1 import inference_pb2 as pb


def encode_step_times(times: StepCoefficients) -> pb.StepTimes:
    knots = [pb.DecodeKnot(sequences=n, seconds=s) for n, s in times.decode_knots]
    scalars = {name: getattr(times, name) for name in SCALARS}
    return pb.StepTimes(decode_knots=knots, **scalars)


def decode_step_times(message: pb.StepTimes) -> StepCoefficients:
    """Raises ValueError for what no step can take."""
    knots = tuple((knot.sequences, knot.seconds) for knot in message.decode_knots)
    scalars = {name: getattr(message, name) for name in SCALARS}
    return StepCoefficients(decode_knots=knots, **scalars)
