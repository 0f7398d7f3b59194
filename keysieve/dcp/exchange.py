"""The NVLink exchange: candidate rows pushed into every rank's slots. Not part of this version: it refuses."""

from __future__ import annotations

from typing import Any

from keysieve.checks import UnsupportedError, message


class Exchange:
    """The one-sided exchange over NVLink peer memory; see ``docs/dcp.md`` for its protocol.

    Its kernels are not in this version, so building one is refused with the reason; :class:`keysieve.dcp.Gather` has
    the same arguments and gives the same keys.
    """

    def __init__(self, group: Any = None, topn: int | None = None, interleave: int = 1, sharded: bool = True) -> None:
        raise UnsupportedError(
            message(
                "dcp",
                got=f"Exchange({group}, topn={topn}, interleave={interleave}, sharded={sharded})",
                accepted="keysieve.dcp.Gather: the kernels of the NVLink exchange are not in this version",
                remedy="Use keysieve.dcp.Gather with the same group; it selects the same keys.",
            )
        )
