"""Replicas on a real Ray that come with the tokens in flight, and go when there are none."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.wire import wait_for
from tests.scale.cluster import ADAPTERS, ADMIN, generate, starting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_replica_comes_with_the_load_and_goes_with_it() -> None:
    settings = {"device": "cpu", "admin_key": ADMIN, "host": "127.0.0.1", "drain_s": 20, "replicas": 1}
    settings |= {"max_replicas": 2, "target_tokens": 40, "upscale_delay_s": 1, "downscale_delay_s": 5}
    with starting() as cluster, ThreadPoolExecutor(4) as threads:
        cluster.ask("run", settings)
        assert len(cluster.replicas()) == 1
        is_enough = threading.Event()

        def keep_asking(name: str) -> int:
            count = 0
            while not is_enough.is_set():
                # Answers that end when they want are over before Ray looks, most of the time.
                assert generate(cluster.port, name, count=400, ignore_eos_token=True)[0]
                count += 1
            return count

        asking = [threads.submit(keep_asking, name) for name in ADAPTERS[:4]]
        try:
            wait_for(lambda: len(cluster.replicas()) == 2 or any(each.done() for each in asking), "another is there")
        finally:
            is_enough.set()
        assert all(each.result() for each in asking)  # no request was lost
        wait_for(lambda: len(cluster.replicas()) == 1, "one is enough again")
