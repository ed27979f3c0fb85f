"""Lets the threads of the default process group end with destroy_process_group()."""

from types import FunctionType

import torch.distributed as dist
import torch.distributed.nn.functional  # otherwise the first call of a custom operator loads it


def forget_default_group() -> None:
    """Replaces the default group by None in the default arguments of ``torch.distributed.nn.functional``.

    Python evaluates these arguments when torch's module is loaded. After init_process_group() they are the group. Then
    the group outlives destroy_process_group(), and its threads can abort the process at its end. None means the default
    group, too: the group at the time of a call.
    """
    world = dist.group.WORLD
    if world is None:
        return
    for function in vars(torch.distributed.nn.functional).values():
        if isinstance(function, FunctionType) and function.__defaults__:
            function.__defaults__ = tuple(None if value is world else value for value in function.__defaults__)
