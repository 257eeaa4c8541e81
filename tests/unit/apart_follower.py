"""The process of a rank that works as one on a GPU does: see apart_kit."""

from engine import follower
from tests.unit.apart_kit import use_gpus_ways

if __name__ == "__main__":
    use_gpus_ways(setattr)
    follower.main()
