"""Hosts that join over a network, and jobs across them: bridges, interfaces, firewalls, IPv6, names that move."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.net import Host, Network, ip

Make = Callable[..., Network]
PORTS = (7740, 7759)
SCRIPT = """\
import torch, rudra_zmq as rudra
x = torch.randn(2048, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
with rudra.join() as learner:
    model = learner.attach(torch.nn.Linear(8, 2))
    opt = learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in learner.epochs():
        for a, b in learner.batches(data):
            learner.step(torch.nn.functional.cross_entropy(model(a), b))
"""


def cluster(net: Network, listen: str = "", dial: str = "") -> Host:
    """psd with a key on the first host, learnerd with one on each; the first host, once all have joined.

    The others dial the one address; the first one has psd's socket.
    """
    head = net.hosts[0]
    listen = listen or f"tcp://{head.address}:7733"
    key = made(head, "psd")
    head.configure(
        f'[host]\nname = "{head.name}"\nslots = 1\n[psd]\nlisten = "{listen}"\nports = "{PORTS[0]}-{PORTS[1]}"\n'
    )
    head.start("psd")
    head.says("psd", "psd runs")
    for host in net.hosts[1:]:
        host.configure(
            f'[host]\nname = "{host.name}"\nslots = 1\n[head]\naddress = "{dial or listen}"\nkey = "{key}"\n'
        )
        head.rudra("keys", "authorize", made(host, "learnerd"), host.name, "--role", "host")
    for host in net.hosts:
        host.start("learnerd")
    for host in net.hosts:
        host.says("learnerd", " registered ")
    return head


def made(host: Host, owner: str) -> str:
    """The public key of a new secret on a host."""
    return str(json.loads(host.rudra("keys", "new", owner, "--json").stdout)["key"])


def hosts(head: Host) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(head.rudra("hosts", "--json").stdout)["hosts"]}


def train(head: Host, count: int = 3, **learners: str) -> dict[str, Any]:
    """A short job over all hosts, to its end."""
    (head.folder / "train.py").write_text(SCRIPT)
    sets = [f"-slearners.{key}={value}" for key, value in {"count": count, "threads": 1, **learners}.items()]
    done = head.rudra("submit", "--follow", "--json", "-s", "job.epochs=2", *sets, "train.py")
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["state"], result["epochs"][-1]["distinct"]) == ("DONE", 2048), done.stderr
    return result


def sessions(head: Host) -> str:
    """What the node's log says of who came, by which way."""
    return "\n".join(file.read_text() for file in head.state.glob("jobs/*/logs/*"))


def test_three_hosts_are_shown_with_what_they_have_and_train_together(network: Make) -> None:
    net = network(3)
    head = cluster(net)
    rows = hosts(head)
    assert list(rows) == ["h1", "h2", "h3"]
    assert [row["address"] for row in rows.values()] == ["", "10.77.0.1", "10.77.0.1"]
    assert all(row["versions"].keys() >= {"rudra", "python", "torch"} for row in rows.values())
    assert "interface=eth0" in head.log("psd")
    assert 'by="10.77.0.2 (eth0)"' in net.hosts[1].log("learnerd")
    train(head)


def test_a_bridge_of_equal_address_on_two_hosts_is_never_advertised(network: Make) -> None:
    net = network(2)
    for host in net.hosts:
        ip("-n", host.space, "link", "add", "docker0", "type", "bridge")
        ip("-n", host.space, "addr", "add", "172.17.0.1/16", "dev", "docker0")
        ip("-n", host.space, "link", "set", "docker0", "up")
    head = cluster(net, "tcp://0.0.0.0:7733", f"tcp://{net.hosts[0].address}:7733")
    assert 'interface="all interfaces"' in head.log("psd")
    job = train(head, 2)
    told = sessions(head) + head.log("psd") + net.hosts[1].log("learnerd")
    assert "172.17" not in told + json.dumps(job) + json.dumps(hosts(head))


def test_of_two_interfaces_the_one_that_was_typed_carries_everything(network: Make) -> None:
    net = network(2)
    first, second = net.hosts
    net.plug(first, "eth1", "10.88.0.1/24")
    net.plug(second, "eth1", "10.88.0.2/24")
    before = traffic(first)
    head = cluster(net, "tcp://10.88.0.1:7733")
    assert "interface=eth1" in head.log("psd")
    train(head, 2)
    sent = {name: traffic(first)[name] - before[name] for name in before}
    assert sent["eth1"] > 20_000 > 2_000 > sent["eth0"], sent


def traffic(host: Host) -> dict[str, int]:
    """Bytes that left by each interface."""
    rows = json.loads(host.run("ip", "-j", "-s", "link").stdout)
    return {row["ifname"]: int(row["stats64"]["tx"]["bytes"]) for row in rows}


def test_the_declared_ports_are_enough_and_learner_hosts_only_dial_out(network: Make) -> None:
    net = network(3)
    head = net.hosts[0]
    ports = f"7733, {PORTS[0]}-{PORTS[1]}"
    for host in net.hosts:
        declared = f"tcp dport {{ {ports} }} accept\n" if host is head else ""
        host.nft(
            "table inet f {\nchain i {\ntype filter hook input priority 0; policy accept;\niif lo accept\n"
            f"{declared}tcp flags & (syn | ack) == syn counter drop\nmeta l4proto udp counter drop\n}}\n}}\n"
        )
    cluster(net)
    train(head)
    for host in net.hosts:
        rules = json.loads(host.run("nft", "-j", "list", "ruleset").stdout)["nftables"]
        counters = [e["counter"] for rule in rules if "rule" in rule for e in rule["rule"]["expr"] if "counter" in e]
        assert [counter["packets"] for counter in counters] == [0, 0], f"{host.name} was knocked at: {rules}"


def test_where_there_is_only_ipv6(network: Make) -> None:
    net = network(2, v6=True)
    head = cluster(net)
    assert [row["address"] for row in hosts(head).values()] == ["", "fd77::1"]
    train(head, 2)


def test_a_head_that_has_moved_is_found_by_its_name(network: Make) -> None:
    net = network(2)
    head, other = net.hosts
    for host in net.hosts:
        host.names({"ps0": head.address})
    cluster(net, f"tcp://{head.address}:7733", "tcp://ps0:7733")
    net.end(head, "psd")
    ip("-n", head.space, "addr", "del", f"{head.address}/24", "dev", "eth0")
    ip("-n", head.space, "addr", "add", "10.77.0.9/24", "dev", "eth0")
    for host in net.hosts:
        host.names({"ps0": "10.77.0.9"})
    head.start("psd", "--listen", "tcp://10.77.0.9:7733")
    other.says("learnerd", "ps0 moved 10.77.0.1 -> 10.77.0.9")
    for host in net.hosts:
        net.until(lambda host=host: host.log("learnerd").count(" registered ") == 2, f"{host.name} again")
    assert [row["address"] for row in hosts(head).values()] == ["", "10.77.0.9"]
    train(head, 2)


@pytest.mark.long
def test_a_host_that_vanishes_is_noticed_and_the_job_goes_on(network: Make) -> None:
    net = network(2)
    head, other = net.hosts
    cluster(net)
    (head.folder / "train.py").write_text(SCRIPT)
    sets = ["job.epochs=100000", "learners.count=2", "learners.threads=1", "learners.deadline=15s"]
    job = head.rudra("submit", "-q", *(f"-s{s}" for s in sets), "train.py").stdout.strip()
    status = lambda: json.loads(head.rudra("status", "--json", job).stdout)  # noqa: E731
    net.until(lambda: status()["updates"] > 10, "updates", 40)
    ip("-n", net.switch, "link", "set", f"eth0{other.name}", "down")
    head.says("psd", "learnerd on h2 is silent for ", 10)
    row = hosts(head)["h2"]
    assert row["silent"] and row["last_seen"]
    net.until(lambda: status()["lambda"] == 1, "one learner", 40)
    updates = status()["updates"]
    net.until(lambda: status()["updates"] > updates, "more updates")
    ip("-n", net.switch, "link", "set", f"eth0{other.name}", "up")
    net.until(lambda: not hosts(head)["h2"]["silent"], "h2 again")
    head.rudra("stop", "--now", job, status=None)


@pytest.mark.long
def test_fashion_mnist_over_three_hosts(network: Make, fashion_data: Path) -> None:
    net = network(3)
    head = cluster(net)
    file = head.folder / "job.toml"
    file.write_text(
        '[job]\ntask = "rudra_zmq.tasks.fashion_mnist:cnn"\nepochs = 3\n[learners]\ncount = 3\nthreads = 1\n'
        '[sync]\nprotocol = "softsync"\nn = 1\n'
    )
    done = head.rudra("submit", "--follow", "--json", file, timeout=240)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["accuracy"] >= 0.87
    assert [(e["samples"], e["distinct"]) for e in result["epochs"]] == [(60000, 60000)] * 3
