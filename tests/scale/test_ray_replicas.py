"""Replicas on a real Ray cluster: clients, adapter changes, failures and autoscaling."""

import http.client
import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import lorax
import openai
import pytest

from tests.demo.server import FOLDER
from tests.e2e.streaming_client import COMPLETIONS, NATIVE, Client, close_all, native, wait_for
from tests.e2e.streaming_client import openai as completion
from tests.scale.cluster import ADAPTERS, SECRET, Cluster, Replica, generate, send, starting

PROMPT = "Klonny Bardwell bought 12 pink kites on Tuesday for 45 coins."
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:The `dict` method is deprecated"),
]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Cluster]:
    """Start a Ray cluster without replicas."""
    with starting() as cluster:
        yield cluster


@pytest.fixture
def cluster(ray_cluster: Cluster) -> Cluster:
    """Start a cluster with two replicas."""
    ray_cluster.scale(2)
    return ray_cluster


def pair(cluster: Cluster) -> list[Replica]:
    """Wait for two replicas and return them."""
    wait_for(lambda: len(cluster.replicas()) == 2, "two replicas are there")
    wait_for(lambda: len(members(cluster)) == 2, "both follow")
    return cluster.replicas()


def members(cluster: Cluster) -> set[str]:
    """Return the names of the replicas in the merged metrics."""
    text = send(cluster.port, "GET", "/metrics")[2]
    return {line.split('"')[1] for line in text.splitlines() if line.startswith("lorax_engine_healthy{")}


def test_ingress_and_replicas_return_same_completions(cluster: Cluster) -> None:
    first, second = (generate(replica.port, "pirate", PROMPT)[0] for replica in pair(cluster))
    text, headers = generate(cluster.port, "pirate", PROMPT)
    assert first == second == text
    assert headers["x-adapter-id"] == "pirate"
    assert len(headers.get_all("x-request-id")) == 1
    status, _, models = send(cluster.port, "GET", "/v1/models")
    assert status == 200
    assert {model["id"] for model in models["data"]} >= {"lorax-demo", *ADAPTERS}  # other tests add more


def test_published_clients_work_unmodified(cluster: Cluster) -> None:
    native_client = lorax.Client(cluster.url, timeout=60)
    sdk = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    try:
        answer = native_client.generate(PROMPT, adapter_id="sql", max_new_tokens=8)
        events = list(native_client.generate_stream(PROMPT, adapter_id="sql", max_new_tokens=8))
        assert "".join(event.token.text for event in events) == answer.generated_text
        whole = sdk.completions.create(model="sql", prompt=PROMPT, max_tokens=8, temperature=0)
        chunks = list(sdk.completions.create(model="sql", prompt=PROMPT, max_tokens=8, temperature=0, stream=True))
        assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks) == answer.generated_text
        message: Any = {"role": "user", "content": PROMPT}
        chat = sdk.chat.completions.create(model="json", messages=[message], max_tokens=8, temperature=0)
        assert chat.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="nobody"):
            sdk.completions.create(model="nobody", prompt=PROMPT)
        with pytest.raises(openai.BadRequestError):
            sdk.completions.create(model="sql", prompt=PROMPT, max_tokens=-1)
    finally:
        sdk.close()
        if native_client.session is not None:
            native_client.session.close()


def test_ingress_forwards_replica_errors(cluster: Cluster) -> None:
    port = pair(cluster)[0].port
    for path, body in (("/generate", {"inputs": 1}), (COMPLETIONS, {"model": "x"}), ("/nothing", None)):
        direct, through = (send(at, "GET" if body is None else "POST", path, body) for at in (port, cluster.port))
        assert (direct[0], direct[2]) == (through[0], through[2])
    status, _, answer = send(cluster.port, "POST", "/generate", {"inputs": "x" * 3 * 2**20})
    assert (status, answer["error_type"]) == (413, "validation")
    assert send(cluster.port, "GET", "/replica/state")[0] == 404


def test_new_adapter_stays_on_first_replica(cluster: Cluster) -> None:
    for number in range(4):
        shutil.copytree(FOLDER / "adapters" / "pirate", cluster.adapters / f"late-{number}")
    # Others than `pirate`, whose content they would share.
    for number in range(4):
        config = cluster.adapters / f"late-{number}" / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 20 + number}))
    tiers = {f"late-{number}": [read_tier(cluster, f"late-{number}") for _ in range(6)] for number in range(4)}
    assert {name: first for name, (first, *_) in tiers.items()} == dict.fromkeys(tiers, "disk")
    assert {name: set(later) for name, (_, *later) in tiers.items()} == {name: {"device"} for name in tiers}


def read_tier(cluster: Cluster, adapter: str) -> str:
    return str(generate(cluster.port, adapter, PROMPT, 1)[1]["x-adapter-tier"])


def test_stopped_registry_blocks_only_adapter_changes(cluster: Cluster) -> None:
    pair(cluster)
    given = {"lora_name": "kept", "lora_path": "sql"}
    assert send(cluster.port, "POST", "/v1/load_lora_adapter", given)[0] == 200
    (registry,) = cluster.processes("RegistryActor")
    registry.suspend()
    try:
        status, headers, answer = send(cluster.port, "POST", "/v1/load_lora_adapter", {**given, "lora_name": "more"})
        assert (status, headers["retry-after"]) == (503, "1")
        assert "no adapter was changed" in answer["error"]["message"]
        assert generate(cluster.port, "kept", PROMPT)[0]
    finally:
        registry.resume()
    registry.send_signal(signal.SIGKILL)
    wait_for(lambda: send(cluster.port, "POST", "/v1/load_lora_adapter", {**given, "lora_name": "more"})[0] == 200, "")
    for replica in pair(cluster):
        assert [send(replica.port, "GET", f"/v1/models/{name}")[0] for name in ("kept", "more")] == [200, 200]


def test_client_disconnect_aborts_request(cluster: Cluster) -> None:
    with close_all(Client(cluster.server, NATIVE, native(400))) as (client,):
        next(client.events())
        client.close()
    wait_for(lambda: sum(running(cluster)) == 0, "no request runs")


def running(cluster: Cluster) -> list[float]:
    """Return the number of running requests on each replica."""
    lines = send(cluster.port, "GET", "/metrics")[2].splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith("lorax_batch_current_size{")]


@contextmanager
def paused_streams(
    cluster: Cluster, replicas: Sequence[Replica], path: str, body: Any
) -> Iterator[tuple[list[Iterator[Any]], list[Callable[[], None]]]]:
    """Start a stream on each of two replicas, and pause both engines before the streams finish.

    Yield the streams and, for each replica, a function that resumes its engine. The router may send both streams to one
    replica while the other is new, and a stream may finish before the pause: then two new streams are started.
    """
    while True:
        wait_for(lambda: sum(replica.num_unfinished() for replica in replicas) == 0, "no request runs")
        with close_all(*(Client(cluster.server, path, body) for _ in range(2))) as clients, ExitStack() as stack:
            streams = [client.events() for client in clients]
            for stream in streams:
                next(stream)
            resume = [stack.enter_context(replica.paused()) for replica in replicas]
            if [replica.num_unfinished() for replica in replicas] == [1, 1]:
                yield streams, resume
                return


def test_dead_actor_fails_only_its_streams(cluster: Cluster) -> None:
    replicas = pair(cluster)
    given = {"adapter_id": "pirate", "adapter_source": "local", "name": "captain"}
    status, _, described = send(cluster.port, "POST", "/v1/adapters/load", given)
    assert (status, described["id"]) == (200, "captain")
    assert [send(replica.port, "GET", "/v1/models/captain")[0] for replica in replicas] == [200, 200]
    with paused_streams(cluster, replicas, NATIVE, native(480)) as (streams, resume):
        replicas[0].actor.send_signal(signal.SIGKILL)
        resume[1]()
        after = [generate(cluster.port, name, PROMPT)[0] for name in ADAPTERS]  # another replica responds immediately
        assert all(after)
        ends = sorted((list(stream)[-1] for stream in streams), key=lambda event: "error" in event)
        assert ends[0]["generated_text"]
        assert ends[1]["error_type"] == "generation"
        assert "send the request again" in ends[1]["error"]
        wait_for(lambda: not replicas[0].server.is_running(), "its server ends with it")
    kept, (new,) = replicas[1], [replica for replica in pair(cluster) if replica not in replicas]
    assert kept in cluster.replicas()

    def has_alias() -> bool:
        assert generate(cluster.port, "captain", PROMPT)[0]  # a new replica applies changes before it receives requests
        return send(new.port, "GET", "/v1/models/captain")[0] == 200

    wait_for(has_alias, "the new one has made all changes")
    assert send(cluster.port, "POST", "/v1/unload_lora_adapter", {"lora_name": "captain"})[0] == 200
    assert [send(replica.port, "GET", "/v1/models/captain")[0] for replica in (kept, new)] == [404, 404]


def test_dead_server_is_replaced_and_streams_get_errors(cluster: Cluster) -> None:
    replicas = pair(cluster)
    with paused_streams(cluster, replicas, COMPLETIONS, completion(480)) as (streams, resume):
        replicas[1].server.send_signal(signal.SIGKILL)
        resume[0]()
        ends = [list(stream)[-1] for stream in streams]
    (error,) = [end["error"] for end in ends if end != "[DONE]"]
    assert error["type"] == "server_error"
    assert replicas[0] in pair(cluster)


def test_replaced_adapter_is_never_stale(cluster: Cluster) -> None:
    folder, given = cluster.adapters / "changing", {"adapter_id": "changing", "adapter_source": "local"}
    ports = [cluster.port, *(replica.port for replica in pair(cluster))]
    for round, source in enumerate(("pirate", "sql", "json", "pirate", "sql")):
        expected = generate(cluster.port, source, PROMPT)[0]
        shutil.copytree(FOLDER / "adapters" / source, folder.with_name(f"next-{round}"))
        if folder.exists():
            folder.rename(folder.with_name(f"old-{round}"))
        folder.with_name(f"next-{round}").rename(folder)
        assert send(cluster.port, "POST", "/v1/adapters/load", given)[0] == 200
        with ThreadPoolExecutor(6) as threads:
            asked = [threads.submit(generate, port, "changing", PROMPT) for port in ports * 2]
            assert {answer.result()[0] for answer in asked} == {expected}


def test_concurrent_admin_requests_leave_replicas_consistent(cluster: Cluster) -> None:
    replicas = pair(cluster)

    def change_repeatedly(names: Sequence[str]) -> None:
        for name in names:
            given = {"adapter_id": name, "adapter_source": "local", "name": "contested"}
            status, _, answer = send(cluster.port, "POST", "/v1/adapters/load", given)
            assert status == 200, answer

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(change_repeatedly, [("pirate", "sql") * 4, ("json", "redact") * 4]))
    meant = {generate(port, "contested", PROMPT)[0] for port in (cluster.port, *(each.port for each in replicas))}
    assert len(meant) == 1
    assert meant < {generate(cluster.port, name, PROMPT)[0] for name in ADAPTERS}
    assert send(cluster.port, "POST", "/v1/unload_lora_adapter", {"lora_name": "contested"})[0] == 200
    assert [send(replica.port, "GET", "/v1/models/contested")[0] for replica in replicas] == [404, 404]


def test_replicas_know_the_client_address_and_reject_direct_requests(cluster: Cluster) -> None:
    """The audit log contains the client address for rejected keys."""
    (replica, _), logs = pair(cluster), cluster.adapters.parent

    def load(port: int, source: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, source_address=(source, 0), timeout=60)
        headers = {"authorization": "Bearer wrong", "content-type": "application/json", "x-lorax-client": "127.0.0.5"}
        connection.request("POST", "/v1/adapters/load", json.dumps({"adapter_id": "sql"}), headers)
        status = connection.getresponse().status
        connection.close()
        return status

    def logged(text: str) -> bool:
        return any(text in file.read_text(errors="replace") for file in logs.glob("session_2*/logs/**/*.err"))

    assert load(replica.port, "127.0.0.3") == 403
    assert load(cluster.port, "127.0.0.2") == 401
    wait_for(lambda: logged('key="" address=127.0.0.2 '), "the client is logged")
    assert not logged("address=127.0.0.5 ")
    assert not logged(SECRET)


def test_scaling_under_load_loses_no_requests(cluster: Cluster) -> None:
    pair(cluster)
    failures, done, answers = list[BaseException](), threading.Event(), list[str]()

    def send_requests_until_done(name: str) -> None:
        while not done.is_set():
            try:
                answers.append(generate(cluster.port, name, PROMPT, 16)[0])
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=send_requests_until_done, args=(name,)) for name in ADAPTERS[:3]]
    for thread in threads:
        thread.start()
    try:
        for count in (3, 2):
            cluster.scale(count)
            wait_for(lambda count=count: len(cluster.replicas()) == count, f"there are {count}")  # type: ignore[misc]
            before = len(answers)
            wait_for(lambda before=before: len(answers) > before + 10 or failures, "they answer")  # type: ignore[misc]
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures
    pair(cluster)


def test_failed_replica_start_reports_reason(cluster: Cluster) -> None:
    settings = {"model_id": "/nowhere/at/all", "device": "cpu", "name": "broken", "hub_offline": True}
    try:
        with pytest.raises(AssertionError, match="broken"):
            cluster.call("run", settings, "broken", "/broken")
        assert "/nowhere/at/all" in cluster.call("status", "broken")["servers"]
        assert generate(cluster.port, "pirate", PROMPT)[0]
    finally:
        cluster.call("delete", "broken")
    try:
        with pytest.raises(AssertionError, match="other"):
            cluster.call("run", {"device": "cpu", "name": "other"}, "other", "/other", "0.0.1")
        assert "was built with 0.0.1; install the same version" in cluster.call("status", "other")["servers"]
        assert generate(cluster.port, "pirate", PROMPT)[0]
    finally:
        cluster.call("delete", "other")
    for arguments, message in (
        ({"modle_id": "x"}, "did you mean --model-id?"),
        ({"replicas": "many"}, "replicas: 'many' is not a whole number"),
        ({"replicas": 0}, "replicas = 0 must be at least 1"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas = 2 must be at least replicas = 3"),
        ({"max_total_tokens": -1}, "must be at least 1"),
    ):
        with pytest.raises(AssertionError, match=message.replace("?", r"\?")):
            cluster.call("run", arguments)


TOKENS = {"target_tokens": 40, "target_waiting": 10**6}
QUEUE = {"target_tokens": 10**6, "target_waiting": 1, "max_num_seqs": 1}  # runs requests one after the other


@pytest.mark.parametrize("targets", [TOKENS, QUEUE], ids=["tokens", "queue"])
def test_autoscaling_follows_load(ray_cluster: Cluster, targets: dict[str, int]) -> None:
    """Four concurrent requests exceed the target of one replica."""
    delays = {"look_back_s": 3, "upscale_delay_s": 1, "downscale_delay_s": 1}
    ray_cluster.scale(None, replicas=1, max_replicas=2, **delays, **targets)
    wait_for(lambda: len(ray_cluster.replicas()) == 1, "there is one")
    should_stop = threading.Event()

    def send_requests(name: str) -> int:
        count = 0
        while not should_stop.is_set():
            # Short completions finish before Ray evaluates the policy.
            assert generate(ray_cluster.port, name, count=400, ignore_eos_token=True)[0]
            count += 1
        return count

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(send_requests, name) for name in ADAPTERS[:4]]
        try:
            wait_for(
                lambda: len(ray_cluster.replicas()) == 2 or any(each.done() for each in asking), "another is there"
            )
        finally:
            should_stop.set()
        assert all(each.result() for each in asking)  # no request was lost
    wait_for(lambda: len(ray_cluster.replicas()) == 1, "one is enough again")
