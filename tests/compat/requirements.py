"""What vLLM asks for and this environment lacks: ``python -m tests.compat.requirements``."""

from importlib import metadata

from packaging.requirements import Requirement


def unmet(package: str = "vllm") -> dict[str, str | None]:
    """Requirements of a package that are not met, and the version that is there instead."""
    found: dict[str, str | None] = {}
    for each in map(Requirement, metadata.requires(package) or ()):
        if each.marker is None or each.marker.evaluate({"extra": ""}):
            each.marker = None
            try:
                version = metadata.version(each.name)
            except metadata.PackageNotFoundError:
                found[str(each)] = None
                continue
            if not each.specifier.contains(version, prereleases=True):
                found[str(each)] = version
    return found


if __name__ == "__main__":
    for line in unmet():
        print(line)
