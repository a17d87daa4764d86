"""The ``ascend-emulator`` command: run a command as on a host with Ascend devices."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ascend_emulator import __version__, calls, faults, profiles
from ascend_emulator.build import (
    SITE,
    acl_configuration,
    ensure_built,
    ensure_extensions_built,
    operators_folder,
)
from ascend_emulator.errors import EmulatorError
from ascend_emulator.options import (
    DELAYS,
    HAZARDS,
    Options,
    bytes_of,
    check_driver,
    check_soc,
    check_streams,
    streams_of,
    write_driver_info,
)

HOOK = Path(__file__).parent / "hook"
HAZARD_EXIT_CODE = 3
"""Exit code if the command itself succeeded but a hazard remained that no sync reported."""

LIMITS = (
    "numerics, speed, alignment and layout limits of real kernels, speed and rounding of HCCL, and "
    "most custom operators are not covered; operator references are a reading of the documentation"
)
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: list[str] | None = None) -> int:
    """Run a command on emulated devices, and return its exit code.

    The code is `HAZARD_EXIT_CODE` if the command succeeded in spite of a hazard, and 2 if it could
    not be started, which prints one line and no traceback.
    """
    try:
        return emulate(parser().parse_args(argv))
    except EmulatorError as error:
        print(f"ascend-emulator: error: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    defaults = Options()
    parser = argparse.ArgumentParser(
        prog="ascend-emulator",
        usage="ascend-emulator [options] -- COMMAND ...",
        description=f"Run a command on emulated Ascend devices. Limits: {LIMITS}.",
    )
    parser.add_argument(
        "--version", action="version", version=__version__, help="print the package's version"
    )
    parser.add_argument("--soc", default=defaults.soc, help="chip (default: %(default)s)")
    parser.add_argument(
        "--profile",
        default=os.environ.get(profiles.PROFILE) or profiles.DEFAULT,
        metavar="NAME",
        help=f"kernels of a CANN release, or all that the documentation demands: "
        f"{', '.join(profiles.PROFILES)} (default: {profiles.DEFAULT})",
    )
    parser.add_argument("--cann", help="version of CANN (default: the profile's)")
    parser.add_argument(
        "--fault",
        default=os.environ.get(faults.FAULTS_VARIABLE, ""),
        metavar="NAME[,NAME]",
        help="silent misbehaviour of kernels to switch on (a wrong name prints the list)",
    )
    parser.add_argument(
        "--driver", default=defaults.driver, help="version of the driver (default: %(default)s)"
    )
    parser.add_argument(
        "--devices", type=int, default=defaults.devices, help="number of devices (default: 1)"
    )
    parser.add_argument(
        "--memory", default="8G", help="memory of each device (default: %(default)s)"
    )
    parser.add_argument(
        "--streams",
        type=int,
        help="streams of each device (default: 2048, or 32768 on A3 with a newer driver and CANN)",
    )
    parser.add_argument(
        "--hccl-streams",
        type=int,
        default=defaults.hccl_streams,
        help="streams that a communication group holds in each captured graph "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--delay",
        choices=DELAYS,
        default=defaults.delay,
        help="wait before each task of a stream (default: %(default)s)",
    )
    parser.add_argument(
        "--hazards",
        choices=HAZARDS,
        default=defaults.hazards,
        help="whether a hazard makes the next sync fail, or is only reported (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--allow-hazard",
        action="append",
        default=[],
        metavar="PATTERN",
        help="let hazards pass whose message contains this pattern (* and ? as in a shell); may "
        "be repeated",
    )
    parser.add_argument(
        "--hang-seconds",
        type=int,
        default=defaults.hang_seconds,
        help="how long a stream waits for an event before it counts as hung (default: %(default)s)",
    )
    parser.add_argument("--trace", action="store_true", help="print every call and launch")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what happened as JSON")
    parser.add_argument(
        "--calls",
        type=Path,
        metavar="FILE",
        help="write each distinct call of an operator with a reference as a line of JSON",
    )
    parser.add_argument(
        "--references",
        action="append",
        default=[],
        metavar="MODULE",
        help="Python module with operator references of your own; may be repeated",
    )
    parser.add_argument(
        "--site",
        type=Path,
        metavar="DIR",
        help="folder with torch_npu, if it isn't installed beside torch (default: %(default)s)",
        default=SITE,
    )
    parser.add_argument("--quiet", action="store_true", help="no banner and no summary")
    parser.add_argument(
        "command_line",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND ...",
        help="the command and its arguments",
    )
    return parser


def emulate(args: argparse.Namespace) -> int:
    """Build if needed, run the command, and report; return the command's exit code."""
    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    if not command:
        raise EmulatorError("no command given: ascend-emulator [options] -- COMMAND ...")
    if not 1 <= args.devices <= 16:
        raise EmulatorError(f"--devices {args.devices} is not between 1 and 16")
    profile = profiles.find(args.profile)
    soc, driver, cann = check_soc(args.soc), check_driver(args.driver), args.cann or profile.cann
    streams = streams_of(soc, driver, cann) if args.streams is None else args.streams
    check_streams(streams, args.hccl_streams)
    options = Options(
        soc=soc,
        profile=profile.name,
        cann=cann,
        driver=driver,
        devices=args.devices,
        memory_bytes=bytes_of(args.memory),
        streams=streams,
        hccl_streams=args.hccl_streams,
        delay=args.delay,
        hazards=args.hazards,
        allowed_hazards=tuple(args.allow_hazard),
        trace=args.trace,
        report=args.report,
        calls=args.calls,
        hang_seconds=args.hang_seconds,
        references=tuple(args.references),
        faults=tuple(sorted(faults.check(filter(None, args.fault.split(","))))),
    )
    site = [args.site.resolve()] if args.site.is_dir() else []
    sys.path[:0] = map(str, site)
    # The scripts of this environment come first, as in an activated environment.
    scripts = str(Path(sys.executable).parent)
    path = scripts + os.pathsep + os.environ.get("PATH", os.defpath)
    program = shutil.which(command[0], path=path)
    if program is None:
        raise EmulatorError(f"no such command: {command[0]}")
    libraries = ensure_built()
    extensions = ensure_extensions_built(libraries)
    if not args.quiet:
        _print_banner(options)
    with tempfile.TemporaryDirectory(prefix="npu-emulator-") as folder:
        write_driver_info(Path(folder) / "driver", options.driver)
        environment = _environment(options, [libraries, *extensions], Path(folder), site)
        environment["PATH"] = path
        code = _run([program, *command[1:]], environment)
        report = merged_report(Path(folder), options)
        if options.calls:
            options.calls.write_text(merged_calls(Path(folder), options))
    if options.report:
        options.report.write_text(json.dumps(report, indent=2) + "\n")
    if not args.quiet:
        _print_summary(report)
        _print_allowed(options.allowed_hazards, report["allowed_hazards"])
    if code == 0 and report["unreported_faults"]:
        for fault in report["unreported_faults"]:
            _log(f"never reported, as no sync came after it: {fault}")
        return HAZARD_EXIT_CODE
    return code


def _environment(
    options: Options, libraries: list[Path], report_folder: Path, site: list[Path]
) -> dict[str, str]:
    environment = os.environ | options.environment(libraries[0], report_folder)
    operators = operators_folder(libraries[0], profiles.find(options.profile).release)
    added = {"LD_LIBRARY_PATH": [operators, *libraries], "PYTHONPATH": [HOOK, *site]}
    for name, entries in added.items():
        rest = os.environ.get(name)
        environment[name] = os.pathsep.join([*map(str, entries), *([rest] if rest else [])])
    # As on a host with NPUs: `import torch` brings torch_npu. Elsewhere it may have been turned
    # off, since torch can't be imported with torch_npu installed and no Ascend libraries.
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    environment.setdefault("TORCH_ACL_INIT_CONFIG_PATH", str(acl_configuration(options.cann)))
    if not environment.get("ASCEND_HOME_PATH"):
        # Without it, torch_npu looks for CANN's version in all files below the current folder.
        # With it, these folders have to exist.
        home = report_folder / "cann"
        for name in ("opp", "runtime", "compiler"):
            (home / name).mkdir(parents=True)
        environment["ASCEND_HOME_PATH"] = str(home)
        environment.setdefault("ASCEND_OPP_PATH", str(home / "opp"))
    return environment


def _run(command: list[str], environment: dict[str, str]) -> int:
    started: list[subprocess.Popen[bytes]] = []
    early: list[int] = []  # signals that came before the command was there

    def forward(received: int, _frame: Any) -> None:
        if started:
            started[0].send_signal(received)
        else:
            early.append(received)

    for number in FORWARDED_SIGNALS:
        signal.signal(number, forward)
    from_terminal = sys.stdin is not None and sys.stdin.isatty()
    # A terminal sends it to the command, too; what is ignored here would be ignored there
    signal.signal(signal.SIGINT, (lambda *_: None) if from_terminal else forward)
    process = subprocess.Popen(command, env=environment)
    started.append(process)
    for received in early:
        process.send_signal(received)
    code = process.wait()
    return code if code >= 0 else 128 - code


def merged_report(folder: Path, options: Options) -> dict[str, Any]:
    """Merge the reports that the processes of a command wrote to `folder`."""
    processes = [
        json.loads(path.read_text(errors="replace")) for path in sorted(folder.glob("*.json"))
    ]
    processes = [part for part in processes if any(part["calls"].values())]
    report: dict[str, Any] = {
        "soc": options.soc,
        "profile": options.profile,
        "faults": list(options.faults),
        "devices": options.devices,
        "delay": options.delay,
        "processes": len(processes),
    }
    for name in ("counters", "calls", "kernels", "held_at_exit"):
        report[name] = dict(sum((Counter(part[name]) for part in processes), Counter()))
    peaks = [part["counters"]["peak_memory_bytes"] for part in processes]
    report["counters"]["peak_memory_bytes"] = max(peaks, default=0)
    for name in ("hazards", "allowed_hazards", "errors", "leaks", "unreported_faults"):
        report[name] = [f"process {p['pid']}: {text}" for p in processes for text in p[name]]
    return report


def merged_calls(folder: Path, options: Options) -> str:
    """Merge the calls that the processes of a command wrote to `folder`, as JSON lines."""
    lines = [line for path in folder.glob("*.calls") for line in path.read_text().splitlines()]
    card = {"cann": options.cann, "chip": options.soc}
    found = [json.dumps(card | call) for call in calls.merged(map(json.loads, lines))]
    return "".join(f"{line}\n" for line in found)


def _print_banner(options: Options) -> None:
    _log(
        f"{options.devices} emulated {options.soc}, {options.memory_bytes / (1 << 30):g} GiB each, "
        f"profile {options.profile} (CANN {options.cann}), delay {options.delay}, "
        f"hazards {options.hazards}"
    )
    if options.faults:
        _log(f"kernels misbehave on purpose: {', '.join(options.faults)}")
    _log(f"limits: {LIMITS}")


def _print_summary(report: dict[str, Any]) -> None:
    if report["processes"] == 0:
        _log("the command used no device")
        return
    counted = Counter(report["counters"])
    _log(
        f"{report['processes']} process(es), {counted['launches']} launches, "
        f"{counted['graph_launches']} graph replays, copies h2d {counted['h2d_copies']} "
        f"d2h {counted['d2h_copies']} d2d {counted['d2d_copies']}, {counted['syncs']} syncs, "
        f"{counted['errors']} errors, {counted['hazards']} hazards, "
        f"{len(report['leaks'])} leak{'' if len(report['leaks']) == 1 else 's'}"
    )
    if held := report["held_at_exit"]:
        _log(
            f"at exit torch_npu's allocators held {held['bytes']:,} bytes in {held['blocks']} "
            "block(s) for tensors and graphs, freed when their process ended"
        )
    for kind in ("hazards", "leaks"):
        for text in list(dict.fromkeys(report[kind]))[:10]:
            _log(f"{kind[:-1]}: {text}")


def _print_allowed(patterns: Sequence[str], hazards: Sequence[str]) -> None:
    for pattern in patterns:
        count = sum(fnmatchcase(hazard, f"*{pattern}*") for hazard in hazards)
        _log(f"--allow-hazard {pattern!r} let {count} kind(s) of hazards pass")


def _log(text: str) -> None:
    print(f"npu-emulator: {text}", file=sys.stderr, flush=True)
