"""Checks of the engine's options: each error names the option, its value and the remedy."""

import os
from numbers import Integral

MAX_BLOCK_SIZE = 256
"""The kernels', repeated here, where no JAX is imported."""


def is_int(value: object) -> bool:
    """Whether it is an integer, True and False not counted."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_count(name: str, value: object, least: int) -> None:
    """Raise ValueError unless it is None or an integer of at least `least`."""
    if value is not None and (not is_int(value) or value < least):  # type: ignore[operator]
        raise ValueError(
            f"{name}={value!r} must be an integer of at least {least}, or None for the default"
        )


def check_most(name: str, value: int | None, most: int, instead: str) -> None:
    """Raise ValueError if it is more than `most`; `instead` says how less will do."""
    if value is not None and value > most:
        raise ValueError(
            f"{name}={value} is more than {most}: a start compiles steps of every size up to it; "
            f"give at most {most} ({instead})"
        )


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless it is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not supported; choose one of {', '.join(choices)}")


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False")


def check_pool(block_size: object, num_blocks: object, num_bytes: object) -> None:
    """Raise ValueError unless blocks have a size that kernels know, and the pool one size."""
    if not is_int(block_size) or not 1 <= block_size <= MAX_BLOCK_SIZE:  # type: ignore[operator]
        raise ValueError(
            f"block_size={block_size!r} is not an integer from 1 to {MAX_BLOCK_SIZE}; use 16"
        )
    if num_blocks is not None and (not is_int(num_blocks) or num_blocks < 2):  # type: ignore[operator]
        raise ValueError(
            f"num_blocks={num_blocks!r} must be an integer of at least 2 "
            "(block 0 is the null block and holds no tokens)"
        )
    if num_blocks is not None and num_bytes is not None:
        raise ValueError("give num_blocks or kv_cache_memory_bytes, not both")


def check_utilization(value: object) -> None:
    """Raise ValueError unless it is a share of the device's memory."""
    if not _is_number(value) or not 0.0 < value <= 1.0:  # type: ignore[operator]
        raise ValueError(f"gpu_memory_utilization={value!r} must be above 0 and at most 1; use 0.9")


def check_swap_space(value: object, preemption_mode: str) -> None:
    """Raise ValueError unless it is None, or GiB that this machine has, enough for the mode."""
    if value is None:
        return
    if not _is_number(value) or not value >= 0:  # type: ignore[operator]
        raise ValueError(f"swap_space={value!r} must be a number of GiB, 0 or more; use 4")
    present = physical_memory_bytes() / 2**30
    if value > present:  # type: ignore[operator]
        raise ValueError(
            f"swap_space={value!r} GiB is more than this machine's {present:.1f} GiB of memory; "
            "lower it"
        )
    if preemption_mode == "swap" and not value:
        raise ValueError(
            f"swap_space={value!r} leaves preemption_mode='swap' no memory to swap to; "
            "give some GiB, or use preemption_mode='recompute'"
        )


def default_swap_space() -> float:
    """GiB that suit this machine."""
    return min(4.0, physical_memory_bytes() / 2**31)


def physical_memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
