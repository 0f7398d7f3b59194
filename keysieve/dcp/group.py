"""The torch.distributed group of a dcp object, looked at once."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from keysieve.checks import refuse


def require_group(group: Any, name: str) -> tuple[Any, int, int]:
    """(the group, its ranks, this process's rank in it), or a refusal. None is the default group; name: who asks."""
    if not dist.is_available() or not dist.is_initialized():
        refuse(
            "group",
            got="no initialised torch.distributed",
            accepted="a process group",
            remedy="Call torch.distributed.init_process_group first (backend 'gloo' on CPUs).",
        )
    chosen: Any = dist.group.WORLD if group is None else group
    rank = dist.get_rank(chosen)
    if rank < 0:
        refuse(
            "group",
            got="a group that this process is not in",
            accepted="a group with this process",
            remedy=f"Build the {name} only on the ranks that share the context.",
        )
    return chosen, dist.get_world_size(chosen), rank
