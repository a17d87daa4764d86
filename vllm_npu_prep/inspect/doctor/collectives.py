"""Environment variables of collectives: HCCL between NPUs, gloo between hosts' processes.

Forms and ranges are those of CANN 9.0's reference of environment variables
(``maintenref/envvar``, ``envref_07_0074`` to ``0080``); those of gloo are torch's.
"""

from collections.abc import Callable, Iterator
from ipaddress import ip_address

from vllm_npu_prep.inspect.doctor.finding import Finding, bad_if, failure, ok
from vllm_npu_prep.inspect.doctor.host import Host

INTERFACES = "/sys/class/net"
RANGES = {
    "HCCL_CONNECT_TIMEOUT": (120, 7200, "seconds that ranks wait for one another at start-up"),
    "HCCL_EXEC_TIMEOUT": (0, 2147483647, "seconds that a collective waits for a rank, 0: forever"),
    "HCCL_BUFFSIZE": (1, None, "MB; each group of ranks takes twice that on each NPU"),
    "HCCL_IF_BASE_PORT": (1024, 65520, "the first of 16 ports"),
}
"""Whole numbers, their limits, and what they are."""

FAMILIES = ("AF_INET", "AF_INET6")
ADDRESSES = ("HCCL_IF_IP", "VLLM_HOST_IP")


def collective_findings(host: Host) -> Iterator[Finding]:
    """A line for each variable that is set.

    HCCL variables that the doctor doesn't check share one line.
    """
    environment, rest = host.environment, []
    for name in sorted(environment):
        bad = bad_if(host.needs_npu) if name.startswith("HCCL_") else failure
        value = environment[name].strip()
        if name in RANGES:
            yield _number(name, value, bad)
        elif name in ADDRESSES:
            yield _address(name, value, bad)
        elif name == "HCCL_SOCKET_FAMILY":
            do = f"set it to {' or '.join(FAMILIES)}"
            yield ok(name, value) if value in FAMILIES else bad(name, repr(value), do)
        elif name in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            yield _interfaces(host, name, value, bad)
        elif name.startswith("HCCL_"):
            rest.append(name)
    if rest:
        yield ok("HCCL_*", f"{', '.join(rest)} (not looked at)")


def _number(name: str, value: str, bad: Callable[[str, str, str], Finding]) -> Finding:
    least, most, what = RANGES[name]
    limits = f"from {least} to {most}" if most is not None else f"from {least} on"
    try:
        is_allowed = least <= int(value) and (most is None or int(value) <= most)
    except ValueError:
        is_allowed = False
    if is_allowed:
        return ok(name, f"{value} ({what})")
    return bad(name, repr(value), f"set it to a whole number {limits}: {what}")


def _address(name: str, value: str, bad: Callable[[str, str, str], Finding]) -> Finding:
    try:
        ip_address(value)
    except ValueError:
        return bad(name, repr(value), "set it to one IP address of this host, such as 10.0.0.1")
    return ok(name, value)


def _interfaces(
    host: Host, name: str, value: str, bad: Callable[[str, str, str], Finding]
) -> Finding:
    """HCCL takes prefixes (``=``: exact names, ``^``: all but these); gloo takes exact names."""
    here, given, excludes, exact = host.names(INTERFACES), value, False, True
    if name == "HCCL_SOCKET_IFNAME":
        excludes, given = given.startswith("^"), given.removeprefix("^")
        exact, given = given.startswith("="), given.removeprefix("=")
    chosen = [part.strip() for part in given.split(",") if part.strip()]
    matched = [
        each for each in here if any(each == c if exact else each.startswith(c) for c in chosen)
    ]
    left = [each for each in here if (each in matched) != excludes]
    if not chosen or (here and not left):
        return bad(name, repr(value), f"name an interface of this host: {', '.join(here)}")
    return ok(name, f"{value} ({', '.join(left) or 'interfaces of this host are unknown'})")
