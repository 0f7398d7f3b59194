"""Which ranks reach each other's memory: found out together, so that all ranks of a group give one answer."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from keysieve.checks import UnsupportedError
from keysieve.dcp.exchange_memory import symmetric
from keysieve.dcp.layout import ExchangeLayout
from keysieve.dcp.memory import ExchangeShape

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def no_peers(device: torch.device, group: Any, world: int) -> str | None:
    """Why the ranks cannot push into each other's memory, the same answer on all of them; or None. Collective."""
    mine = (_host(), str(device), _uuid(device), _unusable(device))
    ranks = everyones(mine, group, world)
    # What a rank sees of the others' devices may differ: verdicts are exchanged as well, and the first one holds.
    found = first(everyones(judged(ranks, visible=_reach(device)), group, world))
    if found is not None:
        return found
    why: str | None = None
    try:
        symmetric(ExchangeLayout(ExchangeShape(world, 1, 1, 1)), device, group)
    except UnsupportedError as error:
        why = str(error)
    return first(everyones(why, group, world))


def judged(ranks: Sequence[tuple[str, str, str, str | None]], visible: dict[str, bool] | None = None) -> str | None:
    """Why ranks with these (host, device, its identity, own reason) cannot exchange, or None.

    visible: what this process knows of devices by their identity: can its own device and they reach each other?
    """
    for rank, (_, where, _, reason) in enumerate(ranks):
        if reason is not None:
            return f"rank {rank} on {where}: {reason}"
    hosts = {host for host, *_ in ranks}
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    owners: dict[str, int] = {}
    for rank, (_, where, identity, _) in enumerate(ranks):
        if identity in owners:
            return f"ranks {owners[identity]} and {rank} share one device ({where})"
        owners[identity] = rank
    for rank, (_, where, identity, _) in enumerate(ranks):
        if visible is not None and visible.get(identity) is False:
            return f"the device of rank {rank} ({where}) has no peer access to the others"
    return None


def _host() -> str:
    """This machine, so that two containers of one host are told from two hosts with one name."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{boot or socket.gethostname()}"


def _uuid(device: torch.device) -> str:
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"{device}"
    return str(torch.cuda.get_device_properties(device).uuid)


def _unusable(device: torch.device) -> str | None:
    """Why this rank's device cannot take part, or None."""
    if device.type != "cuda":
        return "peer memory is a matter of CUDA devices"
    try:
        import torch.distributed._symmetric_memory  # is it there?
    except ImportError as error:
        return f"torch {torch.__version__} has no symmetric memory ({error})"
    return None


def _reach(device: torch.device) -> dict[str, bool] | None:
    """Of every CUDA device that this process sees, by identity: can ``device`` and it reach each other?"""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    mine = torch.cuda.current_device() if device.index is None else device.index
    found: dict[str, bool] = {}
    for other in range(torch.cuda.device_count()):
        both = other == mine or (
            torch.cuda.can_device_access_peer(mine, other) and torch.cuda.can_device_access_peer(other, mine)
        )
        found[str(torch.cuda.get_device_properties(other).uuid)] = both
    return found


def everyones(mine: Any, group: Any, world: int) -> list[Any]:
    """``mine`` of every rank, in rank order; collective."""
    found: list[Any] = [None] * world
    dist.all_gather_object(found, mine, group=group)
    return found


def first(texts: Sequence[str | None]) -> str | None:
    """The first text that is there, or None."""
    return next((text for text in texts if text is not None), None)
