# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from harness.ranks import RankPool


class _Pools:
    """One pool for every world size, started when first asked for, and again after a failure has ended it."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        pool = self._pools.get(world_size)
        if pool is None or not pool.alive:
            self._pools[world_size] = RankPool(world_size)
        return self._pools[world_size]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def pools():
    pools = _Pools()
    yield pools
    pools.close()
