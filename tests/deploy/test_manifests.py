"""The compose files and Kubernetes manifests of examples/deploy."""

import re

import kubernetes_validate
import pytest

from tests.helpers.deploy import (
    COMPOSE,
    GIVEN,
    KUBERNETES,
    PODS,
    command_of,
    compose,
    documents,
    serve_flags,
    services,
)

SECONDS_TO_END = 10
"""What is left for processes to end, after requests got their time."""
GRACE = re.compile(r"(?:(\d+)m)?(?:(\d+)s)?")


def flag(flags: list[str], name: str, default: int = 1) -> int:
    values = [int(word.split("=")[1]) for word in flags if word.startswith(f"--{name}=")]
    return values[0] if values else default


def pod_of(name: str) -> tuple[dict, dict]:
    """Specification of a pod, and its only container."""
    pod = PODS[name][1]["template"]["spec"]
    [container] = pod["containers"]
    return pod, container


def seconds_before_stop(container: dict) -> int:
    """It is asked to stop when nobody sends it requests any longer."""
    [sleep, seconds] = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    return int(seconds)


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_manifests_follow_the_schemas_of_kubernetes(path):
    assert documents(path)
    for document in documents(path):
        kubernetes_validate.validate(document, "1.32", strict=True)


@pytest.mark.parametrize("name", PODS)
def test_pods_have_what_a_server_needs(name):
    (_, spec), (pod, container) = PODS[name], pod_of(name)
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["supplementalGroups"]
    assert not pod["enableServiceLinks"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts) == set(volumes)
    assert ("/etc/hccn.conf" in mounts.values()) == name.startswith("several-hosts")
    assert mounts["shared-memory"] == "/dev/shm"
    assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == "models"
    assert int(container["resources"]["limits"]["huawei.com/Ascend910"]) >= 1
    assert "startupProbe" in container and "livenessProbe" in container


@pytest.mark.parametrize("name", PODS)
def test_pods_end_gracefully(name):
    pod, container = pod_of(name)
    flags = serve_flags(command_of(container)) or []
    drain = flag(flags, "shutdown-timeout", default=0)
    assert drain or not flags
    needed = seconds_before_stop(container) + drain + SECONDS_TO_END
    assert pod["terminationGracePeriodSeconds"] >= needed
    if flags:
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["http"] == 8000 and "--port" not in " ".join(flags)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}


def test_workers_outlive_the_head_that_drains():
    head, worker = (pod_of(f"several-hosts.yaml ray-{role}")[1] for role in ("head", "worker"))
    drain = flag(serve_flags(command_of(head)), "shutdown-timeout")
    assert seconds_before_stop(worker) >= seconds_before_stop(head) + drain + SECONDS_TO_END


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_a_pod_has_as_many_npus_as_ranks(path):
    ranks, cards, claimed = 0, 0, 0
    for name in (name for name in PODS if name.startswith(path.name + " ")):
        (replicas, _), (_, container) = PODS[name], pod_of(name)
        cards += replicas * int(container["resources"]["limits"]["huawei.com/Ascend910"])
        command = command_of(container)
        claimed += sum(map(int, re.findall(r'"NPU": (\d+)', " ".join(command))))
        flags = serve_flags(command) or []
        if flags:
            ranks += flag(flags, "tensor-parallel-size") * flag(flags, "pipeline-parallel-size")
            across = "--distributed-executor-backend=ray" in flags
            assert across == (path.name == "several-hosts.yaml")
    assert ranks == cards
    assert claimed == (cards if path.name == "several-hosts.yaml" else 0)


def test_compose_reads_its_files_and_servers_end_gracefully():
    for name, service in services().items():
        if name.startswith("common.yaml"):
            continue
        assert service["init"] and service["cap_drop"] == ["ALL"], name
        assert any(volume["target"] == "/models" for volume in service["volumes"]), name
        devices = [device["source"] for device in service.get("devices", [])]
        cards = [device for device in devices if re.fullmatch(r"/dev/davinci\d+", device)]
        command = command_of(service)
        flags = serve_flags(command)
        if flags is not None:
            minutes, seconds = GRACE.fullmatch(service["stop_grace_period"]).groups("0")
            drain = flag(flags, "shutdown-timeout", default=0)
            assert drain
            assert int(minutes) * 60 + int(seconds) >= drain + SECONDS_TO_END, name
            hosts = flag(flags, "pipeline-parallel-size")
            ranks = flag(flags, "tensor-parallel-size") * hosts
            assert len(cards) * hosts == (0 if name.startswith("cpu") else ranks), name
        if "NPU" in " ".join(command):
            assert f'"NPU": {len(cards)}' in " ".join(command), name
        if cards:
            assert {"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"} <= set(devices)
            assert service["group_add"] == ["1000"], name
        across = name.startswith("several-hosts")
        assert across == any(mount["source"] == "/etc/hccn.conf" for mount in service["volumes"])
    assert {name.split(".")[0] for name in services()} == {
        *("common", "cpu", "one-card", "several-cards", "several-hosts")
    }


def test_compose_names_what_is_missing():
    path = next(path for path in COMPOSE if path.name == "one-card.yaml")
    done = compose(path, "--quiet", **{**GIVEN, "MODEL": ""})
    assert done.returncode != 0 and "a folder in MODELS" in done.stderr
