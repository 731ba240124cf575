"""``python -m dprims.doctor [URL]``: the doctor with nothing but Python."""

from __future__ import annotations

import argparse
import sys

from ..exceptions import DprimsError
from . import BadUrl, examine
from .report import as_json, show, status_of


def main() -> int:
    """Run the doctor; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dprims.doctor", description="What is wrong, and what to do."
    )
    parser.add_argument("url", nargs="?", help="the backend; default: $DPRIMS_BACKEND, or none")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--strict", action="store_true", help="exit status 1 for warnings, too")
    arguments = parser.parse_args()
    try:
        findings = examine(arguments.url)
    except DprimsError as error:
        sys.stderr.write(f"dprims doctor: {error}\n")
        return 2 if isinstance(error, BadUrl) else 1
    if arguments.json:
        sys.stdout.write(as_json(findings) + "\n")
    else:
        show(findings, sys.stdout)
    return status_of(findings, strict=arguments.strict)


if __name__ == "__main__":
    sys.exit(main())
