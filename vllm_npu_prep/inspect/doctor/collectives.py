"""Checks environment variables of collectives: HCCL between NPUs, gloo between hosts' processes.

Forms and ranges are those of CANN 9.0's reference of environment variables
(``maintenref/envvar``, ``envref_07_0074`` to ``0080``) and HCCL's user guide (``hccl_env``); those
of gloo are torch's.
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
"""Variables that are whole numbers: their limits, and what they mean."""

CHOICES = {
    "HCCL_SOCKET_FAMILY": (("AF_INET", "AF_INET6"), "of the addresses that hosts use"),
    "HCCL_DETERMINISTIC": (("false", "true", "strict"), "whether sums are the same in every run"),
    "HCCL_OP_EXPANSION_MODE": (
        ("HOST", "HOST_TS", "AI_CPU", "AICPU_CacheDisable", "AIV"),
        "where a collective is laid out; A2: HOST unless given, A3: AI_CPU",
    ),
}
"""Variables that are words: the words, and what they choose. HCCL takes its default for any other
word, without telling. torch_npu reads ``HCCL_DETERMINISTIC`` in upper and lower case.
"""

LONGEST_AIV = 1091
ADDRESSES = ("HCCL_IF_IP", "VLLM_HOST_IP")


def collective_findings(host: Host) -> Iterator[Finding]:
    """Yield a finding for each variable that is set.

    HCCL variables that the doctor doesn't check share one line.
    """
    environment, rest = host.environment, []
    for name in sorted(environment):
        bad = bad_if(host.needs_npu) if name.startswith("HCCL_") else failure
        value = environment[name].strip()
        if name == "HCCL_EXEC_TIMEOUT" and environment.get("HCCL_OP_EXPANSION_MODE") == "AIV":
            yield _seconds_of_aiv(name, value, bad)
        elif name in RANGES:
            yield _number(name, value, bad)
        elif name in ADDRESSES:
            yield _address(name, value, bad)
        elif name in CHOICES:
            yield _choice(name, value, bad)
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


def _seconds_of_aiv(name: str, value: str, bad: Callable[[str, str, str], Finding]) -> Finding:
    """Check a time in seconds with ``AIV``: fractions are allowed, and 0 or more than 1091 means
    1091.
    """
    try:
        is_allowed = 0 < float(value) <= LONGEST_AIV
    except ValueError:
        is_allowed = False
    what = "seconds that a collective waits for a rank, with HCCL_OP_EXPANSION_MODE=AIV"
    if is_allowed:
        return ok(name, f"{value} ({what})")
    return bad(name, repr(value), f"set it to a number above 0, up to {LONGEST_AIV}: {what}")


def _choice(name: str, value: str, bad: Callable[[str, str, str], Finding]) -> Finding:
    choices, what = CHOICES[name]
    given = value.lower() if name == "HCCL_DETERMINISTIC" else value
    if given in choices:
        return ok(name, f"{value} ({what})")
    return bad(name, repr(value), f"set it to {', '.join(choices[:-1])} or {choices[-1]}: {what}")


def _address(name: str, value: str, bad: Callable[[str, str, str], Finding]) -> Finding:
    try:
        ip_address(value)
    except ValueError:
        return bad(name, repr(value), "set it to one IP address of this host, such as 10.0.0.1")
    return ok(name, value)


def _interfaces(
    host: Host, name: str, value: str, bad: Callable[[str, str, str], Finding]
) -> Finding:
    """Check names of interfaces.

    HCCL takes prefixes (``=``: exact names, ``^``: all but these); gloo takes exact names.
    """
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
