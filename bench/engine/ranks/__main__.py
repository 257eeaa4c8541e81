"""Two ranks that share heads, and two stages: see `tensor` and `pipeline`."""

from bench.engine.ranks import pipeline, tensor
from bench.engine.ranks.asked import arguments
from bench.report import print_table, write_json


def main() -> None:
    args = arguments(__doc__)
    if args is None:
        return
    rows = [
        *tensor.measure(args.device, tensor.sizes(args), args.repeats),
        *pipeline.measure(args.device, pipeline.sizes(args), args.repeats),
    ]
    print_table("Ranks and stages", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
