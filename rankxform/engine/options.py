"""How files are read, and in how much memory: options."""

from __future__ import annotations

from rankxform.options import AFFECTS_LOAD, GROUP_IO, TYPE_REPEATED, TYPE_SIZE, choice_of, option
from rankxform.planning.reads import AUTO, COSTS, READ_METHODS, Costs
from rankxform.values import dataclass


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How files are read, and in how much memory. See the help of each."""

    read_method: str = option(
        AUTO, GROUP_IO, "how source files are read: the wanted ranges; whole rows, then pick "
        "(sieving); or each byte by one process that sends it to the others (two-phase); auto: "
        "what costs least, two-phase for files that a node does not have", AFFECTS_LOAD,
        kind=choice_of(READ_METHODS),
    )  # fmt: skip
    costs: Costs | None = option(
        None, GROUP_IO, "cost model: bytes a second of one process (read, write, copy) and of one "
        "node (network), latencies (read_latency, latency), and the overlap of reading and sending "
        "(0-1), such as read=2G,latency=30us; G is 10^9 (default: measured; of --simulate, or if "
        "some are given, 1G, 1G, 5G, 10G, 100us, 30us, 1). Of object storage requests a second "
        "(get_rate, put_rate), and the price of a million (get_price, put_price)", AFFECTS_LOAD,
        kind=COSTS, metavar="WHAT=VALUE,..",
    )  # fmt: skip
    memory: int | None = option(
        None, GROUP_IO, "buffers on each process (default: 64M; 512M of a source in object "
        "storage)", AFFECTS_LOAD, kind=TYPE_SIZE, metavar="SIZE",
    )  # fmt: skip
    # These two are no part of what a conversion is: no manifest and no printed command has them.
    endpoint_url: str | None = option(
        None, GROUP_IO, "server of object storage (default: AWS_ENDPOINT_URL)", metavar="URL",
    )  # fmt: skip
    storage_option: tuple[str, ...] = option(
        (), GROUP_IO, "an option of the client of object storage, such as region=eu-west-1; a "
        "secret is read from a file (KEY=@FILE) or a variable (KEY=$NAME)",
        kind=TYPE_REPEATED, metavar="KEY=VALUE",
    )  # fmt: skip
    throttle: int | None = option(
        None, GROUP_IO, "write at most this many bytes a second, all processes together, and read "
        "and write only when the disk is idle, where the system knows that", AFFECTS_LOAD,
        kind=TYPE_SIZE, metavar="SIZE", verbs=("transform", "launch", "verify"),
    )  # fmt: skip
    shapes: str | None = option(
        None, GROUP_IO, "plan without SRC, from full shapes: a complete checkpoint file, what "
        '`inspect --json` prints of one, or JSON {name: {"shape": [...], "dtype": "Float32"}}',
        metavar="FILE", verbs=("plan",),
    )  # fmt: skip
