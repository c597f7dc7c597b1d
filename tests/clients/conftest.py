# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from harness.ranks import RankPool


class _Pools:
    """One pool of every kind, started when first asked for, and again after a failure has ended it."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, bool], RankPool] = {}

    def __call__(self, world_size: int, *, trainers: bool = True) -> RankPool:
        key = world_size, trainers
        if key not in self._pools or not self._pools[key].alive:
            self._pools[key] = RankPool(world_size, trainers=trainers)
        return self._pools[key]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def pools():
    pools = _Pools()
    yield pools
    pools.close()
